"""The training loop: `Trainer`. It has no branch for a particular backend or launcher.

`hvdtrain train` calls `fit`; `hvdtrain compare` calls `set_up`, and measures `steps`.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvdtrain import provenance
from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.backends.base import Backend
from hvdtrain.backends.model_sync import broadcast_state, to_cpu
from hvdtrain.errors import HvdtrainError, InputError
from hvdtrain.failure import cause_of
from hvdtrain.training import checkpoint, determinism, methods, run_state, weights
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console, describe, make_console
from hvdtrain.training.data_loading import (
    ShardedBatches,
    Window,
    check_same_plan,
    derive_seed,
    make_loader,
    on_device,
    shard,
    unchanged_buffers,
)
from hvdtrain.training.decisions import Decisions
from hvdtrain.training.inference import EvalData, evaluate, make_eval_data
from hvdtrain.training.ledger import Ledger, format_rates
from hvdtrain.training.local_sgd import LocalSGD
from hvdtrain.training.lr_schedule import (
    RateSchedule,
    Unit,
    build_plateau,
    build_schedule,
    lr_factor,
    planned_rates,
    set_base_lr,
)
from hvdtrain.training.meter import Meter
from hvdtrain.training.metrics import agreed_fingerprint
from hvdtrain.training.precision import Precision
from hvdtrain.training.run_dir import RunDirectory, make_default
from hvdtrain.training.streams import StreamBatches
from hvdtrain.training.task import CheckedTask, Task
from hvdtrain.transports.malloc import keep_freed_memory


@dataclass(frozen=True)
class Result:
    """The outcome of a run, equal on every rank."""

    steps: int
    metrics: dict[str, Any]
    """The last evaluation, over all samples of the evaluation data: numbers, and lists of them."""
    params_sha256: str
    run_dir: Path
    best_checkpoint: Path | None = None
    """With `--keep-best`: the checkpoint of the best evaluation."""


@dataclass(frozen=True)
class StepTaken:
    """One optimizer step, as measured on this rank."""

    number: int
    data_s: float
    """Seconds for which the rank waited for data."""
    loss: Tensor
    """The mean over this rank's samples: a scalar on the device."""


