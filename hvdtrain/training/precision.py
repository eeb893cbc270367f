"""Precisions and Apex's opt levels behind one interface, so that the loop has no branch for them.

    level      weights                         computed in        loss scale in fp16
    none, O1   fp32                            autocast           dynamic
    O0         fp32                            fp32
    O2         half, BatchNorm and masters     the weights' type  dynamic
               in fp32
    O3         half                            the weights' type  1.0

Half is the type that `--precision` names. bf16 has fp32's range and needs no loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.training.half_weights import MasterWeights, convert_to_half

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WHOLE = {"fp32": None, "fp64": torch.float64}
"""The dtype that the model is converted to; None leaves it as the task has made it."""


class Precision:
    """Conversion, autocast and loss scaling of one precision; no-ops if it needs none.

    No method is collective: gradients are equal on all ranks when `unscale_` checks them, so that
    all ranks find the same overflow and skip the same step.
    """

    def __init__(self, name: str, device: torch.device, opt_level: str = "none") -> None:
        has_half_weights = opt_level in ("O2", "O3")
        self._device_type = device.type
        half = None if name in _WHOLE else _HALF[name]
        self._autocast = None if has_half_weights else half
        self._half_weights = half if has_half_weights else None
        self._keeps_fp32 = opt_level == "O2"
        self._masters: MasterWeights | None = None
        self._dtype = _WHOLE.get(name)
        # A disabled scaler passes losses and steps through unchanged.
        scales_loss = name == "fp16" and opt_level != "O3"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scales_loss)

    def convert(self, model: nn.Module) -> nn.Module:
        """Return `model` with its floating and complex parameters in the dtype of the weights."""
        if self._half_weights is not None:
            return convert_to_half(model, self._half_weights, keep_batch_norm=self._keeps_fp32)
        if self._dtype is not None:
            # Not `model.to`, which drops the imaginary parts.
            for t in (*model.parameters(), *model.buffers()):
                t.data = self.convert_batch(t.data)
        return model

    def make_masters(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make the fp32 masters of a model's half weights, if the level has any. Call it with what
        `prepare` returned, before state is loaded.
        """
        if self._half_weights is not None and self._keeps_fp32:
            self._masters = MasterWeights(model, optimizer)

    @contextmanager
    def masters_in(self, optimizer: Optimizer) -> Iterator[dict[str, Tensor]]:
        """Let the optimizer have the masters in its groups, and yield them by name; an empty dict
        without masters. The optimizer's state dict may be read and loaded inside only.
        """
        if self._masters is None:
            yield {}
        else:
            with self._masters.in_groups(optimizer) as masters:
                yield masters

    def convert_batch(self, t: Tensor) -> Tensor:
        """Return `t` in the dtype of the weights, if it is floating or complex."""
        if self._dtype is None or not (t.is_floating_point() or t.is_complex()):
            return t
        return t.to(torch.promote_types(t.dtype, self._dtype))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for the forward pass and the loss."""
        return torch.autocast(
            self._device_type, dtype=self._autocast, enabled=self._autocast is not None
        )

    def backward(self, loss: Tensor) -> None:
        """Run backward from the scaled loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place. Call it between `average_gradients` and
        clipping, which then finds the gradients that the optimizer will use in its groups.
        """
        if self._masters is not None:
            self._masters.take_gradients(optimizer)
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer, unless a gradient overflowed, and adapt the scale. Return whether the
        step was taken.
        """
        before = self.scaler.get_scale()
        if self.scaler.is_enabled():
            # The schedule also advances at a skipped step. Without this flag, torch would warn that
            # it advances before the optimizer.
            mark_as_stepped(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        if self._masters is not None:
            self._masters.write_back(optimizer)
        return self.scaler.get_scale() >= before  # it is lowered after an overflow alone

    def loss_scale(self) -> dict[str, float]:
        """Return the loss scale of the next step, as a field of metrics.jsonl; an empty dict if the
        loss is not scaled. Waits for the device.
        """
        return {"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}
