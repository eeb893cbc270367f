"""The training loop: `Trainer`. It has no branch for a particular backend or launcher.

`hvdtrain train` calls `fit`; `hvdtrain compare` calls `set_up`, and measures `steps`. Its parts, in
the order in which a run needs them:

    data/loader      the datasets, and this rank's micro-batches
    prepared_model   model and optimizer, as the backend prepared them
    checkpointer     what it continues from, and the checkpoints that it writes
    schedule         the number of steps, and the learning rates
    stepper          one optimizer step
    callback_list    early stop, best checkpoint, average of weights, and the user's own callbacks
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.backends import open_backend
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError, one_line
from hvdtrain.training import determinism, methods, restart, run_report, weights
from hvdtrain.training.callback import Callback
from hvdtrain.training.callback_list import CallbackList, from_options
from hvdtrain.training.callbacks.task_state import TaskState, has_state
from hvdtrain.training.checkpointer import Checkpointer
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console, describe, make_console
from hvdtrain.training.criterion import number_of
from hvdtrain.training.data.loader import RunData
from hvdtrain.training.data.order import StepBatches, check_same_plan
from hvdtrain.training.determinism import derive_seed
from hvdtrain.training.evaluation import evaluate_each, unchanged_buffers
from hvdtrain.training.meter import Meter
from hvdtrain.training.metrics import agreed_fingerprint, check_equal
from hvdtrain.training.precision import Precision
from hvdtrain.training.preemption import Preemption
from hvdtrain.training.prepared_model import build_model, prepare_model
from hvdtrain.training.progress import Progress
from hvdtrain.training.run_dir import RunDirectory
from hvdtrain.training.run_report import Result
from hvdtrain.training.schedule import Plan, format_rates
from hvdtrain.training.stepper import Stepper
from hvdtrain.training.task import CheckedTask, Task, name_of
from hvdtrain.transports.malloc import keep_freed_memory


class Trainer:
    """Trains one task on one open backend. Every rank calls the same methods: they are collective
    unless they say that they are not.

    Without a `backend`, `Trainer(task, epochs=3).fit()` opens that of the options, and closes it.
    `options` are fields of TrainConfig by name, and replace those of `config`.

    `origins` maps each option to its source (flag, variable, file), for run.json. `callbacks` are
    called after those of the options; they are the same on every rank (see `Callback`).
    """

    def __init__(
        self,
        task: Task,
        backend: Backend | None = None,
        config: TrainConfig | None = None,
        origins: dict[str, str] | None = None,
        callbacks: Sequence[Callback] = (),
        **options: Any,
    ) -> None:
        self._checked = CheckedTask(task)
        config = (config or TrainConfig()).with_options(options)
        config.check()
        with ExitStack() as opened:
            if backend is None:
                agreed = config.agreed()
                own = open_backend(config.backend, None, config.backend_options(), agreed)
                backend = opened.enter_context(own)
            config = config.opened_with(backend.options)
            if origins is None and config.task == TrainConfig.task:  # not from the command line
                config = replace(config, task=name_of(task))
            methods.check(config, backend.name)
            self._opened = opened.pop_all()
            """Closes the backend that this Trainer has opened, if it has."""
        self.task = task
        self.backend = backend
        self.config = config
        self.world = backend.world
        self.console: Console = make_console(self.world)
        self.precision = Precision(config.precision, backend.device, config.opt_level)
        self.progress = Progress()
        self.meter = Meter(backend)
        self._records = True
        self._first_step = 0
        """The step that the run continues from."""
        self._origins = origins or {}
        self._given_callbacks = callbacks
        self._callbacks = CallbackList([])
        self._parts = ExitStack()
        """What `fit` closes at its end."""
        self._run_dir: RunDirectory | None = None
        self._recorded: dict[str, Any] = {}
        self._own_samples = 0
        """Samples that this rank has used of this epoch, since the run was resumed."""
        self._epoch_began = (0, 0)
        """This epoch, counted from 0, and the position in it from which the run has continued."""
        self._eval_steps, self._eval_epochs = config.evaluation_interval()
        self._metrics: dict[str, Any] = {}
        """Those of the last evaluation, which was after `_evaluated_step`."""
        self._evaluated_step = -1
        self._stop_reason = ""
        """Why a callback ends the run after this step; empty unless one does."""
        self._skips = False
        """Whether a callback leaves this step out."""
        self._preemption = Preemption(backend, config)
        self._is_restart = False
        """Whether the launcher has started this job before."""
        self._is_preempted = False
        """Whether the run ends as soon as it has a checkpoint."""

    def fit(self) -> Result:
        """Train to the end and return the outcome. Collective.

        Raises InputError, CheckpointError or TrainingDiverged, and Preempted (a SystemExit) after
        a signal of `--checkpoint-signals`. Records every exception in run.json.
        """
        with self._opened:
            return self._fit()

    def _fit(self) -> Result:
        try:
            with self._preemption:
                self.set_up()
                self._preemption.connect()
                result = self._train()
        except BaseException as error:
            self._callbacks.tell_exception(self, error)
            if self._run_dir is not None:
                self._run_dir.fail(error, self.progress.step)
                self._finish_writing(self._run_dir)
            raise
        finally:
            self.console.stop()
            self._parts.close()
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
        self._callbacks.check(self.backend)
        if record:
            self._is_restart = restart.is_restart(self.backend)
        with self.backend.share_errors():
            if self.world.rank == 0 and record:  # only now: invalid input creates no directory
                about = self._origins, self._threads, self._is_restart
                self._run_dir = run_report.open_run_dir(self.backend, self.config, *about)
                self._parts.callback(self._run_dir.close)
                self.backend.progress.run_dir = str(self._run_dir.path.absolute())
        self._start()

    def steps(self) -> Iterator[Tensor]:
        """Take one optimizer step for each `next`, epoch after epoch, and yield the mean loss over
        this rank's samples. Collective.

        It evaluates, saves and logs nothing, and does not look whether a loss is finite: what
        `hvdtrain train --quiet` does, whose steps `hvdtrain compare` measures.
        """
        while not self._is_finished():
            for _ in self._take_epoch():
                yield self.meter.take_loss()

    # For callbacks

    def stop(self, reason: str) -> None:
        """End the run after this step, and save it.

        Every rank calls it in the same step. The first `reason` is printed, and in run.json.
        """
        self._stop_reason = self._stop_reason or reason
        self._checkpointer.is_requested = True

    def skip_step(self) -> None:
        """Leave the optimizer's step out; from `on_gradients` only. It counts as a step, and its
        loss is in no mean. Every rank calls it in the same step.
        """
        self._skips = True

    def request_checkpoint(self) -> None:
        """Save a checkpoint after this step. Every rank calls it in the same step."""
        self._checkpointer.is_requested = True

    def record(self, **entries: Any) -> None:
        """Add entries to run.json, with the values of rank 0. Every rank calls it."""
        self._recorded.update(entries)
        if self._run_dir is not None:
            self._run_dir.update(**entries)

    @property
    def run_dir(self) -> Path | None:
        """The run directory, on rank 0; None elsewhere."""
        return None if self._run_dir is None else self._run_dir.path

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that the run continues from; on rank 0."""
        return self._checkpointer.resumed_from

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that is complete; -1 without one."""
        return self._checkpointer.saved_step

    @property
    def micro_batch(self) -> int:
        """The micro-batch at work, counted from 1; 0 outside of the backward passes of a step, and
        in those of weight 0, whose gradients become zeros.
        """
        return self._stepper.micro_batch

    @property
    def last_lrs(self) -> list[float]:
        """The learning rates of the last step, by parameter group. May wait for the device."""
        return self._stepper.last_lrs

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
        self._data = RunData(self._checked, config, self.backend)
        self._parts.callback(self._data.close)
        self.batches = self._data.batches
        self.model = build_model(self._checked, config, self.precision, self.backend)
        if config.init_from is not None and self.world.rank == 0:
            # `prepare` broadcasts them.
            found = weights.find(Path(config.init_from))
            state = weights.read(found)
            left_out = weights.load_into(self.model, state, found.path, config.init_strict)
            note = f"; left out: {left_out}" if left_out else ""
            self.console.print_line(f"init     from {found.path}{note}")
        self.eval_model = self.model
        """What evaluations use, without a wrapper; a callback may put another one here."""
        callbacks = [*from_options(config), *self._given_callbacks]
        if has_state(self.task):
            callbacks.append(TaskState(self.task))
        self._callbacks = CallbackList(callbacks)

    def _start(self) -> None:
        """Prepare the backend, then load state, then build the scheduler: the order matters."""
        config, backend, progress = self.config, self.backend, self.progress
        prepared = prepare_model(self.model, self._checked, config, self.precision, backend)
        self.net, self.optimizer = prepared.net, prepared.optimizer
        self._checkpointer = checkpointer = Checkpointer(
            backend,
            config,
            prepared,
            self.batches,
            progress,
            self._callbacks,
            self._run_dir,
            self.console,
        )
        loaded = checkpointer.load(self._is_restart)
        checkpointer.on_saved = lambda path: self._callbacks.call("on_checkpoint", self, path)
        plan = Plan(config, self.world.size, self.batches, progress, self.optimizer, prepared.lrs)
        self.schedule = checkpointer.schedule = plan.make_schedule(self.task, self._checked, loaded)
        self.ledger = plan.ledger
        hook = self._call_on_gradients if self._callbacks.has("on_gradients") else None
        self._stepper = Stepper(
            self._checked, backend, config, prepared, self.schedule, progress, self.meter, hook
        )
        self._first_step = progress.step
        if self._run_dir is not None:
            self._run_dir.update(
                ledger=self.ledger.as_dict(),
                backend=run_report.about_backend(backend),
                resumed_from=checkpointer.resumed_from and str(checkpointer.resumed_from),
            )
            self._run_dir.open_metrics(progress.step)
        self._callbacks.call("on_start", self)
        if loaded:
            self._callbacks.load_state_dict(loaded["callbacks"], self.console.print_line)
        if self._records:
            of_run = self._threads, self.run_dir, self._origins, self._is_restart
            for line in run_report.header(backend, config, self.ledger, self.model, *of_run):
                self.console.print_line(line)

    # The loop

    def _train(self) -> Result:
        """Take the steps that are left of the run, and finish it. Collective."""
        self._check_evaluation()
        self.console.start(self.ledger.total_steps, self.progress.step)
        while not self._is_finished():
            for _ in self._take_epoch():
                self._after_step()
        return self._finish()

    def _take_epoch(self) -> Iterator[None]:
        """Take the remaining steps of the epoch or run. Yield after each; once, if an epoch that a
        resumed run continues has none left. Collective.
        """
        progress = self.progress
        steps = self._data.begin_epoch(progress, self.precision.convert_batch)
        if not self.model.training:  # else modules that the task has frozen would be thawed
            self.model.train()
        self.meter.restart()
        self._epoch_began, self._own_samples = (progress.epoch, progress.sample), 0
        self._callbacks.call("on_epoch_start", self)
        is_over = False
        while not (is_over or self._is_finished()):
            if self._preemption.begin_step(progress.step + 1) and not self._is_preempted:
                self._is_preempted = self._checkpointer.is_requested = True
            step = self.meter.time_data(lambda: next(steps, None))
            if step is None:
                self._data.check_used(progress)
                mark_as_stepped(self.optimizer)  # it was, in this epoch, before the run was resumed
            else:
                self._take_step(step)
            if is_over := step is None or step.last:
                progress.end_epoch()
                self.schedule.after_epoch()
            yield

    def _take_step(self, batches: StepBatches) -> None:
        """Take one step, and log it if it is due. Collective."""
        self.backend.progress.step = step = self.progress.step + 1
        logs = self._records and self._log_is_due(step, batches.last)
        self._stepper.take(batches, logs)
        if step == self._first_step + 1:
            self._check_equal()
        self._own_samples += batches.own
        if logs:
            self.log(self._stepper.record())
        self._callbacks.call("on_step_end", self)
        self._checkpointer.raise_error()
        if self._records and not logs and self._checkpointer.is_requested:  # by a callback
            self.log(self._stepper.record())
        if logs:
            with self.meter.paused():
                self._checkpointer.complete(wait=False)
        self.optimizer.zero_grad()
        self.console.advance(step)

    def _log_is_due(self, step: int, ends_epoch: bool) -> bool:
        """Return whether a step has a record: also each before an evaluation or a checkpoint, so
        that its loss is checked, and no diverged state is saved.
        """
        return (
            step % self.config.log_every == 0
            or ends_epoch
            or step == self.config.max_steps
            or self._eval_is_due(step)
            or self._checkpointer.should_save(step)
        )

    def _after_step(self) -> None:
        """Evaluate and save, if it is due; end a preempted run that has its checkpoint. Collective.

        At the end of an epoch, `progress` is at the start of the next one.
        """
        progress, ends_epoch = self.progress, not self.progress.sample
        done = self._is_finished()  # before what an evaluation decides
        if ends_epoch or done:
            self._record_samples()
        of_epoch = ends_epoch and self._eval_epochs and progress.epoch % self._eval_epochs == 0
        if done or of_epoch or self._eval_is_due(progress.step):
            with self.meter.paused():
                metrics = self._evaluate()
                # Before the checkpoint: a resumed run must not see this evaluation again.
                try:
                    self.schedule.after_evaluation(metrics, progress.step)
                except InputError:  # its metric is missing, on every rank: lose no step
                    self._checkpointer.save()
                    self._checkpointer.complete()
                    raise
                if metrics:
                    self._callbacks.call("on_evaluate", self, metrics)
        if ends_epoch:
            self._callbacks.call("on_epoch_end", self)
        is_last = done and self.config.has_checkpoints
        if is_last or self._checkpointer.should_save(progress.step, ends_epoch):
            with self.meter.paused():
                self._save()
        stops = self._is_finished()
        is_preempted = self._is_preempted and self._checkpointer.is_saved and not stops
        if (stops or is_preempted) and not (ends_epoch or done):
            self._record_samples()
        if is_preempted:
            self._end_preempted()

    def _is_finished(self) -> bool:
        """Return whether no step follows."""
        return bool(self._stop_reason) or self.progress.is_complete(self.config)

    def _eval_is_due(self, step: int) -> bool:
        """Return whether `--eval-every` asks for an evaluation after a step of this run."""
        is_new = step > self._first_step
        return is_new and self._eval_steps > 0 and step % self._eval_steps == 0

    def _finish(self) -> Result:
        """Evaluate and save the last step, unless it is, and return the outcome. Collective."""
        if self._evaluated_step != self.progress.step:
            self._evaluate()
        metrics = self._metrics
        if self.config.has_checkpoints:
            self._save()
        digest = agreed_fingerprint(self.backend, self.model)
        self._checkpointer.complete()
        self.console.stop()
        about = self._outcome()
        self._callbacks.call("on_end", self)
        if self._run_dir is not None:
            self._run_dir.finish(
                "finished",
                metrics=metrics,
                params_sha256=digest,
                last_step=self.progress.step,
                backend=run_report.about_backend(self.backend),
                **about,
            )
        # Rank 0 alone has a run directory.
        path, recorded = self.backend.broadcast_object((self.run_dir or Path(), self._recorded))
        scores = describe({f"eval_{name}": value for name, value in metrics.items()})
        self.console.print_line(
            f"done     {self.progress.step} steps{'  ' * bool(scores)}{scores}  "
            f"params_sha256 {digest[:12]}"
        )
        return Result(self.progress.step, metrics, digest, path, recorded)

    def _outcome(self) -> dict[str, Any]:
        """Return what the run decided, for run.json, and print a line about each."""
        planned, step = self.ledger, self.progress.step
        about: dict[str, Any] = {}
        if last_lrs := self._stepper.last_lrs:
            self.ledger = replace(planned, lr_at_end=last_lrs)
            about["ledger"] = self.ledger.as_dict()
            if planned.lr_at_end is None:
                self.console.print_line(f"lr       {format_rates(last_lrs)} at the end")
        why = self._stop_reason
        if why and not self.progress.is_complete(self.config):
            about["stopped_early"] = {"step": step, "of": planned.total_steps, "reason": why}
            self.console.print_line(f"stopped  at step {step} of {planned.total_steps}: {why}")
        return about

    def _end_preempted(self) -> NoReturn:
        """Say which signal has ended the run, and raise Preempted, on every rank. Collective."""
        self._checkpointer.complete()
        ended, step = self._preemption.end(self.progress.step), self.progress.step
        total = self.ledger.total_steps or "?"
        self.console.print_line(
            f"stopped  at step {step} of {total}: {self._preemption.cause}; saved; exit code "
            f"{ended.code}; --resume auto goes on from here"
        )
        raise ended

    def _record_samples(self) -> None:
        """Add to run.json how many samples each rank has used of this epoch. Collective."""
        by_rank = self.backend.all_gather_object(self._own_samples)
        if self._run_dir is not None:
            seen = self._run_dir.run.get("seen", [])
            epoch, start = self._epoch_began
            new = {"epoch": epoch + 1, "from_sample": start, "samples_by_rank": by_rank}
            self._run_dir.update(seen=[*seen, new])

    def _call_on_gradients(self, losses: list[Tensor]) -> bool:
        """Call the hook, and return whether to leave the step out."""
        self._skips = False
        self._callbacks.call("on_gradients", self, losses)
        return self._skips

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        """Return the metrics of the whole evaluation data, exact for any number of ranks."""
        self._evaluated_step = self.progress.step
        if not self._data.has_evaluation:
            return {}
        self._callbacks.call("on_evaluation_start", self)
        batches = self._data.evaluation_batches(self.precision.convert_batch)
        # The unwrapped model: ranks may have different numbers of batches, and the collectives of
        # a wrapper would hang.
        metrics = self._metrics = evaluate_each(
            self.eval_model, batches, self._checked, self.backend, self.precision
        )
        record = {"step": self.progress.step, "epoch": self.progress.epoch_number}
        if self._run_dir is not None and self.progress.step == self._first_step:
            self._run_dir.drop_evaluation(self.progress.step)  # a run before may have done it
        self.log({**record, **{f"eval_{name}": value for name, value in metrics.items()}})
        return metrics

    @torch.no_grad()
    def _check_evaluation(self) -> None:
        """Evaluate one batch of each rank: a mistake in the metrics or the evaluation data would
        else be found after an epoch. Collective.

        Not in a run that is resumed. Leaves random numbers, buffers and metrics as they are.
        """
        config, watched = self.config, self.schedule.watched
        if watched is not None and not self._data.has_evaluation:
            raise InputError(
                f"the schedule follows the metric {watched!r}, and the task {config.task} has no "
                "evaluation data, or --eval-every is never; return them from its datasets()",
                on_all_ranks=True,
            )
        if config.no_check or self.progress.step or not self._data.can_peek:
            return

        errors: list[Exception] = []

        def warn(error: Exception) -> None:
            errors.append(error)
            self.console.print_line(
                "check    WARNING: the metrics of one batch before training raise "
                f"{type(error).__name__}: {one_line(error)}; --no-check leaves this out"
            )

        model = self.eval_model
        with determinism.RandomState(derive_seed(config.seed)), unchanged_buffers(model):
            batches = self._data.first_evaluation_batches(self.precision.convert_batch)
            metrics = evaluate_each(
                model, batches, self._checked, self.backend, self.precision, warn
            )
        if errors and not metrics:
            return
        stop, best = config.early_stop_criterion(), config.keep_best_criterion()
        wanted = {
            "--early-stop": None if stop is None else stop.metric,
            "--keep-best": None if best is None else best.metric,
            "the schedule": watched,
        }
        for option, metric in wanted.items():
            if metric is None:
                continue
            try:
                number_of(metrics, metric, option)
            except InputError as error:
                # A later batch may have it, as one with both classes has an AUC.
                if metric in metrics or self._data.is_evaluated_at_once:
                    raise
                warn(error)

    def log(self, record: dict[str, Any]) -> None:
        """Write one record to metrics.jsonl and show it, on rank 0 only. A record without `step` is
        one of the current step.
        """
        record = {"step": self.progress.step, **record}
        if self._run_dir is not None:
            self._run_dir.log(record)
        self.console.log(record)
        self._callbacks.call("on_log", self, record)

    def _save(self) -> None:
        """Write a checkpoint, unless this progress has one, of ranks that are equal. Collective."""
        if not self._checkpointer.is_saved:
            self._check_equal()
        self._checkpointer.save()

    def _check_equal(self) -> None:
        """Raise WorldMismatch if the parameters differ between ranks. Collective."""
        if self.config.shard_optimizer:
            return  # whose steps refuse what has changed the parameters that ranks share
        check_equal(self.backend, self.model, f"after step {self.progress.step}")

    def _finish_writing(self, run_dir: RunDirectory) -> None:
        """Wait for the checkpoint that is being written while the run fails, for `--grace` at most.
        Not collective.
        """
        grace_s = self.config.grace_s()
        try:
            run_dir.background.wait(grace_s)
        except TimeoutError:
            self.console.print_line(
                f"saved    nothing: the checkpoint is not written after {grace_s:g} s (--grace)"
            )
        except Exception as error:  # the error that ends the run must be reported
            self.console.print_line(f"saved    nothing: {error}")
