"""One optimizer step, of the model and optimizer that the backend has prepared, and its numbers.

The Trainer builds the model before it opens the run directory, and the `Stepper` afterwards. Each
step of its loop is `backward`, the callbacks' `on_gradients`, and `update`. The `Meter` sums times
and losses from one `record` for metrics.jsonl to the next.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.backends.base import Backend, RankState
from hvdtrain.errors import InputError, TrainingDiverged
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.system.trees import parameters_of
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.order import StepBatches
from hvdtrain.training.determinism import derive_seed, seed_all
from hvdtrain.training.evaluation import unchanged_buffers
from hvdtrain.training.metrics import Mean
from hvdtrain.training.nonfinite import first_gradient, first_loss, is_finite, values_of
from hvdtrain.training.precision import Precision
from hvdtrain.training.progress import Progress
from hvdtrain.training.schedule import lr_factor, set_base_lr
from hvdtrain.training.task import CheckedTask
from hvdtrain.training.weighted_loss import WeightedLosses

_MAX_OVERFLOWS = 25
"""Steps in a row that the loss scaler may leave out: enough to find the scale, from 65,536 down."""

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
        self._taken = 0
        """The steps that were not left out."""
        self._samples = 0
        self.logged = Mean()
        """What the task logs."""
        self._since = time.perf_counter()

    def count(self, step: int, samples: int, losses: Sequence[Tensor]) -> None:
        """Count one optimizer step, with `samples` of all ranks. Does not synchronise a device.

        `losses`: see `Callback.on_gradients`; none for a step left out.
        """
        if losses:
            wide = (loss if loss.dtype == torch.float64 else loss.float() for loss in losses)
            of_step = reduce(torch.add, wide)
            self._losses.append((step, of_step))
            # The first is converted; the sum with later ones is of the wider type.
            self._loss = of_step.double() if self._loss is None else self._loss + of_step
            self._taken += 1
        self._steps += 1
        self._samples += samples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out: that of a checkpoint, for example."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def time_next(self, *arguments: Any) -> Any:
        """Return what `next` of these returns, and count its time as waiting for data."""
        began = time.perf_counter()
        loaded = next(*arguments)
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
        ranks. `bad_gradient` names the first parameter that made it not finite, "" if that is not
        known; None if it need not be finite. Raises TrainingDiverged, on every rank, for it, and if
        the loss of any rank is not finite.
        """
        steps = self._steps
        numbers, has_logged, logged = {}, 0.0, self.logged.shares()
        if self._loss is not None:  # else all of the steps were left out, on all ranks
            mean = self._loss / self._taken
            pair = torch.stack([mean, torch.full_like(mean, bool(logged))])
            numbers["loss"], has_logged = self._backend.all_reduce(pair, "mean").tolist()
        elapsed = time.perf_counter() - self._since
        if norm is not None:
            numbers["grad_norm"] = float(norm)
        bad, where = "", ""
        if not math.isfinite(numbers.get("loss", 0.0)):
            bad, found = "loss", first_loss(self._backend, self._losses)
            where = "" if found is None else f", first in step {found[0]} on rank {found[1]}"
        elif bad_gradient is not None and not math.isfinite(numbers.get("grad_norm", 0.0)):
            bad = "grad_norm"
            where = f", first in the gradient of {bad_gradient}" if bad_gradient else ""
        if bad:
            raise TrainingDiverged(
                f"the {bad} became {numbers[bad]} in steps {step - steps + 1} to {step}{where}; "
                "lower the learning rate, clip with --clip-norm, skip such steps with "
                "--on-nonfinite skip, or check the data; no checkpoint of these steps was kept",
                on_all_ranks=True,
            )
        timing = {
            "step_ms": 1000 * elapsed / steps,
            "data_ms": 1000 * self._data_s / steps,
            "samples_per_s": self._samples / elapsed,
        }
        self.restart()
        everyone = self._backend.all_gather_object(logged) if has_logged else []
        of_task = {
            name: Mean.combine([shares[name] for shares in everyone if name in shares])
            for name in sorted({name for shares in everyone for name in shares})
        }
        if taken := of_task.keys() & {*numbers, *timing, "step", "epoch", "lr"}:
            raise InputError(
                f"the task logs {', '.join(sorted(taken))}, a name that hvdtrain uses; "
                "choose another name",
                on_all_ranks=True,
            )
        return {**numbers, **of_task, **timing}


