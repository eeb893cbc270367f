"""Rewriting: from Horovod to native DDP under torchrun.

Each name of Horovod becomes what the tables of `idioms` say, or a function of `added`. A
DistributedOptimizer becomes the optimizer itself, and calls of its models go through
DistributedDataParallel, wherever they are called: each model stays the object that it is, under all
its names. What is not understood is listed, and left as it was, so that it raises NameError where
it is run.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import dropwhile, takewhile
from typing import Any

import libcst as cst

from hvdtrain.migrate import list_lines
from hvdtrain.migrate.added import SOURCE
from hvdtrain.migrate.find import (
    Change,
    Converted,
    Script,
    changed,
    code,
    dotted,
    names_in,
    replaced_by,
    walk,
)
from hvdtrain.migrate.idioms import BECOMES, BY_HAND, NEUTRAL, NOTES, OPTIMIZER

_TOP = re.compile(r"(import|from) [^;]*$|[rR]?[\"']")
"""The docstring, and imports."""
_TESTS = (cst.If, cst.IfExp, cst.While, cst.Assert, cst.UnaryOperation, cst.BooleanOperation)

_BINDS = r"^(?:class|def) (\w+)|^(\w+) =|^(?:import|from) .*?(\w+)$"
_NAMES = ["".join(groups) for groups in re.findall(_BINDS, SOURCE, re.MULTILINE)]
_ADDED: dict[str, Any] = dict(zip(_NAMES, cst.parse_module(SOURCE).body, strict=True))
_OF_OTHERS = "atexit contextlib os time torch weakref DistributedDataParallel"
_RENAMED = {*_ADDED, "distributed"} - {*_OF_OTHERS.split()}
FUNCTIONS = {
    name: [param.name.value for param in part.params.params]
    for name, part in _ADDED.items()
    if isinstance(part, cst.FunctionDef)
}
"""The arguments of the functions that can be added."""


def to_ddp(text: str, name: str) -> Converted:
    """Return the script on torch.distributed and DistributedDataParallel. Raises InputError."""
    script = Script(text, name)
    script.require_horovod(name)
    plan = _Plan(script)
    made = plan.with_definitions(changed(script.tree, plan.changes))
    by_hand = {
        *plan.by_hand,
        *list_lines.listed(script, plan.models),
        *list_lines.left_over(made, script.bound(), plan.left),
    }
    notes = {*plan.notes, *(list_lines.unused_layers(script) if plan.models else ())}
    return Converted(made, sorted(by_hand), sorted(notes))


class _Plan:
    """What is to be changed in a script, what is listed, and what is added."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.changes: dict[cst.CSTNode, Change] = {}
        self.by_hand: list[tuple[int, str]] = []
        self.notes: list[tuple[int, str]] = []
        self.left: Counter[str] = Counter()
        """The names of Horovod that are listed, and stay."""
        self.models: dict[str, cst.Call] = {}
        """The models whose calls go through DDP, and the call that has each."""
        self._needed: set[str] = set()
        """The names that the new text has."""
        imports = {code(n) for n in script.nodes if isinstance(n, (cst.Import, cst.ImportFrom))}
        same = {name for name, part in _ADDED.items() if code(part) in imports}
        self._taken = {n.value for n in names_in(script.tree)} - same - script.bound()
        self._flag = ""  # under this name stays a module that the script tests, and may lack
        uses, text = script.uses(), script.tree.code
        # Whether a step on zeros changes anything; not of SGD without weight decay.
        self._has_hidden_step = "SGD" not in text or "weight_decay" in text
        self._has_many_inits = list(uses.values()).count("init") > 1
        for node, name in uses.items():
            self._use(node, name)
        for statement in dict.fromkeys(found.statement for found in script.imports):
            self._import(statement)

    def _fresh(self, name: str) -> str:
        """Return a name that means nothing else in the script, for one of ours."""
        is_taken = name in self._taken and name in _RENAMED
        return f"{name}_of_ranks" if is_taken else name

    def _leave(self, node: cst.BaseExpression, why: str) -> None:
        """List an expression that names something of Horovod, and stays."""
        self.left[code(node)] += 1
        self.by_hand.append((self.script.line(node), f"{code(node)}: {why}"))

    def _note(self, node: cst.CSTNode, what: str, note: str) -> None:
        self.notes.append((self.script.line(node), f"{what}: {note}"))

    def _replace(self, node: cst.CSTNode, text: str) -> None:
        new = self._renamed(cst.parse_expression(text))
        self.changes[node] = lambda _: new

    def _renamed(self, tree: Any) -> Any:
        """Return our own code by names that the script does not use otherwise. Note its names."""
        names = names_in(tree)
        if not re.match(r"import|from", code(tree)):  # an import names no other
            self._needed |= {node.value for node in names}
        return changed(tree, {n: replaced_by(self._fresh(n.value)) for n in names})

    # Uses

    def _use(self, node: cst.BaseExpression, name: str) -> None:
        """Decide what becomes of one expression."""
        parent = self.script.parent(node)
        call = parent if isinstance(parent, cst.Call) and parent.func is node else None
        new = BECOMES.get(name, name)
        is_branch = isinstance(parent, cst.IfExp)
        why = BY_HAND.get(name.split(".")[0], "")
        if not name:
            self._module(node)
        elif name == "DistributedOptimizer":
            if why := self._optimizer(call):
                self._leave(node, why)
        elif why and not (name in BECOMES and is_branch):
            self._leave(node, why)
        elif name not in BECOMES and name not in FUNCTIONS:
            self._leave(node, "has no counterpart")
        elif call and (why := self._not_taken(call, FUNCTIONS.get(name, []))):
            self._leave(node, why)
        else:
            if why:
                self._note(node, code(node), f"{why}; this branch raises NotImplementedError")
            elif name in NOTES and (name != "broadcast_optimizer_state" or self._has_hidden_step):
                self._note(node, code(node), NOTES[name])
            if name == "init" and self._has_many_inits:
                new = f"(dist.is_initialized() or {new})"
            if call and new.endswith(")"):
                self._replace(call, new)
            else:
                is_call = new.endswith(")") and not new.endswith("()")
                self._replace(node, f"(lambda: {new})" if is_call else new.removesuffix("()"))

    @staticmethod
    def _not_taken(call: cst.Call, names: list[str]) -> str:
        """Return which arguments of a call have no counterpart among `names`."""
        given = [arg.keyword.value for arg in call.args if arg.keyword]
        wrong = [name for name in given if name not in names]
        if any(arg.star for arg in call.args) or len(call.args) > len(names) + len(wrong):
            wrong.append("its arguments")
        return "; ".join(f"{n}: {BY_HAND.get(n, 'has no counterpart')}" for n in wrong)

    def _module(self, node: cst.BaseExpression) -> None:
        """Keep a test of the module itself; list any other use."""
        parent = self.script.parent(node)
        is_none = isinstance(parent, cst.Comparison) and code(parent).endswith("None")
        if isinstance(node, cst.Name) and (isinstance(parent, _TESTS) or is_none):
            self._flag = self._flag or self._fresh("distributed")
            self._replace(node, self._flag)
        else:
            self._leave(node, "the module as a value; name the functions that are used")

    # Optimizers

    def _optimizer(self, call: cst.Call | None) -> str:
        """Let DDP average the gradients of the models of an optimizer; return why it cannot."""
        if call is None:
            return "used as a value; call it with an optimizer and named_parameters"
        if why := self._not_taken(call, OPTIMIZER):
            return why
        keys = [a.keyword.value if a.keyword else OPTIMIZER[i] for i, a in enumerate(call.args)]
        given = dict(zip(keys, call.args, strict=True))
        source = given.get("named_parameters") or given["optimizer"]
        models = self._models_of(source.value, call, {code(call)})
        texts = {key: code(arg.value) for key, arg in given.items()}
        noted = [key for key in keys if key in NOTES and texts[key] not in NEUTRAL]
        if not models:
            return "cannot find the model; pass named_parameters=model.named_parameters()"
        if "backward_passes_per_step" in noted and "Average" not in texts.get("op", "Average"):
            return "DDP would sum the first passes again in each later pass; use op=hvd.Average"
        self.models.update(dict.fromkeys(models, call))
        for key in noted:
            self._note(given[key], f"{key}={texts[key]}", NOTES[key])
        function = self._renamed(cst.Name("average_gradients"))
        listed = cst.parse_expression(f"[{', '.join(models)}]")

        def change(updated: cst.Call) -> cst.Call:
            args = dict(zip(keys, updated.args, strict=True))
            first = args["optimizer"]
            if "named_parameters" not in args:
                first = first.with_changes(comma=cst.MaybeSentinel.DEFAULT)
            models_arg = args.get("named_parameters", cst.Arg(listed))
            args["models"] = models_arg.with_changes(value=listed)
            named = [
                args[key].with_changes(keyword=cst.Name(key), equal=_EQUAL)
                for key in ("models", "compression", "op")
                if key in args
            ]
            named[-1] = named[-1].with_changes(comma=updated.args[-1].comma)
            return updated.with_changes(func=function, args=[first, *named])

        self.changes[call] = change
        return ""

    def _models_of(self, node: cst.CSTNode, at: cst.Call, seen: set[str]) -> dict[str, None]:
        """Return the models whose parameters an expression has, as they are named at the call, in
        the order of the keys.
        """
        found: dict[str, None] = {}
        for part in walk(node):
            if isinstance(part, cst.Call) and isinstance(part.func, cst.Attribute):
                text = code(part.func.value)
                is_model = part.func.attr.value in ("named_parameters", "parameters")
                if is_model and "(" not in text and self.script.same_root(text, at, node):
                    found[text] = None
        for part in walk(node) if not found else ():
            if dotted(part) and code(part) not in seen:
                seen.add(code(part))
                for value in self.script.values(part):
                    if code(value) not in seen:
                        found |= self._models_of(value, at, seen)
        return found

    # Imports

    def _import(self, statement: Any) -> None:
        """Take away an import of Horovod, or keep what the script tests under another name."""
        own = [found for found in self.script.imports if found.statement is statement]
        if not all(found.is_convertible and found.bound for found in own):
            text = f"{code(statement)}: only import horovod.torch as hvd can be converted"
            self.by_hand.append((self.script.line(statement), text))
            return
        if len(own) < len(statement.names):
            self.changes.update({found.alias: _removed for found in own})
        elif self._flag:
            flag: Any = cst.parse_statement(f"import torch.distributed as {self._flag}")
            self.changes[statement] = lambda _: flag.body[0]
        else:
            self.changes[statement] = _removed
        for outer in self.script.around(statement):
            if isinstance(outer, cst.Try):
                self.changes[outer] = _without_empty_try
        bound = {found.bound for found in own}
        for other in self.script.nodes:
            if isinstance(other, cst.NameItem) and code(other.name) in bound:  # of `global`
                self._replace(other.name, self._flag or own[0].bound)
            if isinstance(other, cst.Assign) and code(target := other.targets[0].target) in bound:
                if self._flag:
                    self._replace(target, self._flag)
                elif code(other.value) == "None":
                    self.changes[other] = _removed

    # What is added

    def with_definitions(self, tree: cst.Module) -> str:
        """Return the text of a script with the imports and functions that it needs."""
        body: list[Any] = list(tree.body)
        texts = [code(part.with_changes(leading_lines=())) for part in body]
        at = len(list(takewhile(_TOP.match, texts)))
        added: list[Any] = []
        for name, part in reversed(_ADDED.items()):  # each names only those above it
            if name in self._needed and code(part) not in texts[:at]:
                added.insert(0, self._renamed(part))
        if at < len(body) and added and not isinstance(added[-1], cst.SimpleStatementLine):
            comments = dropwhile(lambda line: not line.comment, body[at].leading_lines)
            blank = [cst.EmptyLine(indent=False)] * 2
            body[at] = body[at].with_changes(leading_lines=[*blank, *comments])
        return tree.with_changes(body=[*body[:at], *added, *body[at:]]).code


def _removed(_: Any) -> Any:
    return cst.RemoveFromParent()


_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def _without_empty_try(updated: cst.Try) -> Any:
    """Return nothing for a `try` that tries nothing any more."""
    is_empty = not (updated.body.body or updated.orelse or updated.finalbody)
    return cst.RemoveFromParent() if is_empty else updated
