"""Rewriting: from Horovod to native DDP under torchrun.

Each use of a name of Horovod becomes what its row of `idioms` says. A DistributedOptimizer becomes
the optimizer itself, and calls of its models go through DistributedDataParallel, wherever they are
called: each model stays the object that it is, under all its names. What is not understood is
listed, and left as it was, so that it raises NameError where it is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import libcst as cst

from hvdtrain.errors import InputError
from hvdtrain.migrate import list_lines
from hvdtrain.migrate.find import (
    Converted,
    Script,
    Use,
    aliases_of,
    bound_name,
    code,
    dotted,
    modules_of,
    walk,
)
from hvdtrain.migrate.idioms import ADDED, ARGUMENTS, IDIOMS, IMPORTS, NEUTRAL, OPTIMIZER, Idiom

Change = Callable[[Any], Any]
"""What becomes of a node whose children have been changed."""

_PARAMETERS = ("named_parameters", "parameters")
_CONVERTIBLE = ([], ["torch"], ["run"], ["runner"])


def to_ddp(text: str, name: str) -> Converted:
    """Return the script on torch.distributed and DistributedDataParallel. Raises InputError."""
    plan = _Plan(Script(text, name))
    changed = plan.script.tree.visit(_Apply(plan.changes))
    made = changed.with_changes(body=plan.with_definitions(changed.body)).code
    try:
        compile(made, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise InputError(f"{name}: the converted script has an error: {error}") from None
    plan.by_hand += list_lines.left_over(made, plan.script.bound(), plan.left)
    return Converted(made, sorted(set(plan.by_hand)), sorted(set(plan.notes)))


class _Apply(cst.CSTTransformer):
    """Makes the changes of a plan, from the inside out."""

    def __init__(self, changes: dict[cst.CSTNode, Change]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        change = self._changes.get(original_node)
        return change(updated_node) if change else updated_node


class _Plan:
    """What is to be changed in a script, what is listed, and what is added."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.changes: dict[cst.CSTNode, Change] = {}
        self.by_hand: list[tuple[int, str]] = []
        self.notes: list[tuple[int, str]] = []
        self.left: Counter[str] = Counter()
        """The names of Horovod that are listed, and stay."""
        self._rows: list[str] = []
        self._models: dict[str, cst.Call] = {}
        self._optimizers: set[str] = set()
        names = {
            node.value
            for node in script.nodes
            if isinstance(node, cst.Name)
            and not (isinstance(up := script.parent(node), cst.Attribute) and up.attr is node)
        }
        imported = {code(n) for n in script.nodes if isinstance(n, (cst.Import, cst.ImportFrom))}
        same = {name for name, line in IMPORTS.items() if line in imported}
        self._taken = names - same - script.bound()
        self._flag = ""  # under this name stays a module that the script tests, and may lack

        uses = script.uses()
        self._num_inits = sum(use.name == "init" for use in uses)
        for use in uses:
            self._use(use)
        for node in script.imports:
            self._import(node)
        self._optimizer_methods()
        self.by_hand += list_lines.names_in_strings(script)
        self.by_hand += list_lines.optimizer_methods(script)
        self.by_hand += list_lines.calls_beside_forward(script, self._models)

    def _fresh(self, name: str) -> str:
        """Return a name that means nothing else in the script, for one of ours."""
        return f"{name}_of_ranks" if name in self._taken else name

    def _list(self, node: cst.CSTNode, why: str) -> None:
        self.by_hand.append((self.script.line(node), why))

    def _leave(self, node: cst.BaseExpression, why: str) -> None:
        """List an expression that names something of Horovod, and stays."""
        self.left[code(node)] += 1
        self._list(node, f"{code(node)}: {why}")

    def _replace(self, node: cst.CSTNode, text: str) -> None:
        new = self._parsed(text).body[0].body[0].value
        self.changes[node] = lambda _: new

    # Uses

    def _use(self, use: Use) -> None:
        """Decide what becomes of one expression."""
        node, name, row = use.node, use.name, IDIOMS.get(use.name)
        parent = self.script.parent(node)
        call = parent if isinstance(parent, cst.Call) and parent.func is node else None
        if not name:
            self._module(node)
        elif row is None or not (row.value or row.call or row.function):
            first = row or IDIOMS.get(name.split(".")[0])
            self._leave(node, (first and first.why) or "has no counterpart")
        elif row.why and not isinstance(parent, cst.IfExp):
            self._leave(node, row.why)
        elif name == "DistributedOptimizer":
            self._optimizer(node, call)
        elif call and row.call and call.args:
            self._leave(node, f"{code(call)} has arguments")
        elif call and row.function and (why := self._not_taken(call, row)):
            self._leave(node, why)
        else:
            self._rows.append(name)
            if row.why or row.note:
                text = f"{row.why}; this branch raises NotImplementedError" if row.why else row.note
                self.notes.append((self.script.line(node), f"{code(node)}: {text}"))
            if name == "init" and self._num_inits > 1 and call:
                self._replace(call, f"(dist.is_initialized() or {row.call})")
            elif row.call and call:
                self._replace(call, row.call)
            elif row.call:
                is_name = row.call.endswith("()")
                self._replace(node, row.call[:-2] if is_name else f"(lambda: {row.call})")
            else:
                self._replace(node, row.value or name)

    @staticmethod
    def _not_taken(call: cst.Call, row: Idiom) -> str:
        """Return which arguments of a call the function of a row does not have."""
        functions = [n for n in cst.parse_module(row.function).body if isinstance(n, cst.FunctionDef)]
        names = [param.name.value for param in functions[-1].params.params]
        given = [arg.keyword.value for arg in call.args if arg.keyword]
        wrong = [name for name in given if name not in names]
        if any(arg.star for arg in call.args) or len(call.args) > len(names):
            wrong.append("its arguments")
        return "; ".join(f"{n}: {ARGUMENTS.get(n, 'has no counterpart')}" for n in wrong)

    def _module(self, node: cst.BaseExpression) -> None:
        """Keep a test of the module itself; list any other use."""
        parent = self.script.parent(node)
        call = self.script.parent(parent)
        tests = (cst.If, cst.IfExp, cst.While, cst.Assert, cst.UnaryOperation, cst.BooleanOperation)
        is_none = isinstance(parent, cst.Comparison) and code(parent).endswith("None")
        if isinstance(node, cst.Name) and (isinstance(parent, tests) or is_none):
            self._flag = self._flag or self._fresh("distributed")
            self._replace(node, self._flag)
        elif isinstance(call, cst.Call) and dotted(call.func) == "hasattr" and call.args[1:]:
            row = IDIOMS.get(code(call.args[1].value).strip("'\""))
            if row and not row.why:
                self._replace(call, "True")
            else:
                self._leave(node, f"{code(call)}: whether it has a counterpart is not known")
        else:
            self._leave(node, "the module itself is passed on; call torch.distributed there")

    # Optimizers

    def _optimizer(self, node: cst.BaseExpression, call: cst.Call | None) -> None:
        """Let DDP average the gradients of the models of an optimizer."""
        if call is None or any(arg.star for arg in call.args):
            self._leave(node, "which optimizer and model? call it with named arguments")
            return
        positional = iter(OPTIMIZER)
        given = {(a.keyword.value if a.keyword else next(positional)): a for a in call.args}
        if wrong := [name for name in given if name not in OPTIMIZER]:
            whys = (f"{name}: {ARGUMENTS.get(name, 'has no counterpart')}" for name in wrong)
            self._leave(node, "; ".join(whys))
            return
        source = given.get("named_parameters") or given["optimizer"]
        models = self._models_of(source.value, call, {code(call)})
        if not models:
            self._leave(node, "whose model? give named_parameters=model.named_parameters()")
            return
        self._rows.append("DistributedOptimizer")
        self._models.update(dict.fromkeys(models, call))
        self._optimizers |= {last_name(target) for target in self._targets(call)}
        for name, arg in given.items():
            text = code(arg.value)
            if (note := OPTIMIZER[name]) and text not in NEUTRAL[name]:
                self.notes.append((self.script.line(arg), f"{name}={text}: {note}"))
        kept = [name for name in given if not OPTIMIZER[name] and name != "named_parameters"]
        self.changes[call] = lambda updated: self._averaging(updated, list(given), kept, models)

    def _averaging(
        self, updated: cst.Call, names: list[str], kept: list[str], models: list[str]
    ) -> cst.Call:
        """Return the call of the added function, in the layout of the original call."""
        by_name = dict(zip(names, updated.args, strict=True))
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        listed = cst.parse_expression(f"[{', '.join(models)}]")
        args: list[cst.Arg] = []
        for name in kept:
            keyword = None if name == "optimizer" else cst.Name(name)
            args.append(by_name[name].with_changes(keyword=keyword, equal=equal if keyword else None))
        given = by_name.get("named_parameters", cst.Arg(listed, comma=args[0].comma))
        models_arg = given.with_changes(keyword=cst.Name("models"), equal=equal, value=listed)
        args.insert(1, models_arg)
        for index, arg in enumerate(args[:-1]):
            if isinstance(arg.comma, cst.MaybeSentinel) or arg is args[index + 1]:
                args[index] = arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)
        args[-1] = args[-1].with_changes(comma=updated.args[-1].comma)
        return updated.with_changes(func=cst.Name(self._fresh("average_gradients")), args=args)

    def _models_of(self, node: cst.CSTNode, at: cst.Call, seen: set[str]) -> list[str]:
        """Return the models whose parameters an expression has, as they are named at the call."""
        found: dict[str, None] = {}
        for part in walk(node):
            if isinstance(part, cst.Call) and isinstance(part.func, cst.Attribute):
                base = part.func.value
                if part.func.attr.value in _PARAMETERS and self._is_visible(base, node, at):
                    found[code(base)] = None
        for part in walk(node) if not found else ():
            if dotted(part) and code(part) not in seen:
                seen.add(code(part))
                for value in self.script.values(part):
                    if code(value) not in seen:
                        found.update(dict.fromkeys(self._models_of(value, at, seen)))
        return list(found)

    def _is_visible(self, base: cst.BaseExpression, node: cst.CSTNode, at: cst.Call) -> bool:
        """Return whether the text of a model means the same at a call as in an expression."""
        root = code(base).split(".")[0].split("[")[0]
        if not root.isidentifier() or "(" in code(base):
            return False
        here, there = self.script.scope(at), self.script.scope(node)
        return root == "self" or here is there or set(here[root]) == set(there[root])

    def _targets(self, node: cst.CSTNode) -> Iterable[str]:
        """Yield what the value of an expression is assigned to."""
        for outer in self.script.around(node):
            if isinstance(outer, cst.Assign):
                yield from (code(target.target) for target in outer.targets)

    def _optimizer_methods(self) -> None:
        """Take away synchronize() and skip_synchronize(): DDP has averaged by then."""
        skips = [
            node
            for node in self.script.nodes
            if isinstance(node, cst.Attribute) and node.attr.value == "skip_synchronize"
        ]
        self._optimizers |= {last_name(code(node.value)) for node in skips}
        for node in skips:
            call = self.script.parent(node)
            item = self.script.parent(call)
            if isinstance(item, cst.WithItem):
                self.changes[self.script.parent(item)] = _without_skip_synchronize
            else:
                self._list(node, f"{code(node)}: remove it, DDP has averaged in backward()")
        for node in self.script.nodes:
            if not isinstance(node, cst.Attribute) or node.attr.value != "synchronize":
                continue
            base, call = node.value, self.script.parent(node)
            if self.script.qualified(base) or not isinstance(call, cst.Call) or call.args:
                continue
            statement = self.script.parent(call)
            if last_name(code(base)) in self._optimizers and isinstance(statement, cst.Expr):
                self.changes[statement] = _removed
            elif last_name(code(base)) in self._optimizers or not list(self.script.values(base)):
                self._list(node, f"{code(node)}(): remove it, if it is an optimizer's")

    # Imports

    def _import(self, node: Any) -> None:
        """Take away an import of Horovod, or keep what the script tests under another name."""
        others = [m for m in modules_of(node) if m.split(".")[1:2] not in _CONVERTIBLE]
        if others or isinstance(node.names, cst.ImportStar):
            self._list(node, f"{code(node)}: import horovod.torch as hvd is what can be converted")
            return
        aliases = aliases_of(node)
        if self._flag:
            flag = self._parsed(f"import torch.distributed as {self._flag}\n").body[0]
            self.changes[node] = lambda _: flag.body[0]
        elif len(aliases) < len(node.names):
            self.changes.update(dict.fromkeys(aliases, _removed))
        else:
            self.changes[node] = _removed
        for outer in self.script.around(node):
            if isinstance(outer, cst.Try):
                self.changes[outer] = _without_empty_try
        bound = {bound_name(alias) for alias in aliases}
        for other in self.script.nodes:
            if isinstance(other, cst.NameItem) and code(other.name) in bound:  # of `global`
                self._replace(other.name, self._flag or bound_name(aliases[0]))
            if isinstance(other, cst.Assign) and code(other.targets[0].target) in bound:
                if self._flag:
                    self._replace(other.targets[0].target, self._flag)
                elif code(other.value) == "None":
                    self.changes[other] = _removed

    # What is added

    def with_definitions(self, body: Sequence[Any]) -> list[Any]:
        """Return the statements of a script with the imports and functions that it needs."""
        rows = dict.fromkeys(name for row in self._rows for name in (*_needed(row), row))
        functions = "\n".join(IDIOMS[name].function for name in rows if IDIOMS[name].function)
        used = functions + "".join(f"{IDIOMS[name].call} {IDIOMS[name].value} " for name in rows)
        at = next((i for i, part in enumerate(body) if not _is_at_the_top(i, part)), len(body))
        present = {code(part) for part in body[:at]}
        lines = [line for name, line in IMPORTS.items() if f"{name}." in used or f"{name}(" in used]
        lines = [line for line in lines if line not in present]
        made = self._parsed("\n".join([*lines, "", functions]) if functions else "\n".join(lines))
        after = list(body[at:])
        if after and functions:
            empty = [cst.EmptyLine(indent=False)] * 2
            comments = [line for line in after[0].leading_lines if line.comment]
            after[0] = after[0].with_changes(leading_lines=[*empty, *comments])
        return [*body[:at], *made.body, *after]

    def _parsed(self, text: str) -> Any:
        """Return the tree of our own code, by names that the script does not use otherwise."""
        return cst.parse_module(text).visit(_Rename(self._fresh))


