"""Listing: the lines to convert by hand, and names of Horovod left in a converted script."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import libcst as cst

from hvdtrain.migrate.find import Script, code, last_name
from hvdtrain.migrate.idioms import BY_HAND, MODULE_METHODS

_WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
_ALONE = ("DistributedOptimizer", "broadcast_parameters", "local_rank")
"""Names by which a module is known to be Horovod's."""


def listed(script: Script, models: dict[str, cst.Call]) -> Iterator[tuple[int, str]]:
    """Yield what else is to be done by hand. `models` has the text of each model whose calls go
    through DDP, and the call that wraps its optimizer.
    """
    by_name = script.by_name()
    modules = {
        code(node.value)
        for node in script.nodes
        if by_name and isinstance(node, cst.Attribute) and node.attr.value in _ALONE
    }
    for node in script.nodes:
        text = by_name.get(node, "")
        if isinstance(node, cst.Attribute) and code(node.value) in modules:
            text = f"{code(node)}: belongs to a module imported by name"
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            method = node.func.attr.value
            if method == "set_backward_passes_per_step":
                text = f"{code(node.func)}: {BY_HAND[method]}"
            elif base := _beside_forward(script, node, models):
                text = f"{base}.{method}(): DDP averages only gradients computed through "
                text += f"{base}(...); call it from forward()"
        if text:
            yield script.line(node), text


def _beside_forward(script: Script, call: cst.Call, models: dict[str, cst.Call]) -> str:
    """Return the text of a model with which a call computes, and not by its forward()."""
    base, method = code(call.func.value), call.func.attr.value  # type: ignore[attr-defined]
    if method in MODULE_METHODS or f"{base}.{method}" in models:
        return ""
    for model, wrap in models.items():
        last = last_name(model)
        if base in (model, last, f"self.{last}", f"state.{last}"):
            is_same = script.scope(call) is script.scope(wrap)
            is_before = is_same and script.line(call) < script.line(wrap)
            return "" if is_before or _is_without_gradients(script, call) else base
    return ""


def _is_without_gradients(script: Script, node: cst.CSTNode) -> bool:
    return any(
        word in code(head)
        for outer in script.around(node)
        for head in (*getattr(outer, "items", ()), *getattr(outer, "decorators", ()))
        for word in _WITHOUT_GRADIENTS
    )


def unused_layers(script: Script) -> Iterator[tuple[int, str]]:
    """Yield the lines that give a model a layer which nothing reads: it gets no gradient."""
    assigned = [node for node in script.nodes if isinstance(node, cst.Assign)]
    targets = {target.target for node in assigned for target in node.targets}
    read = {
        node.attr.value
        for node in script.nodes
        if isinstance(node, cst.Attribute) and node not in targets
    }
    for node in assigned:
        text = code(node.targets[0].target)
        is_layer = "." in text and re.match(r"(torch\.)?nn\.(?!Parameter)[A-Z]", code(node.value))
        if is_layer and last_name(text) not in read:
            yield (
                script.line(node),
                f"{text} is not used: DDP raises an error if a parameter gets no gradient; if so, "
                "pass find_unused_parameters=True to DistributedDataParallel",
            )


def left_over(text: str, bound: set[str], listed: Counter[str]) -> Iterator[tuple[int, str]]:
    """Yield what a converted script names of Horovod beyond what is listed, with its lines.

    `bound` has the names that the original script gave to Horovod. It is read anew, without the
    table, so that it finds what the conversion overlooks.
    """
    script, remaining = Script(text, "the converted script"), Counter(listed)
    for node, access in script.accesses():
        name = code(node)
        if name.split(".")[0] in bound and not access.referents:
            remaining[name] -= 1
            if remaining[name] < 0:
                yield script.line(node), f"{name} is left in the converted script"
