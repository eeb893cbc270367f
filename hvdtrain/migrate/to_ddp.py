"""From Horovod to native DDP under torchrun.

A table has what each call becomes: an expression, or a function that is added to the script. Where
the optimizer is wrapped, the model is instead; buffers stay each rank's own, as under Horovod. What
has no counterpart is listed, and left as it was where it would fail; a mean where the script asks
for another combination is listed, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate.converted import HOROVOD, Converted, ScriptTransformer, dotted, parsed

# Calls without arguments.
EXPRESSIONS = {
    "init": "dist.init_process_group()",
    "shutdown": "dist.destroy_process_group()",
    "is_initialized": "dist.is_initialized()",
    "rank": "dist.get_rank()",
    "size": "dist.get_world_size()",
    "local_rank": 'int(os.environ["LOCAL_RANK"])',
    "local_size": 'int(os.environ["LOCAL_WORLD_SIZE"])',
    "cross_rank": 'int(os.environ["GROUP_RANK"])',
    "cross_size": 'int(os.environ["GROUP_WORLD_SIZE"])',
    "barrier": "dist.barrier()",
}
# Calls that become one of a function that is added, and its arguments in Horovod's order.
FUNCTIONS = {
    "allreduce": ("tensor", "average", "name", "op"),
    "broadcast": ("tensor", "root_rank", "name"),
    "broadcast_object": ("obj", "root_rank", "name"),
    "allgather_object": ("obj", "name"),
    "broadcast_parameters": ("params", "root_rank"),
    "broadcast_optimizer_state": ("optimizer", "root_rank"),
}
SOURCE = {
    "allreduce": """
def allreduce(tensor, average=None, name=None, op="mean"):
    \"\"\"Return the mean over the ranks, or their sum.\"\"\"
    result = tensor.clone()
    dist.all_reduce(result)
    is_sum = op == "sum" or average is False
    return result if is_sum else result / dist.get_world_size()
""",
    "broadcast": """
def broadcast(tensor, root_rank, name=None):
    \"\"\"Return the tensor of one rank.\"\"\"
    result = tensor.clone()
    dist.broadcast(result, src=root_rank)
    return result
""",
    "broadcast_object": """
def broadcast_object(obj, root_rank=0, name=None):
    \"\"\"Return the object of one rank.\"\"\"
    found = [obj]
    dist.broadcast_object_list(found, src=root_rank)
    return found[0]
""",
    "allgather_object": """
def allgather_object(obj, name=None):
    \"\"\"Return the objects of all ranks, in rank order.\"\"\"
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, obj)
    return found
""",
    "broadcast_parameters": """
def broadcast_parameters(params, root_rank=0):
    \"\"\"Give all ranks the tensors of one.\"\"\"
    for _, tensor in sorted(params.items() if isinstance(params, dict) else params):
        dist.broadcast(tensor.data, src=root_rank)
""",
    "broadcast_optimizer_state": """
def broadcast_optimizer_state(optimizer, root_rank=0):
    \"\"\"Give all ranks the state of one.\"\"\"
    found = [optimizer.state_dict()]
    dist.broadcast_object_list(found, src=root_rank)
    optimizer.load_state_dict(found[0])
""",
}
OPS = {"Average": '"mean"', "Sum": '"sum"'}
_PARAMETERS = re.compile(r"([\w.]+)\.(?:named_)?parameters\(\)")
_STATES = ("state_dict", "load_state_dict", "parameters", "named_parameters")
WHY = {
    "join": "DDP has the context manager model.join(), around the loop",
    "elastic": "torchrun --nnodes MIN:MAX --max-restarts starts ranks again; state is the script's",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP",
    "allreduce_": "torch.distributed.all_reduce is in place, and adds",
    "allgather": "torch.distributed.all_gather wants equal shapes",
    "alltoall": "torch.distributed.all_to_all_single",
}


def to_ddp(text: str, name: str) -> Converted:
    """Return the script on torch.distributed and DistributedDataParallel. Raises InputError."""
    tree, survey = parsed(text, name), _Survey()
    tree.visit(survey)
    change = _ToDdp(survey)
    made = tree.visit(change)
    made = made.with_changes(body=_with_definitions(made.body, change))
    return Converted(made.code, sorted(change.left), sorted(change.notes))


class _InFunctions(ScriptTransformer):
    """Knows in which function a node is; "" for the module."""

    def __init__(self) -> None:
        super().__init__()
        self._functions = [""]

    @property
    def function(self) -> str:
        """The innermost function around the node that is visited."""
        return self._functions[-1]

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Enter a function."""
        self._functions.append(node.name.value)

    def leave_FunctionDef(self, original_node: Any, updated_node: Any) -> Any:
        """Leave it."""
        self._functions.pop()
        return updated_node


