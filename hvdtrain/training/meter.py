"""Times and losses between two records of metrics.jsonl, summed by the Trainer's loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError, TrainingDiverged
from hvdtrain.training.metrics import Mean
from hvdtrain.training.nonfinite import first_loss

T = TypeVar("T")

_MAX_LOSSES = 1000
"""Losses that are kept to name the first one that is not finite."""


class Meter:
    """Sums losses, times and samples.

    The losses of one step are added in float32, as in a plain loop, and those of the steps in
    float64: in a half type the sum of a thousand steps stops growing, or overflows.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.restart()

    def restart(self) -> None:
        """Forget what was summed: at the start of an epoch, and after a record."""
        self._data_s = 0.0
        self._loss: Tensor | None = None
        self._losses: deque[tuple[int, Tensor]] = deque(maxlen=_MAX_LOSSES)
        self._steps = 0
        self._skipped = 0
        self._samples = 0
        self.logged = Mean()
        """What the task logs."""
        self._since = time.perf_counter()

    def count(self, step: int, samples: int, losses: Sequence[Tensor]) -> None:
        """Count one optimizer step, with `samples` of all ranks. Does not synchronise a device.

        `losses`: see `Callback.on_gradients`; none for a step left out.
        """
        of_step: Tensor | None = None
        for value in losses:
            wide = value if value.dtype == torch.float64 else value.float()
            of_step = wide if of_step is None else of_step + wide
        if of_step is not None:
            self._losses.append((step, of_step))
            # The first is converted; the sum with later ones is of the wider type.
            self._loss = of_step.double() if self._loss is None else self._loss + of_step
        self._steps += 1
        self._skipped += not losses
        self._samples += samples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out: that of a checkpoint, for example."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def time_data(self, load: Callable[[], T]) -> T:
        """Return what `load` does, and count its time as waiting for data."""
        began = time.perf_counter()
        loaded = load()
        self._data_s += time.perf_counter() - began
        return loaded

    def take_loss(self) -> Tensor:
        """Return this rank's loss in the one step since the last call, and reset; nan if the step
        was left out. Not collective.
        """
        loss = self._loss
        self.restart()
        return torch.tensor(math.nan) if loss is None else loss

    def flush(self, step: int, norm: Tensor | None, bad_gradient: str | None) -> dict[str, Any]:
        """Average the loss over all ranks, return the numbers since the last call, and reset.

        Collective. `norm`: that of the averaged gradient in the last step, which is equal on all
        ranks; if it must be finite and is not, `bad_gradient` names the first such parameter.
        Raises TrainingDiverged, on every rank, for it, and if the loss of any rank is not finite.
        """
        steps = self._steps
        numbers, has_logged, logged = {}, 0.0, self.logged.shares()
        if self._loss is not None:  # else all of the steps were left out, on all ranks
            mean = self._loss / (steps - self._skipped)
            pair = torch.stack([mean, torch.full_like(mean, bool(logged))])
            numbers["loss"], has_logged = self._backend.all_reduce(pair, "mean").tolist()
        elapsed = time.perf_counter() - self._since
        if norm is not None:
            numbers["grad_norm"] = float(norm)
        bad, where = "", ""
        if not math.isfinite(numbers.get("loss", 0.0)):
            bad, found = "loss", first_loss(self._backend, self._losses)
            where = "" if found is None else f", first in step {found[0]} on rank {found[1]}"
        elif bad_gradient is not None:
            bad = "grad_norm"
            where = f", first in the gradient of {bad_gradient}" if bad_gradient else ""
        if bad:
            raise TrainingDiverged(
                f"the {bad} became {numbers[bad]} in steps {step - steps + 1} to {step}{where}; "
                "lower the learning rate, clip with --clip-norm, leave such steps out with "
                "--on-nonfinite skip, or look at the data; no checkpoint of these steps was kept",
                on_all_ranks=True,
            )
        timing = {
            "step_ms": 1000 * elapsed / steps,
            "data_ms": 1000 * self._data_s / steps,
            "samples_per_s": self._samples / elapsed,
        }
        self.restart()
        everyone = self._backend.all_gather_object(logged) if has_logged else []
        names = sorted({name for shares in everyone for name in shares})
        of_task = {
            name: Mean.combine([shares[name] for shares in everyone if name in shares])
            for name in names
        }
        if taken := of_task.keys() & {*numbers, *timing, "step", "epoch", "lr"}:
            raise InputError(
                f"the task logs {', '.join(sorted(taken))}, which every line of metrics has; "
                "choose another name",
                on_all_ranks=True,
            )
        return {**numbers, **of_task, **timing}
