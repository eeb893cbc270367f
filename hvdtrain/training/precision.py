"""fp32, bf16, fp16 and fp64 as one object whose parts do nothing where there is nothing to do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How the numbers are kept.

    Never collective: gradients are equal everywhere when `unscale_` looks at them, so that all
    ranks find the same overflow and skip the same step.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device_type = device.type
        self._autocast = _AUTOCAST.get(name)
        self._dtype = torch.float64 if name == "fp64" else None
        # A disabled scaler passes everything through.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def convert(self, model: nn.Module) -> nn.Module:
        """Return `model` with its floating parameters in the dtype of the weights."""
        return model if self._dtype is None else model.to(self._dtype)

    def convert_batch(self, t: Tensor) -> Tensor:
        """Return `t` in the dtype of the weights, if it is floating."""
        return t.to(self._dtype) if self._dtype is not None and t.is_floating_point() else t

    def autocast(self) -> AbstractContextManager[Any]:
        """Put around the forward pass and the loss."""
        return torch.autocast(
            self._device_type, dtype=self._autocast, enabled=self._autocast is not None
        )

    def backward(self, loss: Tensor) -> None:
        """Run backward from the scaled loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place. After `finish_backward`, before clipping."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer, unless a gradient overflowed, and adapt the scale."""
        if self.scaler.is_enabled():
            # A skipped step counts for the schedule; torch would warn that there was none before.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self.scaler.step(optimizer)
        self.scaler.update()
