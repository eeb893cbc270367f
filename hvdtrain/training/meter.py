"""Times and losses between two lines of metrics."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor

from hvdtrain.backends.base import Backend
from hvdtrain.errors import TrainingDiverged


class Meter:
    """Counts steps of `samples_per_micro_batch` samples, all ranks together, and their losses."""

    def __init__(self, backend: Backend, samples_per_micro_batch: int) -> None:
        self._backend = backend
        self._span = samples_per_micro_batch
        self._reset()

    def _reset(self) -> None:
        self.data_s = 0.0
        """Seconds that this rank has waited for data; the loop adds to it."""
        self._loss: Tensor | None = None
        self._steps = 0
        self._samples = 0
        self._since = time.perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of one micro-batch, divided by its window. Waits for no device."""
        value = loss.detach()
        self._loss = value if self._loss is None else self._loss + value

    def count(self, micro_batches: int) -> None:
        """Count one optimizer step."""
        self._steps += 1
        self._samples += micro_batches * self._span

    def take(self) -> tuple[float, Tensor]:
        """Return this rank's seconds of waiting for data and its mean loss since the last time, and
        begin anew. Not collective.
        """
        assert self._loss is not None
        data_s, loss = self.data_s, self._loss / self._steps
        self._reset()
        return data_s, loss

    def flush(self, step: int, norm: Tensor | None, norm_may_overflow: bool) -> dict[str, Any]:
        """Reduce the loss over all ranks and return the numbers since the last flush. Collective.

        Raises TrainingDiverged on every rank where the loss of any is not finite, or the norm of
        the averaged gradient, which is the same on all.
        """
        assert self._loss is not None
        steps = self._steps
        loss = float(self._backend.all_reduce(self._loss.double() / steps, "mean"))
        elapsed = time.perf_counter() - self._since
        numbers = {"loss": loss}
        if norm is not None:
            numbers["grad_norm"] = float(norm)
        for name, value in numbers.items():
            if not math.isfinite(value) and not (name == "grad_norm" and norm_may_overflow):
                raise _diverged(name, value, step - steps + 1, step)
        timing = {
            "step_ms": 1000 * elapsed / steps,
            "data_ms": 1000 * self.data_s / steps,
            "samples_per_s": self._samples / elapsed,
        }
        self._reset()
        return {**numbers, **timing}


def _diverged(name: str, value: float, first: int, last: int) -> TrainingDiverged:
    error = TrainingDiverged(
        f"the {name} became {value} in steps {first} to {last}; lower the learning rate, clip with "
        f"--clip-norm, or look at the data; no checkpoint of these steps was kept"
    )
    error.everywhere = True
    return error
