"""fp32, bf16, fp16 and fp64 behind one interface, so that the loop has no branch for them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain._torch.step_mark import mark_as_stepped

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Conversion, autocast and loss scaling of one precision; no-ops if it needs none.

    No method is collective: gradients are equal on all ranks when `unscale_` checks them, so that
    all ranks find the same overflow and skip the same step.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device_type = device.type
        self._autocast = _AUTOCAST.get(name)
        self._dtype = torch.float64 if name == "fp64" else None
        # A disabled scaler passes losses and steps through unchanged.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def convert(self, model: nn.Module) -> nn.Module:
        """Return `model` with its floating parameters in the dtype of the weights."""
        return model if self._dtype is None else model.to(self._dtype)

    def convert_batch(self, t: Tensor) -> Tensor:
        """Return `t` in the dtype of the weights, if it is floating."""
        return t.to(self._dtype) if self._dtype is not None and t.is_floating_point() else t

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for the forward pass and the loss."""
        return torch.autocast(
            self._device_type, dtype=self._autocast, enabled=self._autocast is not None
        )

    def backward(self, loss: Tensor) -> None:
        """Run backward from the scaled loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place. Call it between `finish_backward` and
        clipping.
        """
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer, unless a gradient overflowed, and adapt the scale."""
        if self.scaler.is_enabled():
            # The schedule also advances at a skipped step. Without this flag, torch would warn that
            # it advances before the optimizer.
            mark_as_stepped(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
