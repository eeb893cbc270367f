"""The numbers in a gradient, dense or sparse: used by the guard, the log and error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdtrain.optim.model_sync import uncompiled

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


def values_of(grad: Tensor) -> Tensor:
    """Return the values of a gradient that may be sparse or complex, as a real tensor."""
    values = grad.detach()
    values = values.coalesce().values() if values.is_sparse else values
    return torch.view_as_real(values) if values.is_complex() else values


def norm_of(grad: Tensor) -> Tensor:
    """Return the norm, in float64, on the gradient's device. Does not synchronise that."""
    values = values_of(grad)
    # The squares of a half overflow in its own type; float32 is much faster to sum in than float64.
    wide = torch.float32 if values.dtype.itemsize < 4 else None
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm.double()


def is_finite(value: Tensor) -> bool:
    """Return whether all elements are finite. Waits for the device."""
    return bool(values_of(value).isfinite().all())


def watch(trainer: Trainer, note: Callable[[int, str, Tensor], None]) -> list[Any]:
    """Call `note(micro_batch, name, grad)` for this rank's own gradient of each parameter in each
    micro-batch, counted from 1, as backward computes it; not for those of weight 0, whose gradients
    are zeros. Return the handles of the hooks. Not collective.
    """

    def hook_of(name: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            # 0: `ddp` sends the first step's gradients through the hooks again.
            if micro_batch := trainer.micro_batch:
                note(micro_batch, name, grad.detach())

        return hook

    return [
        p.register_hook(hook_of(uncompiled(name)))  # type: ignore[no-untyped-call]
        for name, p in trainer.model.named_parameters()
        if p.requires_grad
    ]