class _Rename(cst.CSTTransformer):
    def __init__(self, fresh: Callable[[str], str]) -> None:
        super().__init__()
        self._fresh = fresh

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        name = updated_node.value
        return updated_node.with_changes(value=self._fresh(name) if name in ADDED else name)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)


def _removed(_: Any) -> Any:
    return cst.RemoveFromParent()


def last_name(text: str) -> str:
    """Return "optimizer" of "self.optimizer"."""
    return text.rsplit(".", 1)[-1]


def _needed(name: str) -> list[str]:
    """Return the rows whose functions one needs, those first that need none."""
    return [n for first in IDIOMS[name].needs for n in (*_needed(first), first)]


def _is_at_the_top(index: int, statement: Any) -> bool:
    """Return whether a statement is an import, or the docstring."""
    parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else [statement]
    first = getattr(parts[0], "value", None)
    is_docstring = index == 0 and isinstance(first, (cst.SimpleString, cst.ConcatenatedString))
    return is_docstring or all(isinstance(p, (cst.Import, cst.ImportFrom)) for p in parts)


def _without_skip_synchronize(updated: cst.With) -> Any:
    """Return a `with` without the items of Horovod's, or what is in it if it has no others."""
    items = [item for item in updated.items if "skip_synchronize" not in code(item)]
    if items:
        items[-1] = items[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(items=items)
    body = updated.body
    if not isinstance(body, cst.IndentedBlock):
        return cst.SimpleStatementLine(body.body, leading_lines=updated.leading_lines)
    first = body.body[0]
    lines = [*updated.leading_lines, *getattr(first, "leading_lines", ())]
    return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *body.body[1:]])


def _without_empty_try(updated: cst.Try) -> Any:
    """Return what remains of a `try` that tries nothing any more."""
    if updated.body.body:
        return updated
    rest = [part.body.body for part in (updated.orelse, updated.finalbody) if part]
    statements = [statement for part in rest for statement in part]
    return cst.FlattenSentinel(statements) if statements else cst.RemoveFromParent()
