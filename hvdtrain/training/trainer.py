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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hvdtrain import provenance
from hvdtrain.backends.base import Backend
from hvdtrain.backends.model_sync import broadcast_state
from hvdtrain.errors import HvdtrainError, InputError
from hvdtrain.failure import cause_of
from hvdtrain.training import checkpoint, determinism, methods, run_state
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console, make_console
from hvdtrain.training.data_loading import (
    EvalBatches,
    check_same_plan,
    derive_seed,
    make_loader,
    on_device,
    shard,
    size_of,
)
from hvdtrain.training.ledger import Ledger
from hvdtrain.training.lr_schedule import build_schedule, continue_schedule, lr_factor, set_base_lr
from hvdtrain.training.meter import Meter
from hvdtrain.training.metrics import Mean, agreed_fingerprint
from hvdtrain.training.precision import Precision
from hvdtrain.training.run_dir import RunDirectory, make_default
from hvdtrain.training.task import CheckedTask, Task
from hvdtrain.transports.malloc import keep_freed_memory


@dataclass(frozen=True)
class Result:
    """The outcome of a run, equal on every rank."""

    steps: int
    metrics: dict[str, float]
    """The last evaluation: means over all samples of the evaluation data."""
    params_sha256: str
    run_dir: Path


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
        self.on_batch: Callable[[Any], None] | None = None
        """Called with every micro-batch of this rank, before its forward pass."""
        self._records = True
        self._origins = origins or {}
        self._run_dir: RunDirectory | None = None
        self._saved_step = -1
        self._resumed_from: str | None = None

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
        check_same_plan(self.backend, self._train_loader, self._eval_loader, self.config)
        with self.backend.share_errors():
            self._open_run_dir()  # only now, so that invalid input creates none
        self._start()

    def steps(self) -> Iterator[StepTaken]:
        """Take one optimizer step for each `next`, epoch after epoch. Collective.

        `hvdtrain compare` measures it. It evaluates, saves and logs nothing, and checks no loss.
        """
        meter = Meter(self.backend, self.batches.global_micro_batch)
        while self.progress.step < self.ledger.total_steps:
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
        train, evaluation = self._checked.datasets()
        self.batches = shard(train, config, world)
        common = (self._checked.collate, world, self.backend.device, config.workers, config.seed)
        self._train_loader = make_loader(train, self.batches, *common)
        self._eval_loader: DataLoader[Any] | None = None
        if evaluation is not None:
            size = size_of(evaluation, "evaluation")
            shares = EvalBatches(size, self.batches.batch_size, world)
            self._eval_loader = make_loader(evaluation, shares, *common)
            self._eval_batches = shares
        # Seed again: the weights must not depend on how many random numbers the datasets drew.
        determinism.seed_all(derive_seed(config.seed))
        self.model: nn.Module = self.precision.convert(self._checked.model()).to(
            self.backend.device
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
        self.net, self.optimizer = self.backend.prepare(self.model, optimizer)
        self.precision.make_masters(self.model, self.optimizer)
        loaded = self._resume(lr_after)
        self.ledger = self._make_ledger(lr_before, lr_after)
        self.scheduler = self._make_scheduler(loaded)
        if self._run_dir is not None:
            self._run_dir.update(ledger=self.ledger.as_dict(), resumed_from=self._resumed_from)
            self._run_dir.open_metrics(self.progress.step)
        if self._records:
            self._print_header()

    def _make_ledger(self, lr_before: list[float], lr_after: list[float]) -> Ledger:
        config, batches = self.config, self.batches
        per_epoch = self._steps_left(0)
        # Not `epochs * per_epoch`: before a resume, steps may have had another batch size.
        whole = max(0, config.epochs - self.progress.epoch)
        total = self.progress.step + whole * per_epoch - self._epoch_steps_done() * (whole > 0)
        if config.max_steps is not None:
            total = min(total, config.max_steps)
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
        )

    def _steps_left(self, sample: int) -> int:
        """Return the number of steps from position `sample` to the end of an epoch."""
        return -(-self.batches.batches_from(sample) // self.config.accumulate)

    def _epoch_steps_done(self) -> int:
        """Return how many steps of the current epoch are done, at this run's batch size."""
        return self._steps_left(0) - self._steps_left(self.progress.sample)

    def _make_scheduler(self, loaded: dict[str, Any]) -> LRScheduler:
        """Return the task's own scheduler, else that of the options, at the current step."""
        total = self.ledger.total_steps
        loaded_groups = [dict(group) for group in self.optimizer.param_groups]
        own = self._checked.schedule(self.optimizer, self.ledger.steps_per_epoch, total)
        self._own_schedule = own is not None
        if own is None:
            per_epoch, step = self.ledger.steps_per_epoch, self.progress.step
            steps_done = self.progress.epoch * per_epoch + self._epoch_steps_done()
            return build_schedule(self.optimizer, self.config, step, total, per_epoch, steps_done)
        self.ledger = replace(self.ledger, schedule="the task's own", warmup_steps=0)
        if loaded.get("schedule") is not None:
            continue_schedule(own, loaded["schedule"], loaded_groups)
        return own

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
        metrics: dict[str, float] | None = None
        while self.progress.step < self.ledger.total_steps:
            metrics = self._run_epoch()
        if metrics is None:  # resumed from the last step: there was none to take
            metrics = self._evaluate()
        self._save()
        digest = agreed_fingerprint(self.backend, self.model)
        self.console.stop()
        path = self._run_dir.path if self._run_dir is not None else Path()
        if self._run_dir is not None:
            self._run_dir.finish(
                "finished", metrics=metrics, params_sha256=digest, last_step=self.progress.step
            )
        path = self.backend.broadcast_object(path)  # rank 0 alone has a run directory
        scores = "".join(f"  eval_{name} {value:.4f}" for name, value in metrics.items())
        self.console.print_line(
            f"done     {self.progress.step} steps{scores}  params_sha256 {digest[:12]}"
        )
        return Result(self.progress.step, metrics, digest, path)

    def _run_epoch(self) -> dict[str, float] | None:
        """Take the remaining steps of the epoch or run, then evaluate and save if it is due.

        Returns the metrics of the evaluation, if there was one.
        """
        progress, config = self.progress, self.config
        for last in self._take_epoch(Meter(self.backend, self.batches.global_micro_batch)):
            if not last and self._checkpoint_is_due(progress.step):
                self._save()
        done = progress.step == self.ledger.total_steps
        metrics = None
        if done or progress.epoch % config.eval_every == 0:
            metrics = self._evaluate()
        if done or not config.checkpoint_every or self._checkpoint_is_due(progress.step):
            self._save()
        return metrics

    def _take_epoch(self, meter: Meter) -> Iterator[bool]:
        """Take the remaining steps of the epoch or run; after each, yield if it was the last."""
        progress, config = self.progress, self.config
        self.batches.set_epoch(progress.epoch, progress.sample)
        left = self.batches.batches_from(progress.sample)
        # The loader processes are seeded from it.
        loader_seed = derive_seed(config.seed, self.world.rank, progress.epoch)
        self._train_loader.generator.manual_seed(loader_seed)
        data = on_device(self._train_loader, self.backend.device, self.precision.convert_batch)
        self.model.train()
        while left and progress.step < self.ledger.total_steps:
            num_micro_batches = min(config.accumulate, left)
            left -= num_micro_batches
            last = left == 0 or progress.step + 1 == self.ledger.total_steps
            self._take_step(data, num_micro_batches, meter, last)
            if left == 0:
                progress.epoch, progress.sample = progress.epoch + 1, 0
            yield last

    def _checkpoint_is_due(self, step: int) -> bool:
        every = self.config.checkpoint_every
        return every > 0 and step % every == 0

    def _take_step(
        self, data: Iterator[Any], num_micro_batches: int, meter: Meter, last: bool
    ) -> None:
        """Take one step; `last`: it is the last of the epoch or run."""
        progress, optimizer = self.progress, self.optimizer
        # Seed by the step's number, so that a resumed run draws the same random numbers.
        determinism.seed_all(derive_seed(self.config.seed, progress.step, self.world.rank))
        for micro in range(num_micro_batches):
            waited = time.perf_counter()
            batch = next(data)
            meter.data_s += time.perf_counter() - waited
            if self.on_batch is not None:
                self.on_batch(batch)
            with self.backend.accumulate(self.net, last=micro == num_micro_batches - 1):
                # Divided by this step's number of micro-batches, not by the option `accumulate`: an
                # epoch's last step may have fewer.
                with self.precision.autocast():
                    loss = self._checked.loss(self.net, batch) / num_micro_batches
                self.precision.backward(loss)
            meter.add_loss(loss)
        self.backend.finish_backward(optimizer)
        self.precision.unscale_(optimizer)
        step = progress.step + 1
        # Log before every checkpoint: `flush` checks the loss, so that no diverged state is saved.
        due = last or step % self.config.log_every == 0 or self._checkpoint_is_due(step)
        logs = self._records and due
        norm = self._clip(logs)
        lr = optimizer.param_groups[0]["lr"]
        scale = self.precision.loss_scale() if logs else {}
        self.precision.step(optimizer)
        self.scheduler.step()
        optimizer.zero_grad()
        progress.step = step
        progress.sample += num_micro_batches * self.batches.global_micro_batch
        meter.count(num_micro_batches)
        if logs:
            numbers = meter.flush(step, norm, self.precision.scaler.is_enabled())
            self.log({"step": step, "epoch": progress.epoch_number, "lr": lr, **numbers, **scale})
        self.console.advance(step)

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
    def _evaluate(self) -> dict[str, float]:
        """Return exact means over the whole evaluation data, for any number of ranks."""
        if self._eval_loader is None:
            return {}
        mean = Mean()
        self.model.eval()
        # The unwrapped model: ranks may have different numbers of batches, and the collectives of
        # a wrapper would hang.
        loaded = on_device(self._eval_loader, self.backend.device, self.precision.convert_batch)
        for indices, batch in zip(self._eval_batches, loaded, strict=True):
            with self.precision.autocast():
                mean.add(self._checked.metrics(self.model, batch), len(indices))
        self.model.train()
        metrics = mean.reduce(self.backend)
        record = {"step": self.progress.step, "epoch": self.progress.epoch_number}
        self.log({**record, **{f"eval_{name}": value for name, value in metrics.items()}})
        return metrics

    def log(self, record: dict[str, Any]) -> None:
        """Write one record to metrics.jsonl and show it, on rank 0 only."""
        if self._run_dir is not None:
            self._run_dir.log(record)
        self.console.log(record)

    # Checkpoints

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one.

        Collective: an error on rank 0 is raised on all ranks.
        """
        if self._saved_step == self.progress.step:
            return
        with self.backend.share_errors():
            if self._run_dir is not None:
                self._write_checkpoint(self._run_dir)
        self._saved_step = self.progress.step

    def _write_checkpoint(self, run_dir: RunDirectory) -> None:
        schedule = self.scheduler if self._own_schedule else None
        parts = run_state.collect(
            self.model, self.optimizer, self.precision, schedule, self.progress
        )
        about = {
            "task": self.config.task,
            "world_size": self.world.size,
            "backend": self.backend.name,
            "global_batch": self.ledger.global_batch,
            "versions": provenance.versions(),
        }
        checkpoint.save(run_dir.checkpoints, self.progress.step, parts, about)
        checkpoint.prune(run_dir.checkpoints, self.config.keep)
        run_dir.update(last_step=self.progress.step)

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
        self.progress = run_state.Progress(**loaded["position"])
        if self.progress.sample and not self.batches.batches_from(self.progress.sample):
            # The samples left of the epoch are too few for a step of this run: drop them, as at the
            # end of any epoch.
            self.progress = run_state.Progress(self.progress.step, self.progress.epoch + 1)
        self._saved_step = self.progress.step
        return loaded

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
