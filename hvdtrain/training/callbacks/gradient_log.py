"""`--log-gradients N`: a callback that writes a line per parameter into gradients.jsonl.

Of every N-th step. The averaged gradient is read before it is clipped; the weights before and after
the step. Each rank's own gradient is read before any engine sends it, as `p.grad` so far and what
backward computes: this works on every backend, as all of them average what autograd accumulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.training import run_dir
from hvdtrain.training.callback import Callback
from hvdtrain.training.gradient_values import norm_of, values_of, watch

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer

FILE = "gradients.jsonl"


class GradientLog(Callback):
    """Writes step, name, norm, mean, max (of the absolute values), zeros (their share),
    update_ratio (norm of the update / norm of the weights) and local_norms (by rank).

    A value is null where it has no meaning: the ratio for weights of 0, the norm of a rank whose
    batch did not use the parameter.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._handles: list[Any] = []
        self._own: dict[str, tuple[int, Tensor]] = {}
        """This rank's own gradients, summed over the micro-batches of the step, with the last one
        that used the parameter.
        """
        self._lines: list[dict[str, Any]] = []
        self._weights: dict[str, Tensor] = {}
        """Copies of the weights before the step."""

    def on_start(self, trainer: Trainer) -> None:
        """Delete the lines of the steps that a resumed run takes again."""
        if trainer.run_dir is not None:
            run_dir.delete_lines(trainer.run_dir / FILE, trainer.progress.step)
        self._watch_if_due(trainer)

    def on_gradients(self, trainer: Trainer, losses: Sequence[Tensor]) -> None:
        """Read the gradients of a step that is due. Collective then."""
        step = trainer.progress.step + 1
        if step % self._every:
            return
        for handle in self._handles:
            handle.remove()
        scale = trainer.precision.scaler.get_scale()
        own = {
            name: float(norm_of(grad)) * trainer._stepper.factor_of(micro_batch) / scale
            for name, (micro_batch, grad) in self._own.items()
        }
        everyone = trainer.backend.all_gather_object(own)
        self._own, self._weights, self._lines = {}, {}, []
        if trainer.world.rank > 0:
            return
        for name, p in trainer.model.named_parameters():
            if p.grad is None:
                continue
            name = uncompiled(name)
            local_norms = [norms.get(name) for norms in everyone]
            about = {"step": step, "name": name, **_statistics(p.grad, scale)}
            self._lines.append({**about, "local_norms": local_norms})
            self._weights[name] = p.detach().clone()

    def on_step_end(self, trainer: Trainer) -> None:
        """Add the updates, and write the lines of the step."""
        if trainer.progress.step % self._every == 0:
            self._write(trainer)
        self._watch_if_due(trainer)

    def _write(self, trainer: Trainer) -> None:
        named = {uncompiled(name): p.detach() for name, p in trainer.model.named_parameters()}
        for line in self._lines:
            before = self._weights[line["name"]]
            size, update = float(norm_of(before)), float(norm_of(named[line["name"]] - before))
            line["update_ratio"] = update / size if size else None
        if trainer.run_dir is not None:
            run_dir.append_lines(trainer.run_dir / FILE, self._lines)
        self._lines, self._weights = [], {}

    def _watch_if_due(self, trainer: Trainer) -> None:
        """Note this rank's own gradients in the next step, if it is due."""
        if (trainer.progress.step + 1) % self._every:
            return
        parameters = {uncompiled(name): p for name, p in trainer.model.named_parameters()}

        def note(micro_batch: int, name: str, grad: Tensor) -> None:
            before = parameters[name].grad  # the sum until now, which a weight may have rescaled
            self._own[name] = micro_batch, grad.clone() if before is None else before + grad

        self._handles = watch(trainer, note)

    def on_end(self, trainer: Trainer) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _statistics(grad: Tensor, scale: float) -> dict[str, float]:
    values = values_of(grad).double() / scale
    num = grad.numel() * (2 if grad.is_complex() else 1)  # of a sparse one, all elements
    numbers = (
        torch.linalg.vector_norm(values),
        values.sum() / num,
        values.abs().max() if values.numel() else values.sum(),
        1 - values.count_nonzero() / num,
    )
    return dict(zip(("norm", "mean", "max", "zeros"), torch.stack(numbers).tolist(), strict=True))
