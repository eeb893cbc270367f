"""The training loop: `Trainer`. It has no branch for a particular backend or launcher.

`hvdtrain train` calls `fit`; `hvdtrain compare` calls `set_up`, and measures `steps`. Its parts, in
the order in which a run needs them:

    run_data         the datasets, and this rank's micro-batches
    prepared_model   model and optimizer, as the backend prepared them
    resumption       the checkpoint that it continues from
    run_plan         the number of steps, and the learning rates
    stepper          one optimizer step
    decisions        early stop and best checkpoint
    saver            the checkpoints that it writes
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError
from hvdtrain.training import determinism, methods, run_report, run_state
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console, describe, make_console
from hvdtrain.training.data_loading import Window, check_same_plan, derive_seed
from hvdtrain.training.decisions import Decisions
from hvdtrain.training.evaluation import Evaluation
from hvdtrain.training.ledger import format_rates
from hvdtrain.training.meter import Meter
from hvdtrain.training.metrics import agreed_fingerprint
from hvdtrain.training.precision import Precision
from hvdtrain.training.prepared_model import build_model, prepare_model
from hvdtrain.training.resumption import Resumption
from hvdtrain.training.run_data import RunData
from hvdtrain.training.run_dir import RunDirectory
from hvdtrain.training.run_plan import RunPlan
from hvdtrain.training.saver import Saver
from hvdtrain.training.stepper import Stepper
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
        self._own_samples = 0

    def fit(self) -> Result:
        """Train to the end and return the outcome. Collective.

        Raises InputError, CheckpointError or TrainingDiverged, and records every exception in
        run.json.
        """
        try:
            self.set_up()
            result = self._train()
        except BaseException as error:
            if self._run_dir is not None:
                self._run_dir.fail(error, self.progress.step)
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
        check_same_plan(self.backend, *self._data.datasets, self.config)
        with self.backend.share_errors():
            if self.world.rank == 0 and record:  # only now: invalid input creates no directory
                self._run_dir = run_report.open_run_dir(
                    self.backend, self.config, self._origins, self._threads
                )
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
        config = self.config
        self._threads = determinism.set_threads(config.threads, self.world, os.environ)
        # On every backend, so that they are comparable: `shm` and `compat` do it by themselves.
        keep_freed_memory()
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        determinism.seed_all(derive_seed(config.seed))
        self._data = RunData(
            self._checked, config, self.backend, lambda: self._saver.may_save_next()
        )
        self.batches = self._data.batches
        self.model = build_model(self._checked, config, self.precision, self.backend)

    def _start(self) -> None:
        """Prepare the backend, then load state, then build the scheduler: the order matters."""
        config, backend, progress = self.config, self.backend, self.progress
        prepared = prepare_model(self.model, self._checked, config, self.precision, backend)
        self.net, self.optimizer, self._local = prepared.net, prepared.optimizer, prepared.local
        common = backend, config, prepared, self.batches, progress
        resumption = Resumption(*common, self._run_dir, self.console)
        loaded = resumption.load()
        plan = RunPlan(config, self.world.size, self.batches, progress, prepared)
        self.schedule = plan.make_schedule(self.task, self._checked, loaded)
        self.ledger = plan.ledger
        if self._local is not None:
            self._local.last_step = self.ledger.total_steps or -1
        self._stepper = Stepper(self._checked, backend, config, prepared, self.schedule)
        self._saver = Saver(*common, self.schedule, self.decisions, self._run_dir)
        for option in self.decisions.load_state_dict(loaded.get("decisions", {})):
            self.console.print_line(
                f"resume   {option} names another metric than the checkpoint: it starts afresh"
            )
        self._saver.best_path = resumption.find_best(self.decisions)
        if self._run_dir is not None:
            path = None if resumption.path is None else str(resumption.path)
            self._run_dir.update(ledger=self.ledger.as_dict(), resumed_from=path)
            self._run_dir.open_metrics(progress.step)
        if self._records:
            self._print_header()

    def _print_header(self) -> None:
        for line in run_report.header(self.backend, self.config.task, self.ledger, self._threads):
            self.console.print_line(line)
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
        self._saver.save()
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
        path, best = self.backend.broadcast_object((path, self._saver.best_path))
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
        if last_lrs := self._stepper.last_lrs:
            self.ledger = replace(planned, lr_at_end=last_lrs)
            about["ledger"] = self.ledger.as_dict()
            if planned.lr_at_end is None:
                self.console.print_line(f"lr       {format_rates(last_lrs)} at the end")
        if self.decisions.is_stopped and not self._is_finished():
            why = self.decisions.why_stopped()
            about["stopped_early"] = {"step": step, "of": planned.total_steps, "reason": why}
            self.console.print_line(f"stopped  at step {step} of {planned.total_steps}: {why}")
        best = self.decisions.best
        if best is not None and best.value is not None:
            about["best_checkpoint"] = best.about(self._saver.best_path)
            name, where = f"eval_{best.criterion.metric}", self._saver.best_path or "not kept"
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
                self._saver.save_if_due(self._saver.is_due(progress.step))
        self._record_samples(epoch, start)
        done = self._is_finished()
        metrics, is_best = None, False
        if done or progress.epoch % config.eval_every == 0:
            metrics = self._evaluate()
            # Before the checkpoint: a resumed run must not see this evaluation again.
            self.schedule.after_evaluation(metrics, progress.step)
            is_best = self.decisions.update(metrics, progress.step)
        epoch_is_due = done or is_best or not config.checkpoint_every
        self._saver.save_if_due(epoch_is_due or self._saver.is_due(progress.step))
        return metrics

    def _is_finished(self) -> bool:
        progress, maximum = self.progress, self.config.max_steps
        return progress.epoch >= self.config.epochs or (
            maximum is not None and progress.step >= maximum
        )

    def _take_epoch(self, meter: Meter) -> Iterator[bool]:
        """Take the remaining steps of the epoch or run; after each, yield if it was the last."""
        progress, config = self.progress, self.config
        windows = self._data.begin_epoch(progress, self.precision.convert_batch)
        self.model.train()
        is_last = False
        while not is_last:
            waited = time.perf_counter()
            window = next(windows, None)
            meter.data_s += time.perf_counter() - waited
            if window is None:
                self._end_without_step()
                return
            ends_run = progress.step + 1 == config.max_steps
            is_last = window.last or ends_run
            ends_run |= window.last and progress.epoch + 1 >= config.epochs
            if ends_run and self._local is not None:
                self._local.last_step = progress.step + 1
            self._take_step(window, meter, is_last)
            if window.last:
                progress.end_epoch()
                self.schedule.after_epoch()
            yield is_last

    def _end_without_step(self) -> None:
        """End an epoch of which no step was left. Raises InputError, on every rank, if the whole
        epoch has none.
        """
        if not self.progress.sample:
            raise InputError(
                f"epoch {self.progress.epoch + 1} has no step: the training data are fewer than "
                "one micro-batch of every rank; make --batch-size smaller, or give --uneven join",
                on_all_ranks=True,
            )
        self.progress.end_epoch()

    def _record_samples(self, epoch: int, start: int) -> None:
        """Add to run.json how many samples each rank used of this epoch. Collective.

        `start`: the position from which a resumed run has continued.
        """
        by_rank = self.backend.all_gather_object(self._own_samples)
        if self._run_dir is not None:
            seen = self._run_dir.run.setdefault("seen", [])
            seen.append({"epoch": epoch + 1, "from_sample": start, "samples_by_rank": by_rank})

    def _take_step(self, window: Window, meter: Meter, last: bool) -> None:
        """Take one step; `last`: it is the last of the epoch or run."""
        progress, stepper = self.progress, self._stepper
        # Seed by the step's number, so that a resumed run draws the same random numbers.
        determinism.seed_all(derive_seed(self.config.seed, progress.step, self.world.rank))
        stepper.backward(window, meter, self.on_batch)
        step = progress.step + 1
        # Log before every checkpoint: `flush` checks the loss, so that no diverged state is saved.
        due = last or step % self.config.log_every == 0 or self._saver.will_save(step)
        logs = self._records and due
        norm, scale = stepper.update(step, logs)
        progress.step = step
        progress.sample += window.samples
        self._own_samples += window.own
        meter.count(window.samples)
        if logs:
            numbers = meter.flush(step, norm, self.precision.scaler.is_enabled())
            record = {"step": step, "epoch": progress.epoch_number, "lr": stepper.last_lrs[0]}
            self.log({**record, **numbers, **scale})
        self.console.advance(step)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        """Return the metrics of the whole evaluation data, exact for any number of ranks. Between
        two synchronizations of local SGD they are those of the averaged parameters.
        """
        if not self._data.has_evaluation:
            return {}
        if self._local is None or self._local.is_in_sync(self.progress.step):
            return self._evaluate_model()
        with self._local.averaged():
            return self._evaluate_model()

    def _evaluate_model(self) -> dict[str, Any]:
        self.model.eval()
        evaluation = Evaluation()
        # The unwrapped model: ranks may have different numbers of batches, and the collectives of
        # a wrapper would hang.
        for size, batch in self._data.evaluation_batches(self.precision.convert_batch):
            with self.precision.autocast():
                evaluation.add(self._checked.metrics(self.model, batch), size)
        self.model.train()
        # Overridden on all ranks or on none: only then there is something to derive.
        derives = type(self.task).derived_metrics is not Task.derived_metrics
        metrics = evaluation.reduce(
            self.backend, self._checked.derived_metrics if derives else None
        )
        record = {"step": self.progress.step, "epoch": self.progress.epoch_number}
        self.log({**record, **{f"eval_{name}": value for name, value in metrics.items()}})
        return metrics

    def log(self, record: dict[str, Any]) -> None:
        """Write one record to metrics.jsonl and show it, on rank 0 only."""
        if self._run_dir is not None:
            self._run_dir.log(record)
        self.console.log(record)
