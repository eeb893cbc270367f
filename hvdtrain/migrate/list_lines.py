"""Listing: what of a script is to be done by hand, and whether a converted one hides anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import libcst as cst
from libcst import metadata

from hvdtrain.migrate.find import Script, code, dotted, walk
from hvdtrain.migrate.idioms import MODULE_METHODS, OPTIMIZER_METHODS

_WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
_IMPORTERS = ("import_module", "find_spec", "__import__", "LazyLoader")


def names_in_strings(script: Script) -> Iterator[tuple[int, str]]:
    """Yield the lines whose strings are names of Horovod's modules, for an import by name."""
    for node in script.nodes:
        if not isinstance(node, cst.SimpleString):
            continue
        name = str(node.evaluated_value)
        call = script.parent(script.parent(node))
        imports = isinstance(call, cst.Call) and code(call.func).split(".")[-1] in _IMPORTERS
        if name.startswith("horovod.") and all(p.isidentifier() for p in name.split(".")):
            imports = True
        if imports and name.split(".")[0] == "horovod":
            yield script.line(node), f"{code(node)}: a module that is imported by its name"


def calls_beside_forward(script: Script, models: dict[str, cst.Call]) -> Iterator[tuple[int, str]]:
    """Yield the lines that compute with a model, and not by its forward(): DDP averages no
    gradients of those. `models` has the text of each model, and the call that wraps its optimizer.
    """
    for node in script.nodes:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            continue
        base, method = code(node.func.value), node.func.attr.value
        if method in MODULE_METHODS or _is_without_gradients(script, node):
            continue
        for model, wrap in models.items():
            last = model.rsplit(".", 1)[-1]
            if base not in (model, last, f"self.{last}", f"state.{last}"):
                continue
            if f"{base}.{method}" not in models and not _is_before(script, node, wrap):
                yield (
                    script.line(node),
                    f"{base}.{method}(): DDP averages the gradients of what goes through "
                    f"{base}(...) alone; call it from forward()",
                )
                break


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


def optimizer_methods(script: Script) -> Iterator[tuple[int, str]]:
    """Yield the lines that call what only Horovod's optimizers have."""
    for node in script.nodes:
        if isinstance(node, cst.Attribute) and (why := OPTIMIZER_METHODS.get(node.attr.value)):
            yield script.line(node), f"{code(node)}: {why}"


def left_over(text: str, bound: set[str], listed: Counter[str]) -> list[tuple[int, str]]:
    """Return what a converted script names of Horovod beyond what is listed, with its lines.

    `bound` has the names that the original script gave to Horovod. It is read anew, without the
    table, so that it finds what the conversion overlooks.
    """
    wrapper = metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    scopes = wrapper.resolve(metadata.ScopeProvider)
    lines = wrapper.resolve(metadata.PositionProvider)
    parents = wrapper.resolve(metadata.ParentNodeProvider)
    found, remaining = [], Counter(listed)
    for node in walk(wrapper.module):
        scope = scopes.get(node)
        if not isinstance(node, cst.Name) or node.value not in bound or scope is None:
            continue
        parent: cst.CSTNode = parents[node]
        is_part = isinstance(parent, cst.Attribute) and parent.attr is node
        is_keyword = isinstance(parent, cst.Arg) and parent.keyword is node
        if is_part or is_keyword or scope[node.value]:
            continue
        chain: cst.CSTNode = node
        while isinstance(parent, cst.Attribute) and dotted(parent):
            chain, parent = parent, parents[parent]
        if remaining[code(chain)]:
            remaining[code(chain)] -= 1
        else:
            found.append((lines[node].start.line, f"{code(chain)} is left in the converted script"))
    return found
