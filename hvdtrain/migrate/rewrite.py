"""Rewriting: from Horovod to native DDP under torchrun.

Each use of a name of Horovod becomes what its row of `idioms` says. A DistributedOptimizer becomes
the optimizer itself, and calls of its models go through DistributedDataParallel, wherever they are
called: each model stays the object that it is, under all its names. What is not understood is
listed, and left as it was, so that it raises NameError where it is run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import libcst as cst

from hvdtrain.migrate import list_lines
from hvdtrain.migrate.find import (
    CONVERTIBLE,
    Converted,
    Script,
    Use,
    aliases_of,
    bound_name,
    code,
    dotted,
    last_name,
    modules_of,
    walk,
)
from hvdtrain.migrate.idioms import (
    ADDED,
    ARGUMENTS,
    IDIOMS,
    IMPORTS,
    NEUTRAL,
    OPTIMIZER,
    OPTIMIZER_METHODS,
    Idiom,
)

Change = Callable[[Any], Any]
"""What becomes of a node whose children have been changed."""

_PARAMETERS = ("named_parameters", "parameters")


def to_ddp(text: str, name: str) -> Converted:
    """Return the script on torch.distributed and DistributedDataParallel. Raises InputError."""
    script = Script(text, name)
    script.require_horovod(name)
    plan = _Plan(script)
    made = plan.with_definitions(script.tree.visit(_Apply(plan.changes)))
    plan.by_hand += list_lines.left_over(made, script.bound(), plan.left)
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
        functions = [
            n for n in cst.parse_module(row.function).body if isinstance(n, cst.FunctionDef)
        ]
        names = [param.name.value for param in functions[-1].params.params]
        given = [arg.keyword.value for arg in call.args if arg.keyword]
        wrong = [name for name in given if name not in names]
        if any(arg.star for arg in call.args) or len(call.args) > len(names):
            wrong.append("its arguments")
        return "; ".join(f"{n}: {ARGUMENTS.get(n, 'has no counterpart')}" for n in wrong)

    def _module(self, node: cst.BaseExpression) -> None:
        """Keep a test of the module itself; list any other use."""
        parent = self.script.parent(node)
        tests = (cst.If, cst.IfExp, cst.While, cst.Assert, cst.UnaryOperation, cst.BooleanOperation)
        is_none = isinstance(parent, cst.Comparison) and code(parent).endswith("None")
        if isinstance(node, cst.Name) and (isinstance(parent, tests) or is_none):
            self._flag = self._flag or self._fresh("distributed")
            self._replace(node, self._flag)
        else:
            self._leave(node, "the module itself; say here what is done with it")

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
        assigned = (n for n in self.script.around(call) if isinstance(n, cst.Assign))
        self._optimizers.update(last_name(code(n.targets[0].target)) for n in assigned)
        for name, arg in given.items():
            text = code(arg.value)
            if (note := OPTIMIZER[name]) and text not in NEUTRAL[name]:
                self.notes.append((self.script.line(arg), f"{name}={text}: {note}"))
            if name in ("named_parameters", *NEUTRAL):
                self.changes[arg] = _removed
            elif not arg.keyword and name != "optimizer":
                self.changes[arg] = _keyword(name)
        listed = cst.parse_expression(f"[{', '.join(models)}]")
        if named := given.get("named_parameters"):
            self.changes[named] = _keyword("models", listed)
        self.changes[call] = lambda updated: _averaging(
            updated.with_changes(func=cst.Name(self._fresh("average_gradients"))),
            [] if named else [cst.Arg(listed, cst.Name("models"), equal=_EQUAL)],
            call.args[-1].comma,
        )

    def _models_of(self, node: cst.CSTNode, at: cst.Call, seen: set[str]) -> list[str]:
        """Return the models whose parameters an expression has, as they are named at the call."""
        found: dict[str, None] = {}
        for part in walk(node):
            if isinstance(part, cst.Call) and isinstance(part.func, cst.Attribute):
                text = code(part.func.value)
                is_model = part.func.attr.value in _PARAMETERS and "(" not in text
                if is_model and self.script.same_root(text, at, node):
                    found[text] = None
        for part in walk(node) if not found else ():
            if dotted(part) and code(part) not in seen:
                seen.add(code(part))
                for value in self.script.values(part):
                    if code(value) not in seen:
                        found.update(dict.fromkeys(self._models_of(value, at, seen)))
        return list(found)

    def _optimizer_methods(self) -> None:
        """Take away what only Horovod's optimizers have: DDP has averaged in backward()."""
        found = [
            (node, code(node.value), self.script.parent(node))
            for node in self.script.nodes
            if isinstance(node, cst.Attribute) and node.attr.value in OPTIMIZER_METHODS
        ]
        skips = (base for node, base, _ in found if node.attr.value == "skip_synchronize")
        self._optimizers.update(map(last_name, skips))
        for node, base, call in found:
            is_known = last_name(base) in self._optimizers
            around = self.script.parent(call)
            if node.attr.value != "synchronize" and isinstance(around, cst.WithItem):
                self.changes[self.script.parent(around)] = _without_skip_synchronize
            elif node.attr.value == "synchronize" and is_known and isinstance(around, cst.Expr):
                self.changes[around] = _removed
            elif is_known or not (
                self.script.qualified(node) or any(self.script.values(node.value))
            ):
                self._list(node, f"{code(node)}: remove it if it is an optimizer's")

    # Imports

    def _import(self, node: Any) -> None:
        """Take away an import of Horovod, or keep what the script tests under another name."""
        others = [m for m in modules_of(node) if m.split(".")[1:2] not in CONVERTIBLE]
        if others or isinstance(node.names, cst.ImportStar):
            self._list(node, f"{code(node)}: import horovod.torch as hvd is what can be converted")
            return
        aliases = aliases_of(node)
        if self._flag and len(aliases) == len(node.names):
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

    def with_definitions(self, tree: cst.Module) -> str:
        """Return the text of a script with the imports and functions that it needs."""
        rows = dict.fromkeys(name for row in self._rows for name in (*_needed(row), row))
        functions = "\n".join(IDIOMS[name].function for name in rows if IDIOMS[name].function)
        used = functions + "".join(f"{IDIOMS[name].call} {IDIOMS[name].value} " for name in rows)
        body = list(tree.body)
        at = next((i for i, part in enumerate(body) if not _is_at_the_top(i, part)), len(body))
        top = tree.with_changes(body=body[:at], footer=())
        rest = tree.with_changes(body=body[at:], header=())
        lines = [line for name, line in IMPORTS.items() if re.search(rf"\b{name}[.(]", used)]
        added = "".join(f"{line}\n" for line in lines if line not in top.code.splitlines())
        if functions:
            added = f"{added}\n{functions}\n\n"
        above = top.code if body[:at] or top.header else ""
        return f"{above}{self._parsed(added).code}{rest.code.lstrip(chr(10))}"

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


_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def _keyword(name: str, value: cst.BaseExpression | None = None) -> Change:
    """Return the change of an argument into one with a keyword."""
    return lambda updated: updated.with_changes(
        keyword=cst.Name(name), equal=_EQUAL, value=value or updated.value
    )


def _averaging(updated: cst.Call, models: list[cst.Arg], comma: Any) -> cst.Call:
    """Return a call with the models after the optimizer, and the comma that it had at its end."""
    args = [updated.args[0], *models, *updated.args[1:]]
    args[0] = args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT) if models else args[0]
    args[-1] = args[-1].with_changes(comma=comma)
    return updated.with_changes(args=args)


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
    inner: Any = updated.body.body
    if not isinstance(updated.body, cst.IndentedBlock):
        inner = [cst.SimpleStatementLine(inner)]
    lines = [*updated.leading_lines, *inner[0].leading_lines]
    return cst.FlattenSentinel([inner[0].with_changes(leading_lines=lines), *inner[1:]])


def _without_empty_try(updated: cst.Try) -> Any:
    """Return nothing for a `try` that tries nothing any more."""
    is_empty = not (updated.body.body or updated.orelse or updated.finalbody)
    return cst.RemoveFromParent() if is_empty else updated
