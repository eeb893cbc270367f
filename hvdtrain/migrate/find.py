"""Finding: where a script names Horovod, whatever it calls it, by LibCST's scopes.

`to_hvd`, `rewrite` and `list_lines` use it. Comments and other text are never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata

from hvdtrain.errors import InputError

HOROVOD = "horovod.torch"
_SUBMODULES = ("mpi_ops.", "functions.", "optimizer.", "sync_batch_norm.")
"""Modules of Horovod whose names are in `horovod.torch`, too."""


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
        """Parse a script. Raises InputError if it is no Python, or has no Horovod."""
        try:
            wrapper = metadata.MetadataWrapper(cst.parse_module(text))
        except cst.ParserSyntaxError as error:
            raise InputError(f"{name}: line {error.raw_line}: {error.message}") from None
        self.tree = wrapper.module
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._scopes = wrapper.resolve(metadata.ScopeProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self.nodes = list(_walk(self.tree))
        self.imports = [node for node in self.nodes if module_of(node)]
        found = {name for node in self.imports for name in modules_of(node)}
        if not any(name in ("horovod", HOROVOD) or name.startswith(HOROVOD) for name in found):
            others = ", ".join(sorted(found))
            raise InputError(
                f"{name} uses {others}; only horovod.torch can be converted"
                if found
                else f"{name} does not import horovod.torch"
            )

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

    def uses(self) -> list[Use]:
        """Return every expression that names something of Horovod; of `a.b.c` the longest."""
        found: list[Use] = []
        inner: set[cst.CSTNode] = set()
        for node in self.nodes:
            if not isinstance(node, (cst.Name, cst.Attribute)) or node in inner or not dotted(node):
                continue
            name = self.qualified(node)
            if name.split(".")[0] == "horovod" and not self._is_binding(node):
                inner.update(_walk(node))
                found.append(Use(node, _below(name)))
        return found

    def _is_binding(self, node: cst.CSTNode) -> bool:
        """Return whether a name is bound here, by an import, an assignment or a keyword."""
        kinds = (cst.ImportAlias, cst.ImportFrom, cst.AsName, cst.AssignTarget, cst.NameItem)
        parent = self.parent(node)
        keyword = isinstance(parent, cst.Arg) and parent.keyword is node
        return isinstance(parent, kinds) or keyword

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
        if code(one) != code(other):
            return False
        root = code(one).split(".")[0].split("[")[0]
        if root == "self":
            return self._class_of(one) is self._class_of(other)
        assignments = [set(self.scope(node)[root]) for node in (one, other)]
        return assignments[0] == assignments[1]

    def _class_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return next((n for n in self.around(node) if isinstance(n, cst.ClassDef)), None)


def _below(name: str) -> str:
    below = name.removeprefix(HOROVOD).removeprefix(".") if name.startswith(HOROVOD) else name
    for module in _SUBMODULES:
        below = below.removeprefix(module)
    return below.removeprefix("horovod.") if below != "horovod" else ""


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def walk(node: cst.CSTNode) -> Iterator[Any]:
    """Yield a node and all in it, in the order of the text."""
    return _walk(node)


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
