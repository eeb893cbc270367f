"""One optimizer step: forward and backward passes, the averaged gradient, and the update.

The Trainer's loop calls `Stepper.take`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError, TrainingDiverged
from hvdtrain.system.trees import parameters_of
from hvdtrain.training import determinism
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.order import StepBatches
from hvdtrain.training.determinism import derive_seed
from hvdtrain.training.evaluation import unchanged_buffers
from hvdtrain.training.meter import Meter
from hvdtrain.training.nonfinite import first_gradient, is_finite, values_of
from hvdtrain.training.prepared_model import PreparedModel
from hvdtrain.training.progress import Progress
from hvdtrain.training.task import CheckedTask
from hvdtrain.training.weighted_loss import WeightedLosses

_MAX_OVERFLOWS = 25
"""Steps in a row that the loss scaler may leave out: enough to find the scale, from 65,536 down."""


class Stepper:
    """Takes the steps of one prepared model."""

    def __init__(
        self,
        task: CheckedTask,
        backend: Backend,
        config: TrainConfig,
        prepared: PreparedModel,
        progress: Progress,
        meter: Meter,
        on_gradients: Callable[[list[Tensor]], bool],
    ) -> None:
        """`on_gradients` is given the losses of each step; it returns whether to leave it out."""
        self._task, self._backend = task, backend
        self._clip_norm, self._seed = config.clip_norm, config.seed
        self._model, self._net = prepared.model, prepared.net
        self._optimizer, self._precision = prepared.optimizer, prepared.precision
        self._progress, self._meter = progress, meter
        self._on_gradients = on_gradients
        self._has_compared_losses = False
        self._lrs: list[float | Tensor] = []
        """The rates of the last step, by parameter group."""
        self._norm: Tensor | None = None
        """The norm of its gradient, if it was computed."""
        self._bad_gradient: str | None = None
        """The first parameter whose gradient is not finite in a step that is logged; None if the
        norm is finite, or may be infinite, as the loss scaler leaves such a step out.
        """
        self._overflows = 0
        """The last steps in a row that the loss scaler has left out, as a gradient overflowed."""

    def take(self, batches: StepBatches, logs: bool) -> None:
        """Take one step: gradients, clipping and optimizer. Collective.

        The gradients stay: the caller clears them. `logs`: `record` follows, so compute what it
        needs. Raises InputError for a parameter without a gradient, and TrainingDiverged, on every
        rank, if the loss scaler leaves too many steps out in a row.
        """
        progress, optimizer, precision = self._progress, self._optimizer, self._precision
        # Seed by the step's number, so that a resumed run draws the same random numbers.
        determinism.seed_all(derive_seed(self._seed, progress.step, self._backend.world.rank))
        losses = self._backward(batches)
        is_skipped = self._on_gradients(losses)
        lrs = [group["lr"] for group in optimizer.param_groups]
        self._lrs = [lr.clone() if isinstance(lr, Tensor) else lr for lr in lrs]
        self._norm = self._bad_gradient = None
        if is_skipped:
            mark_as_stepped(optimizer)  # the schedule advances all the same
        else:
            precision.unscale_(optimizer)
            self._clip(logs)
            is_skipped = not precision.step(optimizer)
            self._overflows = self._overflows + 1 if is_skipped else 0
        progress.step += 1
        progress.sample += batches.samples
        self._meter.count(progress.step, batches.samples, [] if is_skipped else losses)
        if self._overflows > _MAX_OVERFLOWS:
            raise TrainingDiverged(
                f"the gradient has overflowed fp16 in the {self._overflows} steps up to "
                f"{progress.step}, whatever the loss scale; lower the learning rate, clip with "
                "--clip-norm, look at the data, or train with --precision bf16",
                on_all_ranks=True,
            )

    def record(self) -> dict[str, Any]:
        """Return the last step's record for metrics.jsonl, with the means since the one before.
        Collective. Raises TrainingDiverged, on every rank, if a loss or the norm is not finite.
        """
        progress = self._progress
        norm, bad = self._norm, self._bad_gradient
        # Of a step that nobody knew would have a record.
        if bad is None and norm is not None and not self._precision.scaler.is_enabled():
            bad = None if is_finite(norm) else ""
        numbers = self._meter.flush(progress.step, norm, bad)
        record = {"step": progress.step, "epoch": progress.epoch_number, "lr": self.last_lrs[0]}
        return {**record, **numbers, **self._precision.loss_scale()}

    @property
    def last_lrs(self) -> list[float]:
        """The learning rates of the last step, by parameter group. May wait for the device."""
        return [float(lr) for lr in self._lrs]

    def _backward(self, batches: StepBatches) -> list[Tensor]:
        """Compute the mean gradient of the micro-batches in `batches`, and return their losses; if
        they have weights, the loss of the step alone. Collective.
        """
        losses = []
        weights, weighted = batches.weights, None
        for micro in range(batches.num):
            batch = self._meter.time_data(lambda: next(batches.data))
            counts = weights is None or weights[micro] > 0
            with (
                self._backend.gradients(self._optimizer, micro == batches.num - 1),
                contextlib.nullcontext() if counts else unchanged_buffers(self._model),
            ):
                with self._precision.autocast():
                    loss = self._task.loss(self._net, batch, self._meter.logged)
                    if not self._has_compared_losses:
                        self._compare_losses(isinstance(loss, tuple))
                    # Divided by this step's number of micro-batches, not by the option
                    # `accumulate`: an epoch's last step may have fewer.
                    if isinstance(loss, tuple):
                        loss, weight = loss
                        if weighted is None:
                            weighted = self._make_weighted(batches.num)
                        loss = weighted.scale(loss, weight if counts else 0.0)
                    elif weights is None:
                        loss = loss / batches.num
                    else:
                        loss = loss * weights[micro]
                self._precision.backward(loss)
            losses.append(loss.detach())
        return losses if weighted is None else [weighted.mean().detach()]

    def _compare_losses(self, has_weight: bool) -> None:
        """Raise InputError, on every rank, if the first loss has a weight on some ranks only: these
        would wait in a collective that the others do not call. Collective.
        """
        self._has_compared_losses = True
        everyone = self._backend.all_gather_object(has_weight)
        if len(set(everyone)) > 1:
            raise InputError(
                f"loss returned a weight on rank {everyone.index(True)}, and none on rank "
                f"{everyone.index(False)}; return a weight with every loss on every rank, or with "
                "none",
                on_all_ranks=True,
            )

    def _make_weighted(self, num_micro_batches: int) -> WeightedLosses:
        """Return what scales the losses of a step that have weights."""
        # The backward pass of such a layer needs all ranks, also those whose loss has no weight.
        # torch's, Horovod's and the backends' all have this name.
        sync_bn = self._backend.world.size > 1 and any(
            type(layer).__name__ == "SyncBatchNorm" for layer in self._model.modules()
        )
        return WeightedLosses(self._backend, self._model.parameters(), num_micro_batches, sync_bn)

    def _clip(self, logs: bool) -> None:
        """Clip the gradients, which are equal on all ranks by now. Compute their norm if that needs
        it, or a record.
        """
        clips = not math.isinf(self._clip_norm)
        if not (logs or clips):
            return
        parameters = parameters_of(self._optimizer)
        grads = [p.grad for p in parameters if p.grad is not None]
        if clips and any(grad.is_sparse for grad in grads):
            raise InputError("--clip-norm cannot clip sparse gradients; leave it out")
        self._norm = norm = nn.utils.get_total_norm([values_of(grad) for grad in grads])
        # Before clipping, which spreads one bad gradient to all parameters.
        if logs and not self._precision.scaler.is_enabled() and not is_finite(norm):
            self._bad_gradient = first_gradient(self._model)
        if clips:
            nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)
