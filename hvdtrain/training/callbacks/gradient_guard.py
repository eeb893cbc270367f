"""`--on-nonfinite skip`: a callback that checks the gradient of each step.

    every rank    records the norm of each parameter's own gradient, as backward computes it
    every rank    all-reduces the norm of the averaged gradient, and the loss: one small collective
    if it is bad  all ranks gather what each has noted, and name parameter, rank and micro-batch;
                  then all leave the step out

A step that is left out changes neither parameters nor buffers. The step and the data advance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hvdtrain.errors import TrainingDiverged
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.training.callback import Callback
from hvdtrain.training.gradient_values import is_finite, norm_of, watch

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer

_MAX_IN_A_ROW = 10
"""Steps left out in a row, after which the run ends: the weights or the data are beyond repair."""
_MAX_RECORDED = 100


class GradientGuard(Callback):
    """Leaves steps out whose loss or gradient is not finite."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._skipped: list[dict[str, Any]] = []
        self._own: list[tuple[int, str, Tensor]] = []
        """The norms of this rank's own gradients in this step, in the order of backward; with
        micro-batch and name.
        """
        self._parameters: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._handles: list[Any] = []

    def on_start(self, trainer: Trainer) -> None:
        """Watch the gradients of this rank, and remember the buffers."""
        self._parameters = list(trainer.model.parameters())
        self._handles = watch(trainer, self._note)
        self._remember_buffers(trainer.model)

    def _note(self, micro_batch: int, name: str, grad: Tensor) -> None:
        self._own.append((micro_batch, name, norm_of(grad)))

    def _remember_buffers(self, model: nn.Module) -> None:
        self._buffers = [buffer.clone() for buffer in model.buffers()]

    def on_gradients(self, trainer: Trainer, losses: Sequence[Tensor]) -> None:
        """Look at a step's gradient. Raises TrainingDiverged, on every rank, after too many bad
        ones in a row.
        """
        backend = trainer.backend
        own, self._own = self._own, []
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norms = torch.stack([norm_of(grad) for grad in grads])
        norm = torch.linalg.vector_norm(norms)
        total = torch.stack([loss.double().reshape(()) for loss in losses]).sum()
        both = torch.stack([norm, total])
        size, loss = backend.all_reduce(both, "mean").tolist()
        if not (math.isfinite(size) and math.isfinite(loss)):
            bad = "loss" if not math.isfinite(loss) else "norm of the gradient"
            why = f"the {bad} is {loss if bad == 'loss' else size}"
            self._skip(trainer, why, self._first_not_finite(trainer, own, losses))
        else:
            self._in_a_row = 0
            self._remember_buffers(trainer.model)

    def _first_not_finite(
        self, trainer: Trainer, own: list[tuple[int, str, Tensor]], losses: Sequence[Tensor]
    ) -> dict[str, Any]:
        """Return the first rank, micro-batch and parameter that is not finite. Collective."""
        mine: dict[str, Any] | None = None
        for micro_batch, name, norm in own:
            if not is_finite(norm):
                mine = {"micro_batch": micro_batch, "parameter": name}
                break
        else:
            bad = (k for k, loss in enumerate(losses, 1) if not is_finite(loss))
            if (micro := next(bad, None)) is not None:
                is_mean = len(losses) < max((k for k, *_ in own), default=1)
                mine = {} if is_mean else {"micro_batch": micro}
        everyone = trainer.backend.all_gather_object((trainer.world.rank, mine))
        for rank, found in everyone:
            if found is not None:
                return {"rank": rank, **found}
        # Each rank's own is finite: the sum has overflowed, as compressed gradients may.
        named = trainer.model.named_parameters()
        grads = ((name, p.grad) for name, p in named if p.grad is not None)
        bad_names = [name for name, grad in grads if not is_finite(grad)]
        return {"parameter": uncompiled(bad_names[0])} if bad_names else {}

    def _skip(self, trainer: Trainer, why: str, where: dict[str, Any]) -> None:
        """Leave the step out; raise TrainingDiverged, on every rank, if it is one too many."""
        progress = trainer.progress
        step, self._in_a_row = progress.step + 1, self._in_a_row + 1
        order = f"position {progress.sample} of epoch {progress.epoch + 1}"
        place = [f"{name.replace('_', '-')} {value}" for name, value in where.items()]
        place = place if "rank" in where else ["the mean of the ranks", *place]
        text = f"step {step} ({order}): {why}, first on {', '.join(place)}"
        if self._in_a_row >= _MAX_IN_A_ROW:
            raise TrainingDiverged(
                f"{text}; it would be the {_MAX_IN_A_ROW}th step in a row that is left out; lower "
                "the learning rate, clip with --clip-norm, or look at the data",
                on_all_ranks=True,
            )
        trainer.skip_step()
        with torch.no_grad():
            for buffer, value in zip(trainer.model.buffers(), self._buffers, strict=True):
                buffer.copy_(value)
        trainer.console.print_line(f"skipped  {text}")
        entry = {"step": step, "epoch": progress.epoch + 1, "sample": progress.sample}
        kept = self._skipped[1 - _MAX_RECORDED :]
        self._skipped = [*kept, {**entry, **where, "why": why}]
        trainer.record(skipped_steps=self._skipped)

    def on_end(self, trainer: Trainer) -> None:
        """Remove the hooks; record all skipped steps, also those before a resume."""
        for handle in self._handles:
            handle.remove()
        if self._skipped:
            trainer.record(skipped_steps=self._skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that were left out."""
        return {"skipped": self._skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self._skipped, self._in_a_row = list(state["skipped"]), state["in_a_row"]
