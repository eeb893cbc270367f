"""The walk over nested dicts, lists, tuples and namedtuples: batches, and the state of optimizers;
and the parameters of an optimizer.

Used by `backends`, `training`, `hvd` and `compare`. torch's own walk, torch.utils._pytree, is
private. Imports no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

T = TypeVar("T")


def map_tree(
    function: Callable[[T], Any], kind: type[T], tree: Any, *, keep_dict_types: bool = False
) -> Any:
    """Return a copy of `tree` with `function` applied to every value of the type `kind`.

    All other values are taken over as they are. Subclasses of dict become plain dicts, which
    checkpoints can hold, unless `keep_dict_types` is set.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, kind):
            return function(value)
        if isinstance(value, dict):
            items = {key: walk(item) for key, item in value.items()}
            if keep_dict_types and type(value) is not dict:
                copied = copy.copy(value)
                copied.update(items)
                return copied
            return items
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(walk, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(walk, value))
        return value

    return walk(tree)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
