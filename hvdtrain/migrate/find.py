"""Finding: where a script names Horovod, whatever it calls it, by LibCST's scopes.

`to_hvd`, `rewrite` and `list_lines` use it. Comments and other text are never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata

from hvdtrain.errors import InputError

Change = Callable[[Any], Any]
"""What becomes of a node whose children have been changed."""

_IMPORTER = re.compile(r"[\w.]*(import_module|find_spec|__import__)\(")
_SUBMODULES = re.compile(
    r"horovod(\.torch)?\.?((mpi_ops|functions|optimizer|compression|sync_batch_norm)\.)?"
)
"""What is before a name of `horovod.torch`; the names of these modules are in it, too."""


@dataclass
class Converted:
    """The new text of a script, and remarks on its lines: (line, text), by line."""

    text: str
    not_converted: list[tuple[int, str]] = field(default_factory=list)
    """Lines to convert by hand."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Lines that change the last bits of results, or are worth a look."""


@dataclass(frozen=True)
class HorovodImport:
    """A name that an import statement gives to something of Horovod."""

    statement: cst.Import | cst.ImportFrom
    alias: Any
    module: str
    """The full name of what is imported."""

    @property
    def bound(self) -> str:
        """The name that is bound; "" for a star."""
        if isinstance(self.alias, cst.ImportStar):
            return ""
        return str(self.alias.evaluated_alias or self.alias.evaluated_name).split(".")[0]

    @property
    def is_convertible(self) -> bool:
        """Whether it is of `horovod.torch`, or of Horovod's launcher."""
        return bool(re.match(r"horovod(\.(torch|run|runner)\b|$)", self.module))


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
        self.nodes = list(walk(self.tree))
        self.imports = [found for node in self.nodes for found in _imports_of(node)]

    def require_horovod(self, name: str) -> None:
        """Raise InputError if nothing is imported from horovod.torch, or its launcher."""
        if not any(found.is_convertible for found in self.imports) and not self.by_name():
            modules = ", ".join(sorted({found.module for found in self.imports}))
            found = modules or "nothing of Horovod"
            raise InputError(f"{name} imports {found}; only horovod.torch can be converted")

    def by_name(self) -> dict[cst.CSTNode, str]:
        """Return the strings that are names of Horovod's modules, for an import by name, and what
        to say of them.
        """
        found: dict[cst.CSTNode, str] = {}
        for node in self.nodes:
            if isinstance(node, cst.SimpleString):
                is_import = _IMPORTER.match(code(self.parent(self.parent(node))))
                pattern = r"horovod(\.\w+)" + "+*"[bool(is_import)]
                if re.fullmatch(pattern, str(node.evaluated_value)):
                    found[node] = f"{code(node)}: imported by name; use an import statement"
        return found

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
        return self._scopes[node]  # type: ignore[return-value]

    def accesses(self) -> Iterator[tuple[cst.BaseExpression, metadata.Access]]:
        """Yield each expression that reads a name, with its attributes, and what LibCST knows of
        the name.
        """
        for scope in dict.fromkeys(self._scopes.values()):
            for access in scope.accesses if scope else ():
                node: Any = access.node
                while isinstance(outer := self.parent(node), cst.Attribute):
                    node = outer
                yield node, access

    def uses(self) -> dict[cst.BaseExpression, str]:
        """Return every expression that names something of Horovod, and what: "allreduce" of
        `horovod.torch`, "elastic.run", "" for the module itself. Of `a.b.c` it is the longest.
        """
        found: dict[cst.BaseExpression, str] = {}
        for node, access in self.accesses():
            for name in access.scope.get_qualified_names_for(node):
                is_import = name.source is metadata.QualifiedNameSource.IMPORT
                if is_import and name.name.split(".")[0] == "horovod":
                    found[node] = _SUBMODULES.sub("", name.name, count=1)
        return found

    def bound(self) -> set[str]:
        """Return the names that the script's imports of Horovod bind."""
        return {found.bound for found in self.imports}

    def values(self, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
        """Yield what is assigned to a name or attribute that means the same at `node`."""
        text = code(node)

        def is_same(target: cst.CSTNode) -> bool:
            return code(target) == text and self.same_root(text, node, target)

        for other in self.nodes:
            if isinstance(other, (cst.Assign, cst.AnnAssign, cst.AugAssign)):
                targets = [each.target for each in getattr(other, "targets", [other])]
                if other.value is not None and any(map(is_same, targets)):
                    yield other.value

    def same_root(self, text: str, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether a text begins with the same variable at two places."""
        root = re.match(r"\w*", text)[0]  # type: ignore[index]
        if root == "self":
            return self._class_of(one) is self._class_of(other)
        here, there = self.scope(one), self.scope(other)
        return here is there or set(here[root]) == set(there[root])

    def _class_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return next((n for n in self.around(node) if isinstance(n, cst.ClassDef)), None)


def changed(tree: cst.CSTNode, changes: Mapping[cst.CSTNode, Change]) -> Any:
    """Return a tree with changes made, from the inside out."""

    class Apply(cst.CSTTransformer):
        def on_leave(self, original_node: Any, updated_node: Any) -> Any:
            change = changes.get(original_node)
            return change(updated_node) if change else updated_node

    return tree.visit(Apply())


def walk(node: cst.CSTNode) -> Iterator[Any]:
    """Yield a node and all in it, in the order of the text."""
    yield node
    for child in node.children:
        yield from walk(child)


def _imports_of(node: cst.CSTNode) -> Iterator[HorovodImport]:
    """Yield what an import statement imports of Horovod; nothing for other nodes."""
    if not isinstance(node, (cst.Import, cst.ImportFrom)) or getattr(node, "relative", False):
        return
    base = dotted(getattr(node, "module", None))
    for alias in [node.names] if isinstance(node.names, cst.ImportStar) else node.names:
        module = ".".join(filter(None, (base, getattr(alias, "evaluated_name", ""))))
        if module.split(".")[0] == "horovod":
            yield HorovodImport(node, alias, module)


def replaced_by(text: str) -> Change:
    """Return the change of an expression into another."""
    new = cst.parse_expression(text)
    return lambda _: new


def names_in(node: cst.CSTNode) -> list[cst.Name]:
    """Return the names in a node, without those of attributes."""
    nodes = list(walk(node))
    attributes = {part.attr for part in nodes if isinstance(part, cst.Attribute)}
    return [part for part in nodes if isinstance(part, cst.Name) and part not in attributes]


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
