"""Finding: where a script names Horovod, whatever it calls it, by LibCST's scopes.

`to_hvd`, `rewrite` and `list_lines` use it. Comments and other text are never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata

from hvdtrain.errors import InputError

HOROVOD = "horovod.torch"
_SUBMODULES = ("mpi_ops.", "functions.", "optimizer.", "sync_batch_norm.")
"""Modules of Horovod whose names are in `horovod.torch`, too."""


CONVERTIBLE: tuple[list[str], ...] = ([], ["torch"], ["run"], ["runner"])
"""What follows `horovod` in the imports that can be converted."""


@dataclass
class Converted:
    """The new text of a script, and what the conversion says of it: (line, text), by line."""

    text: str
    not_converted: list[tuple[int, str]] = field(default_factory=list)
    """What is to be done by hand."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """What computes other last bits, or is worth a look."""


@dataclass(frozen=True)
class Use:
    """An expression that names something of Horovod: "allreduce" of `horovod.torch`."""

    node: cst.BaseExpression
    name: str
    """Below `horovod.torch`, or from `horovod` on if elsewhere; "" for the module itself."""


class Script:
    """The tree of a script, and what LibCST knows of its names."""

    def __init__(self, text: str, name: str) -> None:
        """Parse a script. Raises InputError if it is no Python."""
        try:
            wrapper = metadata.MetadataWrapper(cst.parse_module(text))
        except cst.ParserSyntaxError as error:
            raise InputError(f"{name}: line {error.raw_line}: {error.message}") from None
        self.tree = wrapper.module
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._scopes = wrapper.resolve(metadata.ScopeProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self.nodes = list(walk(self.tree))
        self.imports = [node for node in self.nodes if module_of(node)]

    def require_horovod(self, name: str) -> None:
        """Raise InputError if nothing is imported from horovod.torch, or its launcher."""
        found = {module for node in self.imports for module in modules_of(node)}
        if not any(module.split(".")[1:2] in CONVERTIBLE for module in found):
            others = f" imports {', '.join(sorted(found))}; only" if found else " does not import"
            raise InputError(f"{name}{others} horovod.torch{' can be converted' * bool(found)}")

    def line(self, node: cst.CSTNode) -> int:
        """Return the line at which a node begins."""
        return int(self._positions[node].start.line)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the node around one; the module is its own."""
        return self._parents.get(node, self.tree)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around one, from the inside."""
        while node is not self.tree:
            node = self.parent(node)
            yield node

    def scope(self, node: cst.CSTNode) -> metadata.Scope:
        """Return the scope in which an expression is evaluated."""
        for outer in (node, *self.around(node)):
            if scope := self._scopes.get(outer):
                return scope
        return self._scopes[self.tree]  # type: ignore[return-value]

    def qualified(self, node: cst.CSTNode) -> str:
        """Return the imported name that an expression means; "" if it is none."""
        names: Any = self._names.get(node, ())
        for found in names() if callable(names) else names:  # LibCST computes them when asked
            if found.source is metadata.QualifiedNameSource.IMPORT:
                return str(found.name)
        return ""

    def accesses(self) -> Iterator[tuple[cst.BaseExpression, bool]]:
        """Yield each expression that reads a name, with its attributes, and whether the name is
        bound somewhere.
        """
        for scope in dict.fromkeys(self._scopes.values()):
            for access in scope.accesses if scope else ():
                node: Any = access.node
                while isinstance(outer := self.parent(node), cst.Attribute):
                    node = outer
                yield node, bool(access.referents)

    def uses(self) -> list[Use]:
        """Return every expression that names something of Horovod; of `a.b.c` the longest."""
        found = {node: self.qualified(node) for node, _ in self.accesses()}
        return [Use(n, _below(name)) for n, name in found.items() if name.startswith("horovod")]

    def bound(self) -> set[str]:
        """Return the names that the script's imports of Horovod bind."""
        aliases = [a for node in self.imports for a in aliases_of(node)]
        return {bound_name(alias) for alias in aliases}

    def values(self, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
        """Yield what is assigned to a name or attribute that means the same at `node`."""
        for other in self.nodes:
            if isinstance(other, cst.Assign):
                targets = [target.target for target in other.targets]
            elif isinstance(other, (cst.AnnAssign, cst.AugAssign)):
                targets = [other.target]
            else:
                continue
            value = other.value
            if value is not None and any(self.same_variable(node, target) for target in targets):
                yield value

    def same_variable(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether two expressions of the same text name the same variable."""
        return code(one) == code(other) and self.same_root(code(one), one, other)

    def same_root(self, text: str, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether a text begins with the same variable at two places."""
        root = re.match(r"\w*", text)[0]  # type: ignore[index]
        if root == "self":
            return self._class_of(one) is self._class_of(other)
        here, there = self.scope(one), self.scope(other)
        return here is there or set(here[root]) == set(there[root])

    def _class_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return next((n for n in self.around(node) if isinstance(n, cst.ClassDef)), None)


def _below(name: str) -> str:
    below = name.removeprefix(HOROVOD).removeprefix(".") if name.startswith(HOROVOD) else name
    for module in _SUBMODULES:
        below = below.removeprefix(module)
    return below.removeprefix("horovod.") if below != "horovod" else ""


def walk(node: cst.CSTNode) -> Iterator[Any]:
    """Yield a node and all in it, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


def module_of(node: cst.CSTNode) -> str:
    """Return which module of Horovod an import statement names first; "" for other nodes."""
    return next(iter(modules_of(node)), "")


def modules_of(node: cst.CSTNode) -> list[str]:
    """Return the modules of Horovod that an import statement names."""
    if isinstance(node, cst.Import):
        found = [dotted(item.name) for item in node.names]
    elif isinstance(node, cst.ImportFrom) and not node.relative:
        base = dotted(node.module)
        names = [f"{base}.{item.evaluated_name}" for item in aliases_of(node)]
        found = names if base == "horovod" and names else [base]
    else:
        return []
    return [name for name in found if name.split(".")[0] == "horovod"]


def aliases_of(node: cst.CSTNode) -> list[cst.ImportAlias]:
    """Return the names that an import statement of Horovod lists; none for a star."""
    names = getattr(node, "names", ())
    if isinstance(node, cst.Import):
        return [item for item in names if dotted(item.name).split(".")[0] == "horovod"]
    return [] if isinstance(names, cst.ImportStar) else list(names)


def bound_name(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds."""
    return (alias.evaluated_alias or alias.evaluated_name).split(".")[0]


def dotted(node: cst.CSTNode | None) -> str:
    """Return a name, or names with dots between; "" for any other expression, and for none."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr.value}"
    return ""


def code(node: cst.CSTNode) -> str:
    """Return the text of a node."""
    return cst.Module([]).code_for_node(node).strip()


def last_name(text: str) -> str:
    """Return "optimizer" of "self.optimizer"."""
    return text.rsplit(".", 1)[-1]
