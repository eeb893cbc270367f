"""From Horovod to `hvdtrain.hvd`: only imports change."""

from __future__ import annotations

import libcst as cst

from hvdtrain.migrate.converted import HOROVOD, Converted, ScriptTransformer, dotted, parsed

NEW = "hvdtrain.hvd"


def to_hvd(text: str, name: str) -> Converted:
    """Return the script with `hvdtrain.hvd` in place of `horovod.torch`. Raises InputError."""
    tree, change = parsed(text, name), _Imports()
    return Converted(tree.visit(change).code, change.left)


class _Imports(ScriptTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[int, str]] = []

    def leave_ImportAlias(
        self, original_node: cst.ImportAlias, updated_node: cst.ImportAlias
    ) -> cst.ImportAlias:
        full = dotted(original_node.name)
        if full == HOROVOD or full.startswith(f"{HOROVOD}."):
            new = NEW + full.removeprefix(HOROVOD)
            return updated_node.with_changes(name=cst.parse_expression(new))
        if full == "horovod":  # `horovod.run`
            return updated_node.with_changes(name=cst.Name("hvdtrain"))
        return updated_node

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom:
        module = dotted(original_node.module)
        if module == HOROVOD or module.startswith(f"{HOROVOD}."):
            new = cst.parse_expression(NEW + module.removeprefix(HOROVOD))
            return updated_node.with_changes(module=new)
        if module != "horovod" or isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        names = [self._of_horovod(original_node, item) for item in updated_node.names]
        return updated_node.with_changes(module=cst.Name("hvdtrain"), names=names)

    def _of_horovod(self, statement: cst.ImportFrom, item: cst.ImportAlias) -> cst.ImportAlias:
        """Return `hvd as torch` for `torch`, `run` for `run`; list any other name."""
        if item.evaluated_name == "torch":
            alias = cst.AsName(cst.Name(item.evaluated_alias or "torch"))
            return item.with_changes(name=cst.Name("hvd"), asname=alias)
        if item.evaluated_name != "run":
            text = f"from horovod import {item.evaluated_name}: hvdtrain has no such name"
            self.left.append((self.line(statement), text))
        return item

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        full = dotted(original_node)
        if full == HOROVOD:
            return cst.parse_expression(NEW)
        return cst.parse_expression("hvdtrain.run") if full == "horovod.run" else updated_node
