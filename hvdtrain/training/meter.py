"""Times and losses between two records of metrics.jsonl, summed by the Trainer's loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hvdtrain.backends.base import Backend
from hvdtrain.errors import TrainingDiverged


@dataclass(frozen=True)
class StepTaken:
    """One optimizer step, as measured on this rank."""

    number: int
    data_s: float
    """Seconds for which the rank waited for data."""
    loss: Tensor
    """The mean over this rank's samples: a scalar on the device."""


class Meter:
    """Sums losses, times and samples."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.data_s = 0.0
        """Seconds for which this rank has waited for data; the loop adds to it."""
        self._reset()

    def _reset(self) -> None:
        self._data_before = self.data_s
        self._loss: Tensor | None = None
        self._steps = 0
        self._samples = 0
        self._since = time.perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """Add a micro-batch's loss, which the caller has divided by the number of micro-batches in
        the step, or the mean loss of a step. Does not synchronise a device.
        """
        value = loss.detach()
        self._loss = value if self._loss is None else self._loss + value

    def count(self, samples: int) -> None:
        """Count one optimizer step, with `samples` of all ranks."""
        self._steps += 1
        self._samples += samples

    def take(self) -> tuple[float, Tensor]:
        """Return this rank's seconds of waiting for data and its mean loss since the last call, and
        reset. Not collective.
        """
        assert self._loss is not None
        data_s, loss = self.data_s - self._data_before, self._loss / self._steps
        self._reset()
        return data_s, loss

    def flush(self, step: int, norm: Tensor | None, norm_may_overflow: bool) -> dict[str, Any]:
        """Average the loss over all ranks, return the numbers since the last call, and reset.

        Collective. Raises TrainingDiverged, on every rank, if the loss of any rank is not finite,
        or the norm of the averaged gradient, which is equal on all ranks. `norm_may_overflow`: an
        fp16 loss scaler skips such a step, so that its norm may be infinite.

        If ranks step at different times, nothing is collective, and the loss is this rank's own.
        """
        assert self._loss is not None
        steps = self._steps
        mean = self._loss.double() / steps
        together = not self._backend.is_asynchronous
        loss = float(self._backend.all_reduce(mean, "mean") if together else mean)
        elapsed = time.perf_counter() - self._since
        numbers = {"loss": loss}
        if norm is not None:
            numbers["grad_norm"] = float(norm)
        for name, value in numbers.items():
            if not math.isfinite(value) and not (name == "grad_norm" and norm_may_overflow):
                raise TrainingDiverged(
                    f"the {name} became {value} in steps {step - steps + 1} to {step}; lower the "
                    "learning rate, clip with --clip-norm, or look at the data; no checkpoint of "
                    "these steps was kept",
                    on_all_ranks=together,
                )
        timing = {
            "step_ms": 1000 * elapsed / steps,
            "data_ms": 1000 * (self.data_s - self._data_before) / steps,
            "samples_per_s": self._samples / elapsed,
        }
        self._reset()
        return {**numbers, **timing}
