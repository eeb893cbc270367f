"""Listing: what of a script is to be done by hand, and whether a converted one hides anything."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import libcst as cst

from hvdtrain.migrate.find import Script, code, last_name
from hvdtrain.migrate.idioms import BY_HAND, MODULE_METHODS

_WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
_IMPORTERS = ("import_module", "find_spec", "__import__")


def listed(script: Script, models: dict[str, cst.Call]) -> Iterator[tuple[int, str]]:
    """Yield what else is to be done by hand. `models` has the text of each model whose calls go
    through DDP, and the call that wraps its optimizer.
    """
    for node in script.nodes:
        if isinstance(node, cst.SimpleString):
            call = script.parent(script.parent(node))
            is_import = isinstance(call, cst.Call) and last_name(code(call.func)) in _IMPORTERS
            if re.fullmatch(r"horovod(\.\w+)+" + "?" * is_import, str(node.evaluated_value)):
                yield script.line(node), f"{code(node)}: a module that is imported by its name"
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