def build_model(
    task: CheckedTask, config: TrainConfig, precision: Precision, backend: Backend
) -> nn.Module:
    """Return the task's model in its precision, on the device of this rank. Not collective."""
    # Seed again: the weights must not depend on how many random numbers the datasets drew.
    seed_all(derive_seed(config.seed))
    model = task.model()
    if config.sync_bn:  # `prepare` chooses the class of the layers
        if not any(isinstance(module, BatchNormBase) for module in model.modules()):
            raise InputError(
                f"--sync-bn has no effect: the model of {config.task} has no BatchNorm layer; "
                "leave it out"
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return precision.convert(model).to(backend.device)


class RankBuffers:
    """The buffers of one rank, where each keeps its own BatchNorm statistics: `--buffers local`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers that the model's own state has. Not collective."""
        saved = self._model.state_dict()
        return {uncompiled(n): t for n, t in self._model.named_buffers() if n in saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Not collective."""
        for name, buffer in self.state_dict().items():
            buffer.copy_(state[name])


class Stepper:
    """What the loop trains and checkpoints save, and one step of it. Load state afterwards."""

    def __init__(
        self,
        model: nn.Module,
        task: CheckedTask,
        config: TrainConfig,
        precision: Precision,
        backend: Backend,
        progress: Progress,
        meter: Meter,
    ) -> None:
        """Create the optimizer, and prepare both by the backend. Collective.

        Raises what `Backend.prepare` does.
        """
        self.model, self.precision = model, precision
        self._task, self._config, self._backend = task, config, backend
        self._progress, self._meter = progress, meter
        optimizer, size = task.optimizer(model), backend.world.size
        factor = lr_factor(config.lr_scaling, size, config.accumulate)
        self.lrs = set_base_lr(optimizer, config.lr, factor)
        """The learning rates by parameter group, before and after scaling."""
        known = len(backend.rank_states)
        self.net, self.optimizer = backend.prepare(model, optimizer)
        """The model in the backend's wrapper, if it has one: what the loss is computed with."""
        if config.compile:
            self.net = torch.compile(self.net)  # type: ignore[assignment]
        self.rank_states: dict[str, RankState] = {
            type(state).__name__: state for state in backend.rank_states[known:]
        }
        """What each rank keeps for itself between steps, by its name in checkpoints."""
        precision.make_masters(model, self.optimizer)
        if config.buffers == "local" and size > 1:
            self.rank_states["RankBuffers"] = RankBuffers(model)
        self._has_compared_losses = False
        self.last_lrs: list[float | Tensor] = []
        """The learning rates of the last step, by parameter group."""
        self._norm: Tensor | None = None
        """The norm of its gradient, if it was computed."""
        self._bad_gradient = ""
        """The first parameter whose gradient is not finite in a step that is logged."""
        self._overflows = 0
        """The last steps in a row that the loss scaler has left out, as a gradient overflowed."""

    def backward(self, batches: StepBatches) -> list[Tensor]:
        """Compute the mean gradient of the micro-batches in `batches`, and return their losses; if
        they have weights, the loss of the step alone. Collective.

        Raises InputError for a parameter without a gradient. The gradients stay: the caller clears
        them.
        """
        # Seed by the step's number, so that a resumed run draws the same random numbers.
        seed_all(derive_seed(self._config.seed, self._progress.step, self._backend.world.rank))
        losses = []
        weights, weighted = batches.weights, None
        for micro in range(batches.num):
            batch = self._meter.time_next(batches.data)
            counts = weights is None or weights[micro] > 0
            with (
                self._backend.gradients(self.optimizer, micro == batches.num - 1),
                nullcontext() if counts else unchanged_buffers(self.model),
            ):
                with self.precision.autocast():
                    loss = self._task.loss(self.net, batch, self._meter.logged)
                    if not self._has_compared_losses:
                        self._compare_losses(isinstance(loss, tuple))
                    # Divided by this step's number of micro-batches, not by the option
                    # `accumulate`: an epoch's last step may have fewer.
                    if isinstance(loss, tuple):
                        loss, weight = loss
                        weighted = weighted or self._make_weighted(batches.num)
                        loss = weighted.scale(loss, weight if counts else 0.0)
                    elif weights is None:
                        loss = loss / batches.num
                    else:
                        loss = loss * weights[micro]
                self.precision.backward(loss)
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
            type(layer).__name__ == "SyncBatchNorm" for layer in self.model.modules()
        )
        return WeightedLosses(self._backend, self.model.parameters(), num_micro_batches, sync_bn)

    def update(self, samples: int, losses: list[Tensor], logs: bool) -> None:
        """Clip the gradients, and step the optimizer. Count the step, with `samples` of all ranks.
        Collective.

        `losses`: what `backward` returned; none leaves the step out. `logs`: `record` follows, so
        compute what it needs. Raises TrainingDiverged, on every rank, if the loss scaler leaves too
        many steps out in a row.
        """
        progress, optimizer = self._progress, self.optimizer
        lrs = [group["lr"] for group in optimizer.param_groups]
        self.last_lrs = [lr.clone() if isinstance(lr, Tensor) else lr for lr in lrs]
        self._norm, self._bad_gradient = None, ""
        if losses:
            self.precision.unscale_(optimizer)
            self._clip(logs)
            if self.precision.step(optimizer):
                self._overflows = 0
            else:
                losses, self._overflows = [], self._overflows + 1
        else:
            mark_as_stepped(optimizer)  # the schedule advances all the same
        progress.step += 1
        progress.sample += samples
        self._meter.count(progress.step, samples, losses)
        if self._overflows > _MAX_OVERFLOWS:
            raise TrainingDiverged(
                f"the gradient overflowed fp16 in the {self._overflows} steps up to step "
                f"{progress.step}, at every loss scale; lower the learning rate, clip with "
                "--clip-norm, check the data, or train with --precision bf16",
                on_all_ranks=True,
            )

    def _clip(self, logs: bool) -> None:
        """Clip the gradients, which are equal on all ranks by now. Compute their norm if that needs
        it, or a record.
        """
        max_norm = self._config.clip_norm
        clips = not math.isinf(max_norm)
        if not (logs or clips):
            return
        parameters = parameters_of(self.optimizer)
        grads = [p.grad for p in parameters if p.grad is not None]
        if clips and any(grad.is_sparse for grad in grads):
            raise InputError("--clip-norm cannot clip sparse gradients; leave it out")
        self._norm = norm = nn.utils.get_total_norm([values_of(grad) for grad in grads])
        # Before clipping, which spreads one bad gradient to all parameters.
        if logs and not self.precision.scaler.is_enabled() and not is_finite(norm):
            self._bad_gradient = first_gradient(self.model)
        if clips:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def record(self) -> dict[str, Any]:
        """Return the last step's record for metrics.jsonl, with the means since the one before.
        Collective. Raises TrainingDiverged, on every rank, if a loss or the norm is not finite.
        """
        progress, scaler = self._progress, self.precision.scaler
        # The norm may be infinite with a loss scaler, which leaves such a step out.
        bad = None if scaler.is_enabled() else self._bad_gradient
        record = {
            "step": progress.step,
            "epoch": progress.epoch_number,
            "lr": float(self.last_lrs[0]),
            **self._meter.flush(progress.step, self._norm, bad),
        }
        return {**record, "loss_scale": scaler.get_scale()} if scaler.is_enabled() else record
