"""From Horovod to `hvdtrain.hvd`: only imports change, and names with all their dots."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from hvdtrain.migrate.find import (
    Change,
    Converted,
    Script,
    changed,
    code,
    dotted,
    replaced_by,
    walk,
)

_MODULES = {
    "horovod.torch": "hvdtrain.hvd",
    "horovod.common.exceptions": "hvdtrain.hvd.exceptions",
    "horovod.common.process_sets": "hvdtrain.hvd.process_sets",
    "horovod.common.util": "hvdtrain.hvd.util",
    "horovod.ray": "hvdtrain.launch.ray",
    "horovod.spark": "hvdtrain.launch.spark",
    "horovod.run": "hvdtrain.run",
    "horovod.runner": "hvdtrain",
}


def to_hvd(text: str, name: str) -> Converted:
    """Return the script with `hvdtrain.hvd` in place of `horovod.torch`. Raises InputError."""
    script = Script(text, name)
    script.require_horovod(name)
    changes: dict[cst.CSTNode, Change] = {
        node: replaced_by(_MODULES[dotted(node)])
        for node in script.nodes
        if dotted(node) in _MODULES
    }
    left = [(script.line(node), text) for node, text in script.by_name().items()]
    for found in script.imports:
        statement: Any = found.statement
        alias, is_from = found.alias, isinstance(statement, cst.ImportFrom)
        parent = statement.module if is_from else alias.name
        if not (dotted(parent) in _MODULES or re.match(r"horovod(\.torch\.|$)", dotted(parent))):
            for node in walk(parent):
                changes.pop(node, None)  # a part of it may be a module that is converted
            text = f"{code(statement)}: hvdtrain has no such module"
            left.append((script.line(statement), text))
        elif isinstance(parent, cst.Name):
            changes[parent] = replaced_by("hvdtrain")
            if is_from and found.module == "horovod.torch":
                changes[alias] = lambda updated: updated.with_changes(
                    name=cst.Name("hvd"), asname=updated.asname or cst.AsName(cst.Name("torch"))
                )
            elif is_from and found.module != "horovod.run":
                text = f"from horovod import {code(alias)}: hvdtrain has no such name"
                left.append((script.line(statement), text))
    return Converted(changed(script.tree, changes).code, left)
