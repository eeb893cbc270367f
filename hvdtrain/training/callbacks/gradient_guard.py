"""`--on-nonfinite skip`: a callback that checks the gradient of each step.

    every rank    all-reduces the norm of the averaged gradient, and the loss: one small collective
    if it is bad  all ranks gather whose loss is, and name the first rank; if none is, the first
                  parameter of the averaged gradient. Then all leave the step out

A step that is left out changes neither parameters nor buffers. The step and the data advance, and
metrics.jsonl has a line that says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdtrain.errors import TrainingDiverged
from hvdtrain.training.callback import Callback
from hvdtrain.training.nonfinite import first_gradient, first_loss, norm_of

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer

_MAX_IN_A_ROW = 10
"""Steps left out in a row, after which the run ends: the weights or the data are beyond repair."""


class GradientGuard(Callback):
    """Leaves steps out whose loss or gradient is not finite."""

    _in_a_row = 0

    def on_start(self, trainer: Trainer) -> None:
        """Remember the buffers before the first step; called after each good one, too."""
        self._buffers = [buffer.clone() for buffer in trainer.model.buffers()]

    def on_gradients(self, trainer: Trainer, losses: Sequence[Tensor]) -> None:
        """Look at a step's gradient. Raises TrainingDiverged, on every rank, after too many bad
        ones in a row.
        """
        norms = [norm_of(p.grad) for p in trainer.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        total = torch.stack([loss.double().reshape(()) for loss in losses]).sum()
        size, loss = trainer.backend.all_reduce(torch.stack([norm, total]), "mean").tolist()
        if math.isfinite(size) and math.isfinite(loss):
            self._in_a_row = 0
            self.on_start(trainer)
            return
        if (found := first_loss(trainer.backend, [(0, total)])) is not None:
            why = f"the loss is {loss}, first on rank {found[1]}"
        else:
            # No name: the sum over the ranks has overflowed, as compressed gradients may.
            name = first_gradient(trainer.model)
            where = f", first in the gradient of {name}" if name else ""
            why = f"the norm of the gradient is {size}{where}"
        self._skip(trainer, why)

    def _skip(self, trainer: Trainer, why: str) -> None:
        """Leave the step out; raise TrainingDiverged, on every rank, if it is one too many."""
        progress = trainer.progress
        step = progress.step + 1
        self._in_a_row += 1
        text = f"step {step} (position {progress.sample} of epoch {progress.epoch + 1}): {why}"
        if self._in_a_row >= _MAX_IN_A_ROW:
            raise TrainingDiverged(
                f"{text}; this would be the {_MAX_IN_A_ROW}th skipped step in a row; lower "
                "the learning rate, clip with --clip-norm, or check the data",
                on_all_ranks=True,
            )
        trainer.skip_step()
        with torch.no_grad():
            for buffer, value in zip(trainer.model.buffers(), self._buffers, strict=True):
                buffer.copy_(value)
        trainer.console.print_line(f"skipped  {text}")
        trainer.log({"step": step, "skipped": why})

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps in a row were left out."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._in_a_row = state["in_a_row"]