class Trainer:
    """Trains one task on one open backend. Every method is collective: every rank calls it.

    `origins` maps each option to its source (flag, variable, file), for run.json.
    """

    def __init__(
        self,
        task: Task,
        backend: Backend,
        config: TrainConfig,
        origins: dict[str, str] | None = None,
    ) -> None:
        config.check()
        methods.check(config, backend.name)
        self.task = task
        self._checked = CheckedTask(task)
        self.backend = backend
        self.config = config
        self.world = backend.world
        self.console: Console = make_console(self.world)
        self.precision = Precision(config.precision, backend.device, config.opt_level)
        self.progress = run_state.Progress()
        self.decisions = Decisions(config.early_stop_criterion(), config.keep_best_criterion())
        self.on_batch: Callable[[Any], None] | None = None
        """Called with every micro-batch of this rank, before its forward pass."""
        self._records = True
        self._origins = origins or {}
        self._run_dir: RunDirectory | None = None
        self._local: LocalSGD | None = None
        self._checkpoint_steps, self._checkpoint_epochs = config.checkpoint_interval()
        self._saved_step = -1
        self._last_step = -1
        """The last step of the run, as soon as it is known."""
        self._own_samples = 0
        self._save_is_due = False
        self._resumed_from: str | None = None
        self._best_path: Path | None = None
        """Where the checkpoint of the best evaluation is; on rank 0."""
        self._last_lrs: list[float] = []
        """The rates of the last step that was logged, by parameter group."""

    def fit(self) -> Result:
        """Train to the end and return the outcome. Collective.

        Raises InputError, CheckpointError or TrainingDiverged, and records every exception in
        run.json.
        """
        try:
            self.set_up()
            result = self._train()
        except BaseException as error:
            self._record_failure(error)
            raise
        finally:
            self.console.stop()
            if self._run_dir is not None:
                self._run_dir.close()
        return result

    def set_up(self, record: bool = True) -> None:
        """Create data, model, optimizer and run directory, and prepare the backend. Collective.

        Call it before `steps`; `fit` calls it itself. Without `record` there is no run directory
        and no output.
        """
        self._records = record
        with self.backend.share_errors():
            self._build()
        check_same_plan(self.backend, *self._datasets, self.config)
        with self.backend.share_errors():
            self._open_run_dir()  # only now, so that invalid input creates none
        self._start()

    def steps(self) -> Iterator[StepTaken]:
        """Take one optimizer step for each `next`, epoch after epoch. Collective.

        `hvdtrain compare` measures it. It evaluates, saves and logs nothing, and checks no loss.
        """
        meter = Meter(self.backend)
        while not self._is_finished():
            for _ in self._take_epoch(meter):
                yield StepTaken(self.progress.step, *meter.take())

    # Setting up

    def _build(self) -> None:
        """Create everything that needs no other rank: threads, seeds, loaders and model."""
        config, world = self.config, self.world
        self._threads = determinism.set_threads(config.threads, world, os.environ)
        # On every backend, so that they are comparable: `shm` and `compat` do it by themselves.
        keep_freed_memory()
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        determinism.seed_all(derive_seed(config.seed))
        train, evaluation = self._datasets = self._checked.datasets()
        self._make_loaders(train, evaluation)
        if evaluation is None and (
            config.early_stop or config.keep_best or config.schedule == "plateau"
        ):
            raise InputError(
                "--early-stop, --keep-best and --schedule plateau depend on evaluations, and the "
                f"task {config.task} has no evaluation data; leave them out"
            )
        # Seed again: the weights must not depend on how many random numbers the datasets drew.
        determinism.seed_all(derive_seed(config.seed))
        model = self._checked.model()
        if config.sync_bn:  # `prepare` chooses the class of the layers
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        self.model: nn.Module = self.precision.convert(model).to(self.backend.device)
        if config.init_from is not None and world.rank == 0:  # `prepare` broadcasts them
            found = weights.find(Path(config.init_from))
            weights.load_into(self.model, weights.read(found), found.path)
            self.console.print_line(f"init     from {found.path}")

    def _make_loaders(self, train: Dataset[Any], evaluation: Dataset[Any] | None) -> None:
        """Create the batches and loaders of this rank, of datasets with an index or of streams."""
        config, world, device = self.config, self.world, self.backend.device
        collate = self._checked.collate
        self.batches: ShardedBatches | StreamBatches
        common = (collate, world, device, config.workers, config.seed)
        if isinstance(train, IterableDataset):
            self.batches = StreamBatches(train, config, self.backend, collate, self._state_is_due)
            self._train_loader: DataLoader[Any] = self.batches.loader
        else:
            self.batches = shard(train, config, world, self._checked.sampler)
            self._train_loader = make_loader(train, self.batches, *common)
        self._eval_data: EvalData | None = None
        if evaluation is not None:
            each, workers = self.batches.batch_size, config.workers
            self._eval_data = make_eval_data(
                evaluation, each, collate, self.backend, workers, config.seed
            )

    def _open_run_dir(self) -> None:
        """Check the path in --resume, then create and lock the run directory, on rank 0."""
        if self.world.rank > 0 or not self._records:
            return
        run_state.check(self.config.resume)
        given = self.config.run_dir
        path = Path(given) if given else make_default(self.config.task, self.backend.name)
        self._run_dir = RunDirectory(path, resuming=self.config.resume != "none")
        checkpoint.remove_leftovers(self._run_dir.checkpoints)
        self._run_dir.start(self._about())

    def _start(self) -> None:
        """Prepare the backend, then load state, then build the scheduler: the order matters."""
        optimizer = self._checked.optimizer(self.model)
        factor = lr_factor(self.config.lr_scaling, self.world.size, self.config.accumulate)
        lr_before, lr_after = set_base_lr(optimizer, self.config.lr, factor)
        known = len(self.backend.rank_states)
        local = self.config.sync_every > 0
        kind: Literal["local", "mean"] = "local" if local else "mean"
        self.net, self.optimizer = self.backend.prepare(self.model, optimizer, kind)
        self._rank_states = self.backend.rank_states[known:]
        self.precision.make_masters(self.model, self.optimizer)
        if local:
            self._local = LocalSGD(self.backend, self.model, self.optimizer, self.config)
            if self.config.local_state == "local":
                self._rank_states.append(self._local)
        loaded = self._resume(lr_after)
        self.ledger = self._make_ledger(lr_before, lr_after)
        self._last_step = self.ledger.total_steps or -1
        self.schedule = self._make_schedule(loaded)
        self._restore_decisions(loaded)
        if self._run_dir is not None:
            self._run_dir.update(ledger=self.ledger.as_dict(), resumed_from=self._resumed_from)
            self._run_dir.open_metrics(self.progress.step)
        if self._records:
            self._print_header()

    def _make_ledger(self, lr_before: list[float], lr_after: list[float]) -> Ledger:
        config, batches = self.config, self.batches
        per_epoch = self._steps_left(0) or None
        total = config.max_steps
        if per_epoch is not None:
            total = self._total_steps(per_epoch)
        rates: dict[str, Any] = {}
        if total is not None:
            ahead = self._steps_ahead(per_epoch or 0)
            rates = planned_rates(config, lr_after, total, per_epoch or 0, ahead)
        return Ledger(
            batches.batch_size,
            config.accumulate,
            self.world.size,
            batches.num_samples,
            batches.leftover(),
            per_epoch,
            total,
            lr_before,
            lr_after,
            config.lr_scaling,
            config.schedule,
            config.warmup_steps,
            samples_by_rank=batches.samples_by_rank(),
            order=batches.order_name,
            **rates,
        )

    def _total_steps(self, per_epoch: int) -> int:
        """Return the steps of the run, with those that a resumed run has done before."""
        config = self.config
        # Not `epochs * per_epoch`: before a resume, steps may have had another batch size.
        whole = max(0, config.epochs - self.progress.epoch)
        total = self.progress.step + whole * per_epoch - self._epoch_steps_done() * (whole > 0)
        if config.max_steps is not None:
            total = min(total, config.max_steps)
        return total

    def _is_finished(self) -> bool:
        progress, maximum = self.progress, self.config.max_steps
        return progress.epoch >= self.config.epochs or (
            maximum is not None and progress.step >= maximum
        )

    def _steps_ahead(self, per_epoch: int) -> int:
        """Return by how many of this run's steps the progress in epochs exceeds the step's number:
        not 0 after a resume at another batch size.
        """
        progress = self.progress
        return progress.epoch * per_epoch + self._epoch_steps_done() - progress.step

    def _steps_left(self, sample: int) -> int:
        """Return the number of steps from position `sample` to the end of an epoch."""
        return -(-self.batches.batches_from(sample) // self.config.accumulate)

    def _epoch_steps_done(self) -> int:
        """Return how many steps of the current epoch are done, at this run's batch size."""
        return self._steps_left(0) - self._steps_left(self.progress.sample)

    def _make_schedule(self, loaded: dict[str, Any]) -> RateSchedule:
        """Return the task's own schedule, else that of the options, at the current step."""
        self._check_schedule(self.ledger.total_steps, self.ledger.steps_per_epoch)
        total, per_epoch = self.ledger.total_steps or 0, self.ledger.steps_per_epoch or 0
        loaded_groups = [dict(group) for group in self.optimizer.param_groups]
        own = self._checked.schedule(self.optimizer, per_epoch, total)
        if own is not None:
            unit: Unit = "epoch" if self.task.schedule_unit == "epoch" else "step"
            schedule = RateSchedule(own, unit, True, self.task.schedule_metric)
            start = None if loaded else [float(g["lr"]) for g in self.optimizer.param_groups]
            self.ledger = replace(
                self.ledger,
                schedule="the task's own",
                warmup_steps=0,
                lr_at_start=start,
                lr_after_warmup=None,
                lr_at_end=None,
            )
        elif self.config.schedule == "plateau":
            schedule = self._make_plateau()
        else:
            return RateSchedule(self._make_step_schedule())
        if loaded.get("schedule") is not None:
            schedule.load_state_dict(loaded["schedule"], loaded_groups)
            if self.progress.epoch > loaded["position"]["epoch"]:  # dropped the rest: `_resume`
                mark_as_stepped(self.optimizer)
                schedule.after_epoch()
        return schedule

    def _make_plateau(self) -> RateSchedule:
        """Return the schedule of `--schedule plateau`, which may have a warm-up before."""
        config, watched = self.config, self.config.plateau_criterion()
        plateau = build_plateau(self.optimizer, config)  # at the rates that the warm-up leads to
        name = f"plateau of {watched.metric} ({watched.mode}, patience {watched.patience})"
        self.ledger = replace(self.ledger, schedule=name)
        warming = self.progress.step < config.warmup_steps
        warmup = self._make_step_schedule() if warming else None
        return RateSchedule(plateau, "step", True, watched.metric, warmup, config.warmup_steps)

    def _make_step_schedule(self) -> LRScheduler:
        """Return the scheduler of the options, a function of the step, at the current step."""
        step, per_epoch = self.progress.step, self.ledger.steps_per_epoch or 0
        steps_done = step + self._steps_ahead(per_epoch)
        return build_schedule(
            self.optimizer, self.config, step, self.ledger.total_steps or 0, per_epoch, steps_done
        )

    def _restore_decisions(self, loaded: dict[str, Any]) -> None:
        """Restore the state of the decisions; on rank 0, find the best checkpoint."""
        for option in self.decisions.load_state_dict(loaded.get("decisions", {})):
            self.console.print_line(
                f"resume   {option} names another metric than the checkpoint: it starts afresh"
            )
        best = self.decisions.best
        if best is None or best.step < 0 or self._resumed_from is None:
            return
        path = checkpoint.path_of(Path(self._resumed_from).parent, best.step)
        if why := checkpoint.problem(path):
            self.console.print_line(f"resume   WARNING: the best checkpoint {path}: {why}")
        else:
            self._best_path = path

    def _check_schedule(self, total: int | None, per_epoch: int | None) -> None:
        """Raise InputError for a schedule that needs a number of steps which is not known."""
        schedule = self.config.schedule
        if total is None and schedule in ("cosine", "one-cycle"):
            fix = "give --max-steps, or give the dataset a method __len__"
        elif per_epoch is None and (schedule == "step" or self._checked.has_schedule):
            schedule = "step" if schedule == "step" else "the task's own"
            fix = "give the dataset a method __len__"
        else:
            return
        raise InputError(
            f"the learning-rate schedule ({schedule}) needs the number of steps, which a stream "
            f"does not say; {fix}",
            on_all_ranks=True,
        )

    def _print_header(self) -> None:
        """Print the first lines of a run: task, backend, ledger, threads and run directory."""
        about, world = self.backend.describe(), self.world
        hosts = len(set(self.backend.hosts)) or 1
        over = about.get("transport") or about.get("controller")
        reasons = [self.backend.reason, about.get("note", "")]
        if why := about.get("transport_reason"):
            reasons.append(f"{over}: {why}")
        ranks, on, by = _count(world.size, "rank"), _count(hosts, "host"), world.started_by
        self.console.print_line(f"task     {self.config.task}, {ranks} on {on}, started by {by}")
        self.console.print_line(
            f"backend  {about['name']}{f' over {over}' if over else ''} on "
            f"{self.backend.device.type} ({'; '.join(filter(None, reasons))})"
        )
        for line in self.ledger.lines():
            self.console.print_line(line)
        self.console.print_line(f"threads  {self._threads}")
        if self._run_dir is not None:
            self.console.print_line(f"run      {self._run_dir.path}")

    # The loop

    def _train(self) -> Result:
        self.console.start(self.ledger.total_steps, self.progress.step)
        metrics: dict[str, Any] | None = None
        while not self._is_finished() and not self.decisions.is_stopped:
            metrics = self._run_epoch()
        if metrics is None:  # resumed from the last step: there was none to take
            metrics = self._evaluate()
        self._save()
        digest = agreed_fingerprint(self.backend, self.model)
        self.console.stop()
        path = self._run_dir.path if self._run_dir is not None else Path()
        about = self._outcome()
        if self._run_dir is not None:
            self._run_dir.finish(
                "finished",
                metrics=metrics,
                params_sha256=digest,
                last_step=self.progress.step,
                **about,
            )
        # Rank 0 alone has a run directory.
        path, best = self.backend.broadcast_object((path, self._best_path))
        scores = describe({f"eval_{name}": value for name, value in metrics.items()})
        self.console.print_line(
            f"done     {self.progress.step} steps{'  ' * bool(scores)}{scores}  "
            f"params_sha256 {digest[:12]}"
        )
        return Result(self.progress.step, metrics, digest, path, best)

    def _outcome(self) -> dict[str, Any]:
        """Return what the run decided, for run.json, and print a line about each."""
        planned, step = self.ledger, self.progress.step
        about: dict[str, Any] = {}
        if self._last_lrs:
            self.ledger = replace(planned, lr_at_end=self._last_lrs)
            about["ledger"] = self.ledger.as_dict()
            if planned.lr_at_end is None:
                self.console.print_line(f"lr       {format_rates(self._last_lrs)} at the end")
        if self.decisions.is_stopped and not self._is_finished():
            why = self.decisions.why_stopped()
            about["stopped_early"] = {"step": step, "of": planned.total_steps, "reason": why}
            self.console.print_line(f"stopped  at step {step} of {planned.total_steps}: {why}")
        best = self.decisions.best
        if best is not None and best.value is not None:
            about["best_checkpoint"] = best.about(self._best_path)
            name, where = f"eval_{best.criterion.metric}", self._best_path or "not kept"
            self.console.print_line(f"best     step {best.step}, {name} {best.value:.4f}: {where}")
        return about

    def _run_epoch(self) -> dict[str, Any] | None:
        """Take the remaining steps of the epoch or run, then evaluate and save if it is due.

        Returns the metrics of the evaluation, if there was one.
        """
        progress, config = self.progress, self.config
        self._own_samples, epoch, start = 0, progress.epoch, progress.sample
        for last in self._take_epoch(Meter(self.backend)):
            if not last:
                self._save_if_due(self._checkpoint_is_due(progress.step))
        self._record_samples(epoch, start)
        done = self._is_finished()
        metrics, is_best = None, False
        if done or progress.epoch % config.eval_every == 0:
            metrics = self._evaluate()
            # Before the checkpoint: a resumed run must not see this evaluation again.
            self.schedule.after_evaluation(metrics, progress.step)
            is_best = self.decisions.update(metrics, progress.step)
        epoch_is_due = done or is_best or self._epoch_checkpoint_is_due(progress.epoch)
        self._save_if_due(epoch_is_due or self._checkpoint_is_due(progress.step))
        return metrics

    def _take_epoch(self, meter: Meter) -> Iterator[bool]:
        """Take the remaining steps of the epoch or run; after each, yield if it was the last."""
        progress, config, batches = self.progress, self.config, self.batches
        batches.begin(self.backend, progress.epoch, progress.sample)
        # The loader processes are seeded from it.
        loader_seed = derive_seed(config.seed, self.world.rank, progress.epoch)
        self._train_loader.generator.manual_seed(loader_seed)
        data = on_device(
            self._train_loader,
            self.backend.device,
            self.precision.convert_batch,
            ahead=batches.may_load_ahead,
        )
        self.model.train()
        is_last, windows = False, batches.windows(config.accumulate, data)
        while not is_last:
            waited = time.perf_counter()
            window = next(windows, None)
            meter.data_s += time.perf_counter() - waited
            if window is None:
                self._end_without_step()
                return
            ends_run = progress.step + 1 == config.max_steps
            is_last = window.last or ends_run
            if ends_run or (window.last and progress.epoch + 1 >= config.epochs):
                self._last_step = progress.step + 1
            self._take_step(window, meter, is_last)
            if window.last:
                progress.epoch, progress.sample = progress.epoch + 1, 0
                self.schedule.after_epoch()
            yield is_last

    def _end_without_step(self) -> None:
        """End an epoch of which no step was left. Raises InputError, on every rank, if the whole
        epoch has none.
        """
        progress = self.progress
        if not progress.sample:
            raise InputError(
                f"epoch {progress.epoch + 1} has no step: the training data are fewer than one "
                "micro-batch of every rank; make --batch-size smaller, or give --uneven join",
                on_all_ranks=True,
            )
        progress.epoch, progress.sample = progress.epoch + 1, 0

    def _record_samples(self, epoch: int, start: int) -> None:
        """Add to run.json how many samples each rank used of this epoch. Collective.

        `start`: the position from which a resumed run has continued.
        """
        by_rank = self.backend.all_gather_object(self._own_samples)
        if self._run_dir is not None:
            seen = self._run_dir.run.setdefault("seen", [])
            seen.append({"epoch": epoch + 1, "from_sample": start, "samples_by_rank": by_rank})

    def _state_is_due(self) -> bool:
        """Return whether a checkpoint may follow the next step, in the middle of an epoch."""
        step = self.progress.step + 1
        due = self._checkpoint_is_due(step) or step == self.config.max_steps
        return due or self._save_is_due

    def _checkpoint_is_due(self, step: int) -> bool:
        every = self._checkpoint_steps
        return every > 0 and step % every == 0

    def _epoch_checkpoint_is_due(self, epoch: int) -> bool:
        return self._checkpoint_epochs > 0 and epoch % self._checkpoint_epochs == 0

    def _is_in_sync(self, step: int) -> bool:
        """Return whether all ranks have the same parameters after a step."""
        return self._local is None or self._local.is_in_sync(step, self._last_step)

    def _take_step(self, window: Window, meter: Meter, last: bool) -> None:
        """Take one step; `last`: it is the last of the epoch or run."""
        num_micro_batches, weights = window.num, window.weights
        progress, optimizer = self.progress, self.optimizer
        # Seed by the step's number, so that a resumed run draws the same random numbers.
        determinism.seed_all(derive_seed(self.config.seed, progress.step, self.world.rank))
        for micro in range(num_micro_batches):
            waited = time.perf_counter()
            batch = next(window.batches)
            meter.data_s += time.perf_counter() - waited
            if self.on_batch is not None:
                self.on_batch(batch)
            counts = weights is None or weights[micro] > 0
            with (
                self._accumulate(last=micro == num_micro_batches - 1),
                contextlib.nullcontext() if counts else unchanged_buffers(self.model),
            ):
                with self.precision.autocast():
                    loss = self._checked.loss(self.net, batch)
                    # Divided by this step's number of micro-batches, not by the option
                    # `accumulate`: an epoch's last step may have fewer.
                    loss = loss / num_micro_batches if weights is None else loss * weights[micro]
                self.precision.backward(loss)
            meter.add_loss(loss)
        step = progress.step + 1
        self.backend.finish_backward(optimizer)
        if self._local is not None:
            self._local.finish_backward(step)
        self.precision.unscale_(optimizer)
        # Log before every checkpoint: `flush` checks the loss, so that no diverged state is saved.
        saves = self._checkpoint_is_due(step) or (self._save_is_due and self._is_in_sync(step))
        due = last or step % self.config.log_every == 0 or saves
        logs = self._records and due
        norm = self._clip(logs and self._local is None)
        if logs:
            self._last_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        scale = self.precision.loss_scale() if logs else {}
        self.precision.step(optimizer)
        if self._local is not None:
            self._local.finish_step(step, self._last_step)
        self.schedule.after_step()
        optimizer.zero_grad()
        progress.step = step
        progress.sample += window.samples
        self._own_samples += window.own
        meter.count(window.samples)
        if logs:
            numbers = meter.flush(step, norm, self.precision.scaler.is_enabled())
            record = {"step": step, "epoch": progress.epoch_number, "lr": self._last_lrs[0]}
            self.log({**record, **numbers, **scale})
        self.console.advance(step)

    def _accumulate(self, last: bool) -> AbstractContextManager[None]:
        if self._local is not None:
            return contextlib.nullcontext()
        return self.backend.accumulate(self.net, last)

    def _clip(self, wanted: bool) -> Tensor | None:
        """Clip the gradients, which are equal on all ranks by now, and return their norm.

        Without clipping, compute the norm only if it is `wanted`; else return None.
        """
        clip = self.config.clip_norm
        if not wanted and math.isinf(clip):
            return None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters if p.grad is not None]
        if math.isinf(clip):
            return nn.utils.get_total_norm(
                [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
            )
        if any(grad.is_sparse for grad in grads):
            raise InputError("--clip-norm cannot clip sparse gradients; leave it out")
        return nn.utils.clip_grad_norm_(parameters, clip)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        """Return the metrics of the whole evaluation data, exact for any number of ranks. Between
        two synchronizations of local SGD they are those of the averaged parameters.
        """
        if self._eval_data is None:
            return {}
        if self._local is None or self._is_in_sync(self.progress.step):
            return self._evaluate_on(self._eval_data)
        with self._local.averaged():
            return self._evaluate_on(self._eval_data)

    def _evaluate_on(self, data: EvalData) -> dict[str, Any]:
        metrics = evaluate(self.backend, self._checked, self.model, data, self.precision)
        record = {"step": self.progress.step, "epoch": self.progress.epoch_number}
        self.log({**record, **{f"eval_{name}": value for name, value in metrics.items()}})
        return metrics

    def log(self, record: dict[str, Any]) -> None:
        """Write one record to metrics.jsonl and show it, on rank 0 only."""
        if self._run_dir is not None:
            self._run_dir.log(record)
        self.console.log(record)

    # Checkpoints

    def _save_if_due(self, is_due: bool) -> None:
        """Save a checkpoint that is due; with local SGD, after the next step that synchronizes.
        Collective.
        """
        self._save_is_due |= is_due
        if self._save_is_due and self._is_in_sync(self.progress.step):
            self._save_is_due = False
            self._save()

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one.

        Collective: an error on rank 0 is raised on all ranks.
        """
        if self._saved_step == self.progress.step:
            return
        mine = {type(state).__name__: state.state_dict() for state in self._rank_states}
        ranks = self.backend.all_gather_object(to_cpu(mine)) if mine else []
        data = None
        if self.batches.has_state and self.progress.sample:
            data = self.backend.all_gather_object(self.batches.state())
        with self.backend.share_errors():
            if self._run_dir is not None:
                self._write_checkpoint(self._run_dir, ranks, data)
        self._saved_step = self.progress.step

    def _write_checkpoint(
        self, run_dir: RunDirectory, ranks: list[Any], data: list[Any] | None
    ) -> None:
        """Write a checkpoint. `ranks`: what each rank keeps for itself, in rank order; `data`: the
        position of each in a stream.
        """
        parts = run_state.collect(
            self.model,
            self.optimizer,
            self.precision,
            self.schedule.state_dict(),
            self.progress,
            self.decisions.state_dict(),
        )
        if ranks:
            parts["ranks"] = ranks
        if self._local is not None:
            parts["trainer"]["outer"] = self._local.outer_state()
        parts["trainer"]["data"] = data
        about = {
            "task": self.config.task,
            "world_size": self.world.size,
            "backend": self.backend.name,
            "global_batch": self.ledger.global_batch,
            "versions": provenance.versions(),
        }
        best = self.decisions.best
        if best is not None and best.value is not None:
            about["best_step"] = best.step
        path = checkpoint.save(run_dir.checkpoints, self.progress.step, parts, about)
        checkpoint.prune(run_dir.checkpoints, self.config.keep)
        run_dir.update(last_step=self.progress.step)
        if best is not None and best.step == self.progress.step:
            self._best_path = path
            run_dir.update(best_checkpoint=best.about(path))

    def _resume(self, base_lrs: list[float]) -> dict[str, Any]:
        """Load a checkpoint on rank 0 and broadcast it. Collective.

        Returns the trainer's part of the checkpoint; empty for a fresh start.
        """
        loaded: dict[str, Any] = {}
        if self.config.resume == "none":
            return loaded
        with self.backend.share_errors():
            if self._run_dir is not None:
                loaded = self._load(self._run_dir.checkpoints)
        loaded = self.backend.broadcast_object(loaded)
        if not loaded:
            return loaded
        with self.precision.masters_in(self.optimizer) as masters:
            broadcast_state(self.backend, self.model, self.optimizer)
            for master in masters.values():
                master.copy_(self.backend.broadcast_(master.contiguous()))
        # Learning rates are those of this run's options, not those of the checkpoint.
        for group, lr in zip(self.optimizer.param_groups, base_lrs, strict=True):
            group["lr"] = group["initial_lr"] = lr
        if loaded["scaler"]:  # empty unless the checkpoint is of an fp16 run
            self.precision.scaler.load_state_dict(loaded["scaler"])
        self._resume_rank_states(loaded["ranks"])
        if self._local is not None:
            self._local.resume(loaded.get("outer"))
        self.progress = run_state.Progress(**loaded["position"])
        if self.progress.sample:
            self._resume_data(loaded.get("data"))
        self._saved_step = self.progress.step
        return loaded

    def _resume_data(self, states: list[Any] | None) -> None:
        """Continue in the middle of an epoch. Collective."""
        progress, batches = self.progress, self.batches
        with self.backend.share_errors():
            batches.load_state(states or [], progress.sample, self.console.print_line)
        batches.begin(self.backend, progress.epoch, progress.sample)
        if batches.is_over(progress.sample):
            # The samples left of the epoch are too few for a step of this run: drop them, as at the
            # end of any epoch.
            self.progress = run_state.Progress(progress.step, progress.epoch + 1)

    def _resume_rank_states(self, ranks: list[dict[str, Any]]) -> None:
        """Give each rank what it kept for itself. Print what another method, or another number of
        ranks, cannot use.
        """
        saved = dict(ranks[self.world.rank]) if len(ranks) == self.world.size else {}
        names = set(ranks[0]) if ranks else set()
        for state in self._rank_states:
            name = type(state).__name__
            if name in saved:
                state.load_state_dict(saved[name])
                continue
            has = f"is of {len(ranks)} ranks" if name in names else "has none"
            self.console.print_line(
                f"resume   {name}: each rank's own state starts afresh, as the checkpoint {has}"
            )
        for name in sorted(names - {type(state).__name__ for state in self._rank_states}):
            self.console.print_line(f"resume   {name}: the checkpoint's state is not used")

    def _load(self, root: Path) -> dict[str, Any]:
        """Restore the chosen checkpoint, and set later ones aside; return the trainer's part."""
        path = run_state.choose(root, self.config.resume, self.console.print_line)
        parts = self.model, self.optimizer, self.precision
        loaded = {} if path is None else run_state.restore(path, *parts)
        step = loaded["position"]["step"] if loaded else -1
        for old in checkpoint.set_aside(root, step):
            self.console.print_line(f"resume   set aside {old.name}")
        if path is not None:
            self.console.print_line(f"resume   from {path}, step {step}")
            self._resumed_from = str(path)
        return loaded

    # Records

    def _about(self) -> dict[str, Any]:
        return {
            "command": sys.argv,
            "config": asdict(self.config),
            "origins": self._origins,
            "world": asdict(self.world),
            "hosts": self.backend.hosts or [socket.gethostname()],
            "backend": {**self.backend.describe(), "reason": self.backend.reason},
            "threads": self._threads,
            "versions": provenance.versions(),
            "environment": provenance.variables(os.environ),
        }

    def _record_failure(self, error: BaseException) -> None:
        if self._run_dir is None:
            return
        outcome, error = "failed", cause_of(error)
        if isinstance(error, KeyboardInterrupt):
            outcome = "interrupted"
        elif isinstance(error, SystemExit):
            outcome = "terminated"
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(HvdtrainError):  # a full disk must not hide the error itself
            self._run_dir.finish(outcome, error=text, last_step=self.progress.step)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