class _Survey(_InFunctions):
    """Reads which optimizers and models are wrapped, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: set[str] = set()
        """The names of the wrapped optimizers."""
        self.models: dict[str, tuple[str, int]] = {}
        """By name of a model to wrap: the function and the line in which it is wrapped."""
        self._of: dict[str, str] = {}  # the model whose parameters an optimizer was made of

    def visit_Assign(self, node: cst.Assign) -> None:
        """Note an optimizer that is made, or wrapped."""
        target = _code(node.targets[0].target)
        if isinstance(node.value, cst.Call) and self._wraps(node.value):
            self.optimizers.add(target)
        elif found := _PARAMETERS.search(_code(node.value)):
            self._of[target] = found[1]

    def visit_Call(self, node: cst.Call) -> None:
        """Note a model whose optimizer is wrapped."""
        if self._wraps(node) and (model := self.model_of(node)):
            self.models[model] = self.function, self.line(node)

    def _wraps(self, call: cst.Call) -> bool:
        return self.called(call.func) == "DistributedOptimizer"

    def model_of(self, call: cst.Call) -> str:
        """Return whose parameters a DistributedOptimizer has; "" if that cannot be seen."""
        if found := _PARAMETERS.search(_code(call)):
            return found[1]
        return self._of.get(_code(call.args[0].value), "") if call.args else ""


class _ToDdp(_InFunctions):
    """Changes the script. Afterwards it has what could not be, and what is to be added."""

    def __init__(self, survey: _Survey) -> None:
        super().__init__()
        self.survey = survey
        self.left: list[tuple[int, str]] = []
        self.notes: list[tuple[int, str]] = []
        self.functions: set[str] = set()
        self.needs_os = self.needs_fp16 = False
        self._in_wrap = False
        self._options_of_wrap: set[int] = set()

    def _leave(self, node: cst.CSTNode, text: str) -> None:
        self.left.append((self.line(node), text))

    # Imports

    def leave_Import(
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.Import | cst.RemovalSentinel:
        """Remove `import horovod.torch`."""
        names = [dotted(item.name) for item in original_node.names]
        if "horovod" in names:
            self._leave(original_node, "horovod.run: start the script by torchrun instead")
        if HOROVOD not in names:
            return updated_node
        kept = [item for item in updated_node.names if dotted(item.name) != HOROVOD]
        if not kept:
            return cst.RemoveFromParent()
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(names=kept)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        """Remove `from horovod import torch as hvd`; list other forms."""
        module = dotted(original_node.module)
        if module.split(".")[0] != "horovod":
            return updated_node
        if self.alias and module == "horovod":
            return cst.RemoveFromParent()
        self._leave(original_node, f"from {module} import ...: import horovod.torch as hvd instead")
        return updated_node

    # Calls

    def visit_Call(self, node: cst.Call) -> None:
        """Note that the arguments of a DistributedOptimizer follow."""
        if self.called(node.func) == "DistributedOptimizer":
            self._in_wrap = True
            self._options_of_wrap = {id(arg) for arg in node.args if arg.keyword is not None}

    def visit_Arg(self, node: cst.Arg) -> bool:
        """Leave those of a DistributedOptimizer to `_options`."""
        return id(node) not in self._options_of_wrap

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Convert a call by the tables, and one of a wrapped model."""
        name = self.called(original_node.func)
        self._in_wrap &= name != "DistributedOptimizer"
        if name in EXPRESSIONS and not original_node.args:
            self.needs_os |= "os.environ" in EXPRESSIONS[name]
            return cst.parse_expression(EXPRESSIONS[name])
        if name == "broadcast_parameters" and self._is_done_by_ddp(original_node):
            return updated_node  # its statement is removed
        if name in FUNCTIONS and self._takes(original_node, FUNCTIONS[name]):
            self.functions.add(name)
            return updated_node.with_changes(func=cst.Name(name))
        method = original_node.func
        inner = self._inner(method) if isinstance(method, cst.Attribute) and not name else None
        if inner is not None:
            return updated_node.with_changes(func=method.with_changes(value=inner))
        return updated_node

    def _inner(self, method: cst.Attribute) -> cst.BaseExpression | None:
        """Return what is inside of a wrapped model, whose names have no prefix; None for others."""
        if self._in_wrap or method.attr.value not in _STATES:
            return None
        model = _code(method.value)
        function, line = self.survey.models.get(model, ("", 0))
        if not line or (function == self.function and self.line(method) <= line):
            return None
        if function == self.function:
            return cst.Attribute(method.value, cst.Name("module"))
        return cst.parse_expression(f'getattr({model}, "module", {model})')  # before it, or after

    def _takes(self, call: cst.Call, names: Sequence[str]) -> bool:
        """Return whether a function has all arguments of a call; list the others."""
        unknown = [a.keyword.value for a in call.args if a.keyword and a.keyword.value not in names]
        if unknown or len(call.args) > len(names):
            self._leave(call, f"{_code(call.func)}: {', '.join(unknown) or 'its arguments'}")
        return not unknown and len(call.args) <= len(names)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Convert Average and Sum."""
        op = OPS.get(self.called(original_node))
        return cst.parse_expression(op) if op else updated_node

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        """List what has no row in the tables."""
        name = self.called(node)
        if not name or name in (*EXPRESSIONS, *FUNCTIONS, *OPS, "DistributedOptimizer"):
            return True
        why = WHY.get(name.split(".")[0])
        text = f"{self.alias}.{name} has no counterpart"
        self._leave(node, f"{text}; {why}" if why else text)
        return False

    # Statements

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Wrap the model where the optimizer was; remove what DDP does by itself."""
        statement = original_node.body[0]
        value = getattr(statement, "value", None)
        if len(original_node.body) != 1 or not isinstance(value, cst.Call):
            return updated_node
        if self.called(value.func) == "DistributedOptimizer":
            return self._wrap(original_node, updated_node, value)
        if self.called(value.func) == "broadcast_parameters" and self._is_done_by_ddp(value):
            return cst.RemoveFromParent()
        optimizer, _, method = _code(value.func).rpartition(".")
        if method == "synchronize" and optimizer in self.survey.optimizers:
            return cst.RemoveFromParent()
        return updated_node

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        """Take the statements out of `with optimizer.skip_synchronize()`."""
        items = [_code(item.item) for item in original_node.items]
        if len(items) == 1 and items[0].endswith(".skip_synchronize()"):
            body = updated_node.body
            return cst.FlattenSentinel(body.body) if isinstance(body, cst.IndentedBlock) else body
        return updated_node

    def _is_done_by_ddp(self, call: cst.Call) -> bool:
        """Return whether it broadcasts the whole state of a model from rank 0, as DDP does."""
        found = re.fullmatch(r"\S+\((\w+)\.state_dict\(\)(, (root_rank=)?0)?\)", _code(call))
        return found is not None and found[1] in self.survey.models

    def _wrap(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine, call: cst.Call
    ) -> Any:
        """Return the statements that wrap the model, in place of the optimizer."""
        model = self.survey.model_of(call)
        changed = updated.body[0]
        inner = changed.value if isinstance(changed, cst.Assign) else None
        if not model or not isinstance(inner, cst.Call) or not isinstance(changed, cst.Assign):
            self._leave(call, "DistributedOptimizer: whose model? give named_parameters=")
            return updated
        optimizer, target = _code(inner.args[0].value), _code(changed.targets[0].target)
        lines = [f"{target} = {optimizer}"] if target != optimizer else []
        lines.append(f"{model} = DistributedDataParallel({model}, broadcast_buffers=False)")
        lines += self._options(call, model)
        made = [cst.parse_statement(line) for line in lines]
        made[0] = made[0].with_changes(leading_lines=original.leading_lines)
        return cst.FlattenSentinel(made)

    def _options(self, call: cst.Call, model: str) -> list[str]:
        """Return the lines for the other arguments of DistributedOptimizer."""
        lines: list[str] = []
        line = self.line(call)
        for arg in call.args[1:]:
            name = arg.keyword.value if arg.keyword else ""
            value, text = arg.value, _code(arg.value)
            if name == "named_parameters" or text in _DEFAULTS.get(name, ()):
                continue
            if name == "compression" and "fp16" in text:
                self.needs_fp16 = True
                hook = f"{model}.register_comm_hook(None, fp16_compress_hook)"
                if isinstance(value, cst.IfExp) and "fp16" in _code(value.body):
                    hook = f"if {_code(value.test)}:\n    {hook}\n"
                lines.append(hook)
                self.notes.append(
                    (line, "compression: DDP divides before it adds; other last bits")
                )
            elif name == "compression" and text.endswith("Compression.none"):
                continue
            elif name in _NOTES:
                self.notes.append((line, f"{name}={text}: {_NOTES[name]}"))
            elif name == "op" and text != f"{self.alias}.Average":
                self._leave(call, f"op={text}: DDP takes the mean")
            elif name != "op":
                self._leave(call, f"DistributedOptimizer({name or text}) has no counterpart")
        return lines


