"""From Horovod to `hvdtrain.hvd`: only imports change."""

from __future__ import annotations

import libcst as cst

from hvdtrain.migrate.find import HOROVOD, Converted, Script, code, dotted, module_of

NEW = "hvdtrain.hvd"


def to_hvd(text: str, name: str) -> Converted:
    """Return the script with `hvdtrain.hvd` in place of `horovod.torch`. Raises InputError."""
    script = Script(text, name)
    script.require_horovod(name)
    change = _Imports(script)
    return Converted(script.tree.visit(change).code, sorted(change.left))


class _Imports(cst.CSTTransformer):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self.left: list[tuple[int, str]] = []

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        names = []
        for item in updated_node.names:
            new = _new_name(dotted(item.name))
            names.append(item.with_changes(name=cst.parse_expression(new)) if new else item)
        return updated_node.with_changes(names=names)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom:
        module = dotted(original_node.module) if module_of(original_node) else ""
        if new := _new_name(module):
            names = updated_node.names
            if module == "horovod" and not isinstance(names, cst.ImportStar):
                names = [self._of_horovod(original_node, item) for item in names]
            return updated_node.with_changes(module=cst.parse_expression(new), names=names)
        return updated_node

    def _of_horovod(self, statement: cst.ImportFrom, item: cst.ImportAlias) -> cst.ImportAlias:
        """Return `hvd as torch` for `torch`, `run` for `run`; list any other name."""
        if item.evaluated_name == "torch":
            alias = cst.AsName(cst.Name(item.evaluated_alias or "torch"))
            return item.with_changes(name=cst.Name("hvd"), asname=alias)
        if item.evaluated_name != "run":
            text = f"from horovod import {item.evaluated_name}: hvdtrain has no such name"
            self.left.append((self._script.line(statement), text))
        return item

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        full = code(original_node)
        is_use = full in (HOROVOD, "horovod.run") and dotted(original_node)
        return cst.parse_expression(_new_name(full)) if is_use else updated_node


def _new_name(full: str) -> str:
    """Return the name of a module of Horovod in hvdtrain; "" for any other."""
    if full == HOROVOD or full.startswith(f"{HOROVOD}."):
        return NEW + full.removeprefix(HOROVOD)
    if full in ("horovod.runner", "horovod.run"):
        return "hvdtrain.run" if full == "horovod.run" else "hvdtrain"
    return "hvdtrain" if full == "horovod" else ""
