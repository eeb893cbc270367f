"""The version of a tensor: how often it was changed in place. Used by `sharded_optimizer`.

Relies on `Tensor._version`, which autograd compares to find tensors that were changed after they
were saved. Without it a change of a shared parameter outside `step` is found by samples alone.
"""

from __future__ import annotations

from torch import Tensor


def version_of(t: Tensor) -> int:
    """Return the number of changes in place, of `t` and of its views."""
    return int(getattr(t, "_version", 0))
