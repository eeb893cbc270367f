"""Losses and gradients that are not finite: which is the first one.

The Meter names it in the error that ends a run, and `--on-nonfinite skip` for a step left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hvdtrain.backends.base import Backend
from hvdtrain.optim.model_sync import uncompiled


def values_of(grad: Tensor) -> Tensor:
    """Return the values of a gradient that may be sparse."""
    return grad.coalesce().values() if grad.is_sparse else grad


def norm_of(grad: Tensor) -> Tensor:
    """Return the norm, in float64, on the gradient's device. Does not synchronise that."""
    values = values_of(grad)
    # The squares of a half overflow in its own type; float32 is much faster to sum in than float64.
    wide = torch.float32 if values.dtype.itemsize < 4 else None
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm.double()


def is_finite(value: Tensor) -> bool:
    """Return whether all elements are finite. Waits for the device."""
    return bool(values_of(value.detach()).isfinite().all())


def first_gradient(model: nn.Module) -> str:
    """Return the name of the first parameter whose gradient is not finite, in the order of
    backward: from the last parameter to the first. "" if there is none.
    """
    named = reversed([*model.named_parameters()])
    bad = (name for name, p in named if p.grad is not None and not is_finite(p.grad))
    return uncompiled(next(bad, ""))


def first_loss(backend: Backend, losses: Iterable[tuple[int, Tensor]]) -> tuple[int, int] | None:
    """Return step and rank of the first loss of all ranks that is not finite; None if all are.
    Collective. `losses`: this rank's, each after its step.
    """
    mine = next((step for step, loss in losses if not is_finite(loss)), None)
    everyone = enumerate(backend.all_gather_object(mine))
    return min(((step, rank) for rank, step in everyone if step is not None), default=None)
