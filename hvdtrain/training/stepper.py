"""One optimizer step: forward and backward passes, the averaged gradient, and the update.

The Trainer's loop calls `Stepper.take`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError, TrainingDiverged
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.system.trees import parameters_of
from hvdtrain.training import determinism
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.order import StepBatches
from hvdtrain.training.determinism import derive_seed
from hvdtrain.training.evaluation import unchanged_buffers
from hvdtrain.training.gradient_values import is_finite
from hvdtrain.training.meter import Meter
from hvdtrain.training.prepared_model import PreparedModel
from hvdtrain.training.progress import Progress
from hvdtrain.training.schedule import RateSchedule
from hvdtrain.training.task import CheckedTask
from hvdtrain.training.weighted_loss import WeightedLosses

_MAX_LEFT_OUT = 25
"""Steps in a row that the loss scaler may leave out: enough to find the scale, from 65,536 down."""


class Stepper:
    """Takes the steps of one prepared model."""

    def __init__(
        self,
        task: CheckedTask,
        backend: Backend,
        config: TrainConfig,
        prepared: PreparedModel,
        schedule: RateSchedule,
        progress: Progress,
        meter: Meter,
        on_gradients: Callable[[list[Tensor]], bool] | None = None,
    ) -> None:
        """`on_gradients` is given the losses of each step; it returns whether to leave it out."""
        self._task, self._backend = task, backend
        self._clip_norm, self._seed = config.clip_norm, config.seed
        self._clips = not math.isinf(config.clip_norm)
        self._has_compared_losses = False
        self._names_suspects = config.on_nonfinite == "stop"
        self._suspect: tuple[int, str] | None = None
        """The first step seen with a loss or norm that is not finite, and the parameter."""
        self._model, self._net = prepared.model, prepared.net
        self._optimizer, self._precision = prepared.optimizer, prepared.precision
        self._schedule = schedule
        self._progress, self._meter = progress, meter
        self._on_gradients = on_gradients
        self._weighted: WeightedLosses | None = None
        """The losses of the last step, if they have weights."""
        self._lrs: list[float | Tensor] = []
        self._norm: Tensor | None = None
        """The norm of its gradient, if it was computed."""
        self._scale: dict[str, float] = {}
        """Its loss scale, if it was read."""
        self._left_out = 0
        """The last steps in a row that the loss scaler has left out, as a gradient overflowed."""
        self._micro_batch = 0

    def take(self, batches: StepBatches, logs: bool) -> None:
        """Take one step. Collective.

        The gradients stay: the caller clears them. `logs`: `record` follows, so compute what it
        needs. Raises InputError for a parameter without a gradient.
        """
        progress = self._progress
        # Seed by the step's number, so that a resumed run draws the same random numbers.
        determinism.seed_all(derive_seed(self._seed, progress.step, self._backend.world.rank))
        losses = self._backward(batches)
        step = progress.step + 1
        skips = self._on_gradients is not None and self._on_gradients(losses)
        # On a GPU only a step that logs: each look waits for the device.
        if not skips and (logs or self._backend.device.type == "cpu"):
            self._check(step, losses)
        self._update(logs, skips)
        if self._left_out:
            self._check_left_out(step)
            skips = True
        progress.step = step
        progress.sample += batches.samples
        self._meter.count(batches.samples, [] if skips else losses, self._weighted is not None)

    def record(self) -> dict[str, Any]:
        """Return the last step's record for metrics.jsonl, with the means since the one before.
        Collective. Raises TrainingDiverged, on every rank, if a loss or the norm is not finite.
        """
        progress, may_overflow = self._progress, self._precision.scaler.is_enabled()
        numbers = self._meter.flush(progress.step, self._norm, may_overflow, self._suspect)
        record = {"step": progress.step, "epoch": progress.epoch_number, "lr": self.last_lrs[0]}
        return {**record, **numbers, **self._scale}

    @property
    def last_lrs(self) -> list[float]:
        """The learning rates of the last step, by parameter group. May wait for the device."""
        return [float(lr) for lr in self._lrs]

    @property
    def micro_batch(self) -> int:
        """The micro-batch at work, counted from 1; 0 when the backward passes of a step are over,
        and while the gradients become zeros, as its weight is 0.
        """
        is_weight_0 = self._weighted is not None and self._weighted.is_weight_0
        return 0 if is_weight_0 else self._micro_batch

    def _backward(self, batches: StepBatches) -> list[Tensor]:
        """Compute the mean gradient of the micro-batches in `batches`, and return their losses.
        Collective.
        """
        losses = []
        num_micro_batches, weights = batches.num, batches.weights
        self._weighted = weighted = None
        for micro in range(num_micro_batches):
            self._micro_batch = micro + 1
            batch = self._meter.time_data(lambda: next(batches.data))
            counts = weights is None or weights[micro] > 0
            last = micro == num_micro_batches - 1
            with (
                self._backend.gradients(self._optimizer, last),
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
                            self._weighted = weighted = self._make_weighted(num_micro_batches)
                        loss = weighted.scale(loss, weight if counts else 0.0)
                    elif weights is None:
                        loss = loss / num_micro_batches
                    else:
                        loss = loss * weights[micro]
                self._precision.backward(loss)
                if last:
                    self._micro_batch = 0
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

    def _update(self, logs: bool, skips: bool) -> None:
        """Clip the averaged gradients, and step optimizer and schedule. Collective.

        `skips`: leave the optimizer out.
        """
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        self._lrs = [lr.clone() if isinstance(lr, Tensor) else lr for lr in lrs]
        self._scale = self._precision.loss_scale() if logs else {}
        self._norm = None
        if skips:
            mark_as_stepped(self._optimizer)  # the schedule advances without it
        else:
            self._norm = self._clip_and_step(logs)
        self._schedule.after_step()

    def _clip_and_step(self, logs: bool) -> Tensor | None:
        optimizer = self._optimizer
        self._precision.unscale_(optimizer)
        norm = self._clip(logs)
        self._left_out = 0 if self._precision.step(optimizer) else self._left_out + 1
        return norm

    def _check_left_out(self, step: int) -> None:
        """Forget what was not finite in a step that the loss scaler has left out. Raises
        TrainingDiverged, on every rank, after too many in a row.
        """
        if self._suspect is not None and self._suspect[0] == step:
            self._suspect = None
        if self._left_out > _MAX_LEFT_OUT:
            raise TrainingDiverged(
                f"the gradient has overflowed fp16 in the steps {step - self._left_out + 1} to "
                f"{step}, whatever the loss scale; lower the learning rate, clip with --clip-norm, "
                "look at the data, or train with --precision bf16",
                on_all_ranks=True,
            )

    def _check(self, step: int, values: Iterable[Tensor]) -> None:
        """Record the step and a parameter, once, if a loss or norm is not finite.

        Call it before clipping and the update, which spread one bad gradient to all parameters.
        """
        if not self._names_suspects or self._suspect is not None:
            return
        if not all(math.isfinite(value.item()) for value in values):
            self._suspect = step, self._find_suspect()

    def _find_suspect(self) -> str:
        """Return the first parameter with weights that are not finite, else with such a gradient.

        The order is that of backward: from the last parameter to the first. "" if there is none.
        """
        named = [(uncompiled(name), p) for name, p in self._model.named_parameters()][::-1]
        weights = (f"the weights of {name}" for name, p in named if not is_finite(p))
        grads = ((name, p.grad) for name, p in named if p.grad is not None)
        found = (f"the gradient of {name}" for name, grad in grads if not is_finite(grad))
        return next(itertools.chain(weights, found), "")

    def _clip(self, wanted: bool) -> Tensor | None:
        """Clip the gradients, which are equal on all ranks by now, and return their norm.

        Without clipping, compute the norm only if it is `wanted`; else return None.
        """
        if not wanted and not self._clips:
            return None
        parameters = parameters_of(self._optimizer)
        grads = [p.grad for p in parameters if p.grad is not None]
        if self._clips and any(grad.is_sparse for grad in grads):
            raise InputError("--clip-norm cannot clip sparse gradients; leave it out")
        norm = nn.utils.get_total_norm(
            [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        )
        # The loss scale leaves a step out that overflows.
        if not self._precision.scaler.is_enabled() and (wanted or norm.device.type == "cpu"):
            self._check(self._progress.step + 1, [norm])
        if self._clips:
            nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)
        return norm
