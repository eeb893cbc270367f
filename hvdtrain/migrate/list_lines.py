"""Listing: what of a script is to be done by hand, and whether a converted one hides anything."""

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
    attributes = [node for node in script.nodes if isinstance(node, cst.Attribute)]
    modules = {code(node.value) for node in attributes if by_name and node.attr.value in _ALONE}
    for node in script.nodes:
        if node in by_name:
            yield script.line(node), by_name[node]
        elif isinstance(node, cst.Attribute) and code(node.value) in modules:
            yield script.line(node), f"{code(node)}: of a module that is imported by its name"
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            method = node.func.attr.value
            if method == "set_backward_passes_per_step":
                yield script.line(node), f"{code(node.func)}: {BY_HAND[method]}"
            elif base := _beside_forward(script, node, models):
                yield (
                    script.line(node),
                    f"{base}.{method}(): DDP averages the gradients of what goes through "
                    f"{base}(...) alone; call it from forward()",
                )


def _beside_forward(script: Script, call: cst.Call, models: dict[str, cst.Call]) -> str:
    """Return the text of a model with which a call computes, and not by its forward()."""
    base, method = code(call.func.value), call.func.attr.value  # type: ignore[attr-defined]
    if method in MODULE_METHODS or f"{base}.{method}" in models:
        return ""
    for model, wrap in models.items():
        last = last_name(model)
        if base in (model, last, f"self.{last}", f"state.{last}"):
            is_before = _is_before(script, call, wrap) or _is_without_gradients(script, call)
            return "" if is_before else base
    return ""


def _function(script: Script, node: cst.CSTNode) -> cst.CSTNode:
    kinds = (cst.FunctionDef, cst.Lambda)
    return next((n for n in script.around(node) if isinstance(n, kinds)), script.tree)


def _is_before(script: Script, node: cst.CSTNode, wrap: cst.CSTNode) -> bool:
    same = _function(script, node) is _function(script, wrap)
    return same and script.line(node) < script.line(wrap)


def _is_without_gradients(script: Script, node: cst.CSTNode) -> bool:
    for outer in script.around(node):
        heads: list[str] = []
        if isinstance(outer, cst.With):
            heads = [code(item.item) for item in outer.items]
        elif isinstance(outer, cst.FunctionDef):
            heads = [code(item.decorator) for item in outer.decorators]
        if any(word in head for head in heads for word in _WITHOUT_GRADIENTS):
            return True
    return False


def unused_layers(script: Script) -> Iterator[tuple[int, str]]:
    """Yield the lines that give a model a layer which nothing reads: it gets no gradient."""
    attributes = [node for node in script.nodes if isinstance(node, cst.Attribute)]
    targets = {code(node): node for node in attributes if _is_target(script, node)}
    read = {node.attr.value for node in attributes if node not in targets.values()}
    for text, node in targets.items():
        is_layer = any(re.match(r"(torch\.)?nn\.[A-Z]", code(v)) for v in script.values(node))
        if is_layer and node.attr.value not in read:
            yield (
                script.line(node),
                f"{text} is not used: DDP raises an error if a parameter gets no gradient; then "
                "give DistributedDataParallel find_unused_parameters=True",
            )


def _is_target(script: Script, node: cst.CSTNode) -> bool:
    return isinstance(script.parent(node), cst.AssignTarget)


def left_over(text: str, bound: set[str], listed: Counter[str]) -> list[tuple[int, str]]:
    """Return what a converted script names of Horovod beyond what is listed, with its lines.

    `bound` has the names that the original script gave to Horovod. It is read anew, without the
    table, so that it finds what the conversion overlooks.
    """
    script, remaining = Script(text, "the converted script"), Counter(listed)
    found = []
    for node, is_bound in script.accesses():
        name = code(node)
        if name.split(".")[0] in bound and not is_bound:
            remaining[name] -= 1
            if remaining[name] < 0:
                found.append((script.line(node), f"{name} is left in the converted script"))
    return found
