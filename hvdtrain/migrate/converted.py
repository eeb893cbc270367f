"""What a conversion returns, and how the names of Horovod's modules are found in a script."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from hvdtrain.errors import InputError

HOROVOD = "horovod.torch"
OTHERS = ("horovod.tensorflow", "horovod.keras", "horovod.mxnet", "horovod.spark", "horovod.ray")


@dataclass
class Converted:
    """The new text of a script, and what the conversion says of it: (line, text), by line."""

    text: str
    not_converted: list[tuple[int, str]] = field(default_factory=list)
    """What is left as it was, or lost."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """What computes other last bits, or is worth a look."""


def parsed(text: str, name: str) -> MetadataWrapper:
    """Return the tree of a script. Raises InputError if it is no Python, or has no Horovod."""
    try:
        tree = MetadataWrapper(cst.parse_module(text))
    except cst.ParserSyntaxError as error:
        raise InputError(f"{name}: line {error.raw_line}: {error.message}") from None
    for other in OTHERS:
        if f"import {other}" in text or f"from {other}" in text:
            raise InputError(f"{name} uses {other}; only horovod.torch can be converted")
    if "horovod" not in text:
        raise InputError(f"{name} does not import horovod.torch")
    return tree


class ScriptTransformer(cst.CSTTransformer):
    """A transformer that knows how the script names `horovod.torch`, and the line of each node."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.alias = ""
        """The script's name of the module, such as "hvd"."""

    def visit_Import(self, node: cst.Import) -> None:
        """Note `import horovod.torch as hvd`."""
        for item in node.names:
            if dotted(item.name) == HOROVOD:
                self.alias = item.evaluated_alias or HOROVOD

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        """Note `from horovod import torch as hvd`."""
        if node.module is None or isinstance(node.names, cst.ImportStar):
            return
        if dotted(node.module) == "horovod":
            for item in node.names:
                if item.evaluated_name == "torch":
                    self.alias = item.evaluated_alias or "torch"

    def line(self, node: cst.CSTNode) -> int:
        """Return the line at which a node of the original tree begins."""
        return int(self.get_metadata(PositionProvider, node).start.line)

    def called(self, node: cst.BaseExpression) -> str:
        """Return what of Horovod's module an expression names: "allreduce" of `hvd.allreduce`."""
        name, prefix = dotted(node), f"{self.alias}."
        return name.removeprefix(prefix) if self.alias and name.startswith(prefix) else ""


def dotted(node: cst.CSTNode | None) -> str:
    """Return a name, or names with dots between; "" for any other expression, and for none."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr.value}"
    return ""
