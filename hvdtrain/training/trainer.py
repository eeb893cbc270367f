"""The training loop: `Trainer`. It has no branch for a particular backend or launcher.

`hvdtrain train` calls `fit`; `hvdtrain compare` calls `set_up`, and measures `steps`. The life of a
run:

    set_up         build data and model, open the run directory, prepare the parts, restore
    each step      backward, on_gradients, update, the schedule; log, if it is due; on_step_end
    after a step   evaluate, if it is due; save, if it is due; end, if a signal has asked for it
    finish         the last checkpoint, run.json, the outcome

Its parts:

    data/loader      the datasets, and this rank's micro-batches
    stepper          model and optimizer, as the backend prepared them, and one step of them
    schedule         the number of steps, and the learning rates
    checkpointer     what it continues from, and the checkpoints that it writes
    callback_list    early stop, best checkpoint, average of weights, and the user's own callbacks
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.backends import open_backend
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError, one_line
from hvdtrain.training import determinism, methods, run_report, weights
from hvdtrain.training.callback import Callback
from hvdtrain.training.callback_list import CallbackList, TaskState, from_options
from hvdtrain.training.checkpointer import Checkpointer
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console, describe
from hvdtrain.training.criterion import number_of
from hvdtrain.training.data.loader import RunData
from hvdtrain.training.data.order import StepBatches, check_same_plan
from hvdtrain.training.evaluation import evaluate_each, unchanged_buffers
from hvdtrain.training.metrics import agreed_fingerprint, check_equal
from hvdtrain.training.precision import Precision
from hvdtrain.training.preemption import Preemption
from hvdtrain.training.progress import Progress
from hvdtrain.training.run_dir import RunDirectory
from hvdtrain.training.schedule import Ledger, Schedule
from hvdtrain.training.stepper import Meter, Stepper, build_model
from hvdtrain.training.task import CheckedTask, Task, name_of
from hvdtrain.transports.malloc import keep_freed_memory


class Trainer:
    """Trains one task on one open backend. Every rank calls the same methods in the same order; the
    properties are not collective.

    Without a `backend`, the constructor opens the one that the options name, and `fit` closes it:
    `Trainer(task, epochs=3).fit()`. `options` are fields of TrainConfig by name, and replace those
    of `config`.

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
                backend = opened.enter_context(
                    open_backend(config.backend, None, config.backend_options(), config.agreed())
                )
            config = config.opened_with(backend.options)
            if origins is None and config.task == TrainConfig.task:  # not from the command line
                config = config.with_options({"task": name_of(task)})
            methods.check(config, backend.name)
            self._to_close = opened.pop_all()
            """What `fit` closes at its end, with the backend if this Trainer has opened it."""
        self.task = task
        self.backend = backend
        self.config = config
        self.world = backend.world
        self.console = Console(backend)
        self.precision = Precision(config.precision, backend.device, config.opt_level)
        self.progress = Progress()
        self.meter = Meter(backend)
        self._records = True
        self._first_step = 0
        """The step that the run continues from."""
        self._origins = origins or {}
        self._given_callbacks = callbacks
        self._callbacks = CallbackList(self, [])
        self._run_dir: RunDirectory | None = None
        self._recorded: dict[str, Any] = {}
        self._eval_every = config.evaluation_interval()
        self._metrics: dict[str, Any] = {}
        """Those of the last evaluation, which was after `_evaluated_step`."""
        self._evaluated_step = -1
        self._stop_reason = ""
        """Why a callback ends the run after this step; empty unless one does."""
        self._skips = False
        """Whether a callback leaves this step out."""
        self._preemption = Preemption(backend, config)
        self._is_preempted = False
        """Whether the run ends as soon as it has a checkpoint."""

    def fit(self) -> run_report.Result:
        """Train to the end and return the outcome. Collective.

        Raises InputError, CheckpointError, WorldMismatch or TrainingDiverged, and Preempted (a
        SystemExit) after a signal: see `preemption`. run.json has the cause, if it exists by then.
        """
        with self._to_close:
            try:
                with self._preemption:
                    self.set_up()
                    self._preemption.connect()
                    self._check_evaluation()
                    for _ in self._take_steps():
                        self._after_step()
                    return self._finish()
            except BaseException as error:
                self._callbacks.tell_exception(error)
                if self._run_dir is not None:
                    self._run_dir.fail(error, self.progress.step)
                raise

    def set_up(self, record: bool = True) -> None:
        """Create data, model, optimizer and run directory, prepare the backend, and restore the
        checkpoint that `--resume` chooses. Collective.

        Call it before `steps`; `fit` calls it itself. Without `record` there is no run directory
        and no output.
        """
        self._records = record
        backend, config, origins = self.backend, self.config, self._origins
        with backend.share_errors():
            threads = determinism.set_threads(config.threads, self.world, os.environ)
            self._build()
        check_same_plan(backend, *self._data.datasets, config)
        self._callbacks.check()
        is_restart = record and run_report.is_restart(backend)
        with backend.share_errors():
            if self.world.rank == 0 and record:  # only now: invalid input creates no directory
                self._run_dir = run_report.open_run_dir(
                    backend, config, origins, threads, is_restart
                )
                self._to_close.callback(self._run_dir.close)
                backend.progress.run_dir = str(self._run_dir.path.absolute())
        self._prepare(is_restart)
        if record:
            for line in run_report.header(
                backend,
                config,
                self.ledger,
                self.model,
                threads,
                self.run_dir,
                origins,
                is_restart,
            ):
                self.console.print_line(line)

    def steps(self) -> Iterator[Tensor]:
        """Take one optimizer step for each `next`, epoch after epoch, and yield the mean loss over
        this rank's samples. Collective.

        Call `set_up(record=False)` before. Then nothing is evaluated, saved or logged, and
        neither the losses nor the ranks' parameters are checked. `hvdtrain train --quiet`
        takes these steps: `hvdtrain compare` measures them, and compares the parameters itself.
        """
        for _ in self._take_steps():
            yield self.meter.take_loss()

    # For callbacks

    def stop(self, reason: str) -> None:
        """End the run after this step, and save it.

        Every rank calls it in the same step. The first `reason` is printed, and in run.json.
        """
        self._stop_reason = self._stop_reason or reason
        self.request_checkpoint()

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

    def log(self, record: dict[str, Any]) -> None:
        """Write one record to metrics.jsonl and show it, on rank 0 only. A record without `step` is
        one of the current step. Every rank calls it.
        """
        record = {"step": self.progress.step, **record}
        if self._run_dir is not None:
            self._run_dir.log(record)
        if text := describe(record):
            of = self.ledger.total_steps or "?"
            self.console.print_line(f"step {record['step']}/{of}  {text}")
        self._callbacks.call("on_log", record)

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
        return self._checkpointer.saved.step

    @property
    def last_lrs(self) -> list[float]:
        """The learning rates of the last step, by parameter group. May wait for the device."""
        return [float(lr) for lr in self._stepper.last_lrs]

    @property
    def ledger(self) -> Ledger:
        """The plan of the run in numbers."""
        return self.schedule.ledger

    # Setting up

    def _build(self) -> None:
        """Create everything that needs no other rank: seeds, loaders, the model on this rank's
        device, on rank 0 with the weights of `--init-from`, and callbacks.
        """
        config = self.config
        # On every backend, so that they are comparable: `shm` and `compat` do it by themselves.
        keep_freed_memory()
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        determinism.seed_all(determinism.derive_seed(config.seed))
        self._data = RunData(self._checked, config, self.backend)
        self._to_close.callback(self._data.close)
        self.batches = self._data.batches
        self.model = build_model(self._checked, config, self.precision, self.backend)
        if config.init_from is not None and self.world.rank == 0:
            # The backend broadcasts them to the other ranks, in `prepare`.
            found = weights.find(Path(config.init_from))
            state = weights.read(found)
            left_out = weights.load_into(self.model, state, found.path, config.init_strict)
            note = f"; left out: {left_out}" if left_out else ""
            self.console.print_line(f"init     from {found.path}{note}")
        self.eval_model = self.model
        """What evaluations use, without a wrapper; a callback may put another one here."""
        callbacks = [*from_options(config), *self._given_callbacks]
        if type(self.task).state_dict is not Task.state_dict:
            callbacks.append(TaskState(self.task))
        self._callbacks = CallbackList(self, callbacks)

    def _prepare(self, is_restart: bool) -> None:
        """Create the parts of the loop, load the state of a checkpoint, if the run continues from
        one, and plan what is left of the run. Collective.
        """
        config, backend, progress = self.config, self.backend, self.progress
        self._stepper = stepper = Stepper(
            self.model, self._checked, config, self.precision, backend, progress, self.meter
        )
        self.net, self.optimizer = stepper.net, stepper.optimizer
        self.schedule = Schedule(
            self._checked,
            config,
            self.world.size,
            self.batches,
            progress,
            self.optimizer,
            *stepper.lrs,
        )
        self._checkpointer = Checkpointer(
            backend,
            config,
            stepper,
            self.batches,
            progress,
            self.schedule,
            self._callbacks,
            self._run_dir,
            self.console,
        )
        loaded = self._checkpointer.load(is_restart)
        self.schedule.start(loaded)
        self._first_step = progress.step
        if self._run_dir is not None:
            self._run_dir.update(
                ledger=self.ledger.as_dict(),
                backend=run_report.about_backend(backend),
                resumed_from=self.resumed_from and str(self.resumed_from),
            )
            self._run_dir.open_metrics(progress.step)
        self._callbacks.call("on_start")
        if loaded:
            self._callbacks.load_state_dict(loaded["callbacks"])

    # The loop

    def _take_steps(self) -> Iterator[None]:
        """Take the steps that are left of the run, and yield after each. Also yield once for an
        epoch without a step: that of a resumed run whose rest is too short for one. Collective.
        """
        while not self._is_finished():
            yield from self._take_epoch()

    def _take_epoch(self) -> Iterator[None]:
        """Take the steps that are left of the epoch or run: see `_take_steps`. Collective."""
        progress = self.progress
        steps = self._data.begin_epoch(progress, self.precision.convert_batch)
        if not self.model.training:  # else modules that the task keeps in eval mode would leave it
            self.model.train()
        self.meter.restart()
        self._callbacks.call("on_epoch_start")
        is_over = False
        while not (is_over or self._is_finished()):
            if self._preemption.begin_step(progress.step + 1):
                self._is_preempted = self._checkpointer.is_requested = True
            batches = self.meter.time_next(steps, None)
            if batches is None:
                self._data.check_used(progress)
                # The optimizer has stepped in this epoch, before the run was resumed.
                mark_as_stepped(self.optimizer)
            else:
                self._take_step(batches)
            if is_over := batches is None or batches.last:
                progress.end_epoch()
                self.schedule.after_epoch()
            yield

    def _take_step(self, batches: StepBatches) -> None:
        """Take one step, and log it if it is due. Collective."""
        self.backend.progress.step = step = self.progress.step + 1
        # Each step before an evaluation or a checkpoint has a record, too: `Stepper.record` raises
        # an error for a loss that is not finite, so no diverged state is saved.
        logs = self._records and (
            step % self.config.log_every == 0
            or batches.last
            or step == self.config.max_steps
            or self._eval_every.after_step(step)
            or self._checkpointer.should_save(step)
        )
        losses = self._stepper.backward(batches)
        self._skips = False
        self._callbacks.call("on_gradients", [*losses])
        self._stepper.update(batches.samples, [] if self._skips else losses, logs)
        self.schedule.after_step()
        if self._records and step == self._first_step + 1:
            self._check_equal()
        if logs:
            self.log(self._stepper.record())
        self._callbacks.call("on_step_end")
        if self._records and not logs and self._checkpointer.is_requested:  # by a callback
            self.log(self._stepper.record())
        self.optimizer.zero_grad()

    def _after_step(self) -> None:
        """Evaluate and save, if it is due. Raise Preempted, on every rank, if a signal ends the
        run. Collective.

        At the end of an epoch, `progress` is at the start of the next one.
        """
        progress, ends_epoch = self.progress, not self.progress.sample
        if (
            (ends_epoch and self._eval_every.after_epoch(progress.epoch))
            or self._is_finished()
            or (progress.step > self._first_step and self._eval_every.after_step(progress.step))
        ):
            with self.meter.paused():
                metrics = self._evaluate()
                # Before the checkpoint: a resumed run must not see this evaluation again.
                self.schedule.after_evaluation(metrics)
                if metrics:
                    self._callbacks.call("on_evaluate", metrics)
        if ends_epoch:
            self._callbacks.call("on_epoch_end")
        if self._checkpointer.should_save(progress.step, ends_epoch):
            with self.meter.paused():
                self._save()
        if self._is_preempted and not self._is_finished():
            ended, total = self._preemption.end(progress.step), self.ledger.total_steps or "?"
            self.console.print_line(
                f"stopped  at step {progress.step} of {total}: {self._preemption.cause}; saved; "
                f"exit code {ended.code}; --resume auto goes on from here"
            )
            raise ended

    def _is_finished(self) -> bool:
        """Return whether no step follows."""
        return bool(self._stop_reason) or self.progress.is_complete(self.config)

    def _finish(self) -> run_report.Result:
        """Save the last step, unless it has a checkpoint, and return the outcome. Collective."""
        if self._evaluated_step != self.progress.step:  # a resumed run had no step left
            self._evaluate()
        if any(self.config.checkpoint_interval()):
            self._save()
        digest = agreed_fingerprint(self.backend, self.model)
        step, total, about = self.progress.step, self.ledger.total_steps, {}
        if self._stop_reason and not self.progress.is_complete(self.config):
            about["stopped_early"] = {"step": step, "of": total, "reason": self._stop_reason}
            self.console.print_line(f"stopped  at step {step} of {total}: {self._stop_reason}")
        self._callbacks.call("on_end")
        metrics = self._metrics
        if self._run_dir is not None:
            self._run_dir.finish(
                "finished",
                metrics=metrics,
                params_sha256=digest,
                last_step=step,
                backend=run_report.about_backend(self.backend),
                **about,
            )
        # Rank 0 alone has a run directory.
        path, recorded = self.backend.broadcast_object((self.run_dir or Path(), self._recorded))
        scores = describe({f"eval_{name}": value for name, value in metrics.items()})
        self.console.print_line(
            f"done     {step} steps{'  ' * bool(scores)}{scores}  params_sha256 {digest[:12]}"
        )
        return run_report.Result(step, metrics, digest, path, recorded)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        """Return the metrics of the whole evaluation data, exact for any number of ranks."""
        self._evaluated_step = self.progress.step
        if not self._data.has_evaluation:
            return {}
        self._callbacks.call("on_evaluation_start")
        batches = self._data.evaluation_batches(self.precision.convert_batch)
        # The unwrapped model: ranks may have different numbers of batches, and the collectives of
        # a wrapper would hang.
        metrics = self._metrics = evaluate_each(
            self.eval_model, batches, self._checked, self.backend, self.precision
        )
        if self._run_dir is not None and self.progress.step == self._first_step:
            # Without the line of this evaluation that a run before may have written.
            self._run_dir.open_metrics(self.progress.step, with_evaluation=False)
        scores = {f"eval_{name}": value for name, value in metrics.items()}
        self.log({"epoch": self.progress.epoch_number, **scores})
        return metrics

    def _check_evaluation(self) -> None:
        """Evaluate one batch of each rank: a mistake in the metrics or the evaluation data would
        else be found after an epoch. Collective.

        Not in a run that is resumed, and not of a stream, which cannot be read twice.
        """
        config, data, watched = self.config, self._data, self.schedule.watched
        if watched is not None and not data.has_evaluation:
            raise InputError(
                f"the schedule needs the metric {watched!r}, but the task {config.task} has no "
                "evaluation data, or --eval-every is never; return some from its datasets()",
                on_all_ranks=True,
            )
        if config.no_check or self.progress.step or (data.has_evaluation and not data.can_peek):
            return
        errors: list[Exception] = []
        convert = self.precision.convert_batch
        batches = data.first_evaluation_batches(convert) if data.has_evaluation else {}
        with unchanged_buffers(self.eval_model):
            metrics = evaluate_each(
                self.eval_model, batches, self._checked, self.backend, self.precision, errors.append
            )
        for error in errors:  # on rank 0
            self.console.print_line(
                "check    WARNING: computing the metrics of one batch before training raised "
                f"{type(error).__name__}: {one_line(error)}; --no-check skips this check"
            )
        if self.backend.broadcast_object(bool(errors)):
            return
        early_stop, keep_best = config.early_stop_criterion(), config.keep_best_criterion()
        try:
            if early_stop is not None:
                number_of(metrics, early_stop.metric, "--early-stop")
            if keep_best is not None:
                number_of(metrics, keep_best.metric, "--keep-best")
            if watched is not None:
                number_of(metrics, watched, "the schedule")
        except InputError as missing:
            fix = "if later batches have it, give --no-check"
            raise InputError(f"{missing}; {fix}", on_all_ranks=True) from None

    def _save(self) -> None:
        """Write a checkpoint, unless this progress has one; before, compare the ranks' parameters.
        Collective.
        """
        if not self._checkpointer.is_saved:
            self._check_equal()
        self._checkpointer.save()

    def _check_equal(self) -> None:
        """Raise WorldMismatch if the parameters differ between ranks. Collective."""
        if self.config.shard_optimizer:
            return  # a step refuses parameters that were changed outside of it
        check_equal(self.backend, self.model, f"after step {self.progress.step}")
