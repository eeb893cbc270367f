"""The walk over nested dicts, lists, tuples, namedtuples and dataclasses: batches, and the state of
optimizers; and the parameters of an optimizer.

Used by `backends`, `training`, `hvd` and `compare`. torch's own walk, torch.utils._pytree, is
private. Imports no torch.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

T = TypeVar("T")


def map_tree(
    function: Callable[[T], Any], kind: type[T], tree: Any, *, keep_dict_types: bool = False
) -> Any:
    """Return a copy of `tree` with `function` applied to every value of the type `kind`.

    All other values are taken over as they are. Subclasses of dict, and UserDicts, become plain
    dicts, which checkpoints can hold, unless `keep_dict_types` is set.
    """
    # `walk` does not refer to itself: else what `function` holds, such as another rank's tensors,
    # would stay until the garbage collector runs.
    walk = partial(map_tree, function, kind, keep_dict_types=keep_dict_types)
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, (dict, UserDict)):
        items = {key: walk(item) for key, item in tree.items()}
        if keep_dict_types and type(tree) is not dict:
            copied: Any = copy.copy(tree)
            for key, item in items.items():  # not `update`, which transformers forbids
                copied[key] = item
            return copied
        return items
    if is_dataclass(tree) and not isinstance(tree, type):
        copied = copy.copy(tree)
        for part in fields(tree):
            object.__setattr__(copied, part.name, walk(getattr(tree, part.name)))  # frozen, too
        return copied
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(walk, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(walk, tree))
    return tree


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
