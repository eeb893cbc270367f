"""Many small copies in one call. Used by the gradient buckets of `hvd`.

Relies on `torch._foreach_copy_`. Without it the tensors are copied one by one, which is slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_foreach_copy_ = getattr(torch, "_foreach_copy_", None)


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in place."""
    if _foreach_copy_ is not None:
        _foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