_DEFAULTS = {"backward_passes_per_step": ("1",), "gradient_predivide_factor": ("1", "1.0")}
_NOTES = {
    "backward_passes_per_step": "DDP averages in each backward pass, and only in the last one if "
    "the others are in model.no_sync()",
    "gradient_predivide_factor": "DDP divides by the ranks; other last bits",
}


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node).strip()


def _with_definitions(body: Sequence[Any], change: _ToDdp) -> list[Any]:
    """Return the statements of a script with the imports and functions that it needs."""
    at = 0
    for index, statement in enumerate(body):
        parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        if any(isinstance(part, (cst.Import, cst.ImportFrom)) for part in parts):
            at = index + 1
    has_os = any(_code(statement) == "import os" for statement in body)
    lines = ["import os"] if change.needs_os and not has_os else []
    lines.append("import torch.distributed as dist")
    if change.survey.models:
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    if change.needs_fp16:
        hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        lines.append(f"from {hooks} import fp16_compress_hook")
    functions = "".join(f"\n{SOURCE[name]}" for name in sorted(change.functions))
    made = cst.parse_module("\n".join(lines) + "\n" + functions)
    after = list(body[at:])
    if after and change.functions:
        empty = [cst.EmptyLine(indent=False)] * 2
        comments = [line for line in after[0].leading_lines if line.comment]
        after[0] = after[0].with_changes(leading_lines=[*empty, *comments])
    return [*body[:at], *made.body, *after]
