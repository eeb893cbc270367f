"""The training loop: `Trainer`. It has no branch for a particular backend or launcher.

`hvdtrain train` calls `fit`; `hvdtrain compare` calls `set_up`, and measures `steps`. Its parts, in
the order in which a run needs them:

    run_data         the datasets, and this rank's micro-batches
    prepared_model   model and optimizer, as the backend prepared them
    resumption       the checkpoint that it continues from
    run_plan         the number of steps, and the learning rates
    stepper          one optimizer step
    saver            the checkpoints that it writes
    callback_list    early stop, best checkpoint, average of weights, and the user's own callbacks
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.backends import open_backend
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError, one_line
from hvdtrain.training import determinism, methods, restart, run_report, run_state, weights
from hvdtrain.training.callback import Callback
from hvdtrain.training.callback_list import CallbackList, from_options
from hvdtrain.training.callbacks.task_state import TaskState, has_state
from hvdtrain.training.config import TrainConfig, flag
from hvdtrain.training.console import Console, describe, make_console
from hvdtrain.training.criterion import number_of
from hvdtrain.training.data_loading import (
    StepBatches,
    check_same_plan,
    derive_seed,
    unchanged_buffers,
)
from hvdtrain.training.evaluation import evaluate_each
from hvdtrain.training.ledger import format_rates
from hvdtrain.training.meter import Meter, StepTaken
from hvdtrain.training.metrics import agreed_fingerprint, check_equal
from hvdtrain.training.precision import Precision
from hvdtrain.training.preemption import Preemption
from hvdtrain.training.prepared_model import build_model, prepare_model
from hvdtrain.training.resumption import Resumption
from hvdtrain.training.run_data import RunData
from hvdtrain.training.run_dir import RunDirectory
from hvdtrain.training.run_plan import RunPlan
from hvdtrain.training.run_report import Result
from hvdtrain.training.saver import Saver
from hvdtrain.training.stepper import Stepper
from hvdtrain.training.task import CheckedTask, Task, name_of
from hvdtrain.transports.malloc import keep_freed_memory

if TYPE_CHECKING:
    from hvdtrain.training.commits import Commits


class Trainer:
    """Trains one task on one open backend. Every method is collective: every rank calls it.

    Without a `backend`, `Trainer(task, epochs=3).fit()` opens that of the options, and closes it.
    `config` and `options` are TrainConfig's; the latter count before the former.

    `origins` maps each option to its source (flag, variable, file), for run.json. `callbacks` are
    called after those of the options; they are the same on every rank (see `Callback`).
    `commits` is given by `elastic_training`: the run goes on from the newest, and takes others.
    """

    def __init__(
        self,
        task: Task,
        backend: Backend | None = None,
        config: TrainConfig | None = None,
        origins: dict[str, str] | None = None,
        callbacks: Sequence[Callback] = (),
        commits: Commits | None = None,
        **options: Any,
    ) -> None:
        config = replace(config or TrainConfig(), **options)
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
        self._checked = CheckedTask(task)
        self.backend = backend
        self.config = config
        self.world = backend.world
        self.console: Console = make_console(self.world)
        self.precision = Precision(config.precision, backend.device, config.opt_level)
        self.progress = run_state.Progress()
        self.on_batch: Callable[[Any], None] | None = None
        """Called with every micro-batch of this rank, before its forward pass."""
        self.meter: Meter | None = None
        """The Meter of the current epoch; None before the first one."""
        self.resumed_from: Path | None = None
        """The checkpoint that the run continues from; on rank 0."""
        self._records = True
        self._first_step = 0
        """The step that the run continues from."""
        self._origins = origins or {}
        self._given_callbacks = callbacks
        self._commits = commits
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
        self._start_of_run = restart.initial_start(self.world)
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
            lost = self.backend._peer_error(error) if isinstance(error, Exception) else None
            self._start_of_run.note_end(lost or error)
            if hasattr(self, "_callbacks"):  # else setting up has failed before
                self._callbacks.tell_exception(self, error)
            if self._run_dir is not None:
                if self._commits is None or not self._commits.ends_world(error):
                    self._run_dir.fail(error, self.progress.step)
                self._finish_writing(self._run_dir)
            raise
        finally:
            self.console.stop()
            if hasattr(self, "_data"):  # else setting up has failed
                self._data.close()
            if self._run_dir is not None:
                self._run_dir.close()
        self._start_of_run.note_end(None)
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
            self._start_of_run = restart.detect_restart(self.backend, self.config.run_dir)
        with self.backend.share_errors():
            if self.world.rank == 0 and record:  # only now: invalid input creates no directory
                about = self._origins, self._threads, self._start_of_run
                known = self._commits.agreed.run_dir if self._commits is not None else ""
                self._run_dir = run_report.open_run_dir(self.backend, self.config, *about, known)
                self.backend.progress.run_dir = str(self._run_dir.path.absolute())
        self._start_of_run.keep_on_all_hosts(self.backend, self.run_dir)
        if self._commits is not None:
            self._commits.keep_run_dir(self.run_dir)
        self._start()

    def steps(self) -> Iterator[StepTaken]:
        """Take one optimizer step for each `next`, epoch after epoch. Collective.

        `hvdtrain compare` measures it. It evaluates, saves and logs nothing, and checks no loss.
        """
        meter = Meter(self.backend)
        while not self._is_finished():
            for _ in self._take_epoch(meter):
                yield StepTaken(self.progress.step, *meter.take_step())

    # For callbacks

    def stop(self, reason: str) -> None:
        """End the run after this step, and save it. Local SGD ends with an average.

        Every rank calls it in the same step. The first `reason` is printed, and in run.json.
        """
        self._stop_reason = self._stop_reason or reason
        self._saver.request()

    def skip_step(self) -> None:
        """Leave the optimizer's step out; from `on_gradients` only. It counts as a step, and its
        loss is in no mean. Every rank calls it in the same step.
        """
        self._skips = True

    def request_checkpoint(self) -> None:
        """Save a checkpoint after this step; with local SGD after the next one that averages. Every
        rank calls it in the same step.
        """
        self._saver.request()

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
    def saved_step(self) -> int:
        """The step of the newest checkpoint that is complete; -1 without one."""
        return self._saver.saved_step

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
        self.batches = self._data.batches
        self.model = build_model(self._checked, config, self.precision, self.backend)
        # A commit has the weights of later steps.
        has_commit = self._commits is not None and self._commits.root is not None
        if config.init_from is not None and self.world.rank == 0 and not has_commit:
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
        commits = self._commits
        first_size = None if commits is None else commits.agreed.first_size
        prepared = prepare_model(
            self.model, self._checked, config, self.precision, backend, first_size
        )
        self._prepared, self.net, self.optimizer = prepared, prepared.net, prepared.optimizer
        common = backend, config, prepared, self.batches, progress
        again = self._start_of_run.restart
        resumption = Resumption(*common, self._run_dir, self.console, again, commits)
        loaded = resumption.load()
        plan = RunPlan(config, self.world.size, self.batches, progress, prepared)
        self.schedule = plan.make_schedule(self.task, self._checked, loaded)
        self.ledger = plan.ledger
        hook = self._call_on_gradients if self._callbacks.has("on_gradients") else None
        self._stepper = Stepper(
            self._checked, backend, config, prepared, self.schedule, progress, hook
        )
        saves_with = self.schedule, self._callbacks, self._run_dir, commits
        self._saver = Saver(*common, *saves_with, resumption.is_saved)
        self._first_step = progress.step
        if self._run_dir is not None:
            about: dict[str, Any] = {
                "ledger": self.ledger.as_dict(),
                "backend": run_report.about_backend(backend),
            }
            if commits is None or commits.root is None:
                path = None if resumption.path is None else str(resumption.path)
                about["resumed_from"] = path
            if commits is not None:
                worlds = self._run_dir.run.get("worlds", [])
                about["worlds"] = [*worlds, commits.as_dict(progress)]
                seen = self._run_dir.run.get("seen", [])
                about["seen"] = [one for one in seen if one["epoch"] <= progress.epoch]
            self._run_dir.update(**about)
            self._run_dir.open_metrics(progress.step)
        self._start_callbacks(resumption.path, loaded)
        if commits is not None:
            self._saver.commit(loaded.get("data"))
        if self._records:
            parts = self.config.task, self.ledger, self._threads, self.run_dir
            for line in run_report.header(self.backend, *parts, config, commits):
                self.console.print_line(line)
            kept = [name for name, origin in self._origins.items() if origin == "run.json"]
            if kept:
                values = {name: getattr(config, name) for name in kept}
                text = " ".join(
                    f"{flag(name)} {' '.join(value) if isinstance(value, tuple) else value}"
                    for name, value in values.items()
                )
                self.console.print_line(f"options  of the run before: {text}")
            modes = [module.training for module in self.model.modules()]
            if modes[0] and not all(modes):
                self.console.print_line(
                    f"model    {modes.count(False)} of {len(modes)} modules are in eval mode, as "
                    "the task returned them, and stay so"
                )

    def _start_callbacks(self, resumed_from: Path | None, loaded: dict[str, Any]) -> None:
        """Call on_start, then restore the state of callbacks."""
        self.resumed_from = resumed_from
        self._callbacks.call("on_start", self)
        if loaded:
            states = loaded.get("callbacks", {})
            self._callbacks.load_state_dict(states, self.console.print_line)
        if stop := loaded.get("stop"):  # written by versions that stopped one step later
            self.stop(stop["reason"])

    # The loop

    def _train(self) -> Result:
        """Take the steps that are left of the run, and finish it. Collective."""
        self._check_evaluation()
        self.console.start(self.ledger.total_steps, self.progress.step)
        while not self._is_finished():
            for _ in self._take_epoch(Meter(self.backend)):
                self._after_step()
        return self._finish()

    def _take_epoch(self, meter: Meter) -> Iterator[None]:
        """Take the remaining steps of the epoch or run. Yield after each; once, if an epoch that a
        resumed run continues has none left. Collective.
        """
        progress = self.progress
        steps = self._data.begin_epoch(progress, self.precision.convert_batch)
        if not self.model.training:  # else modules that the task has frozen would be thawed
            self.model.train()
        self.meter = meter
        self._epoch_began, self._own_samples = (progress.epoch, progress.sample), 0
        self._callbacks.call("on_epoch_start", self)
        is_over = False
        while not (is_over or self._is_finished()):
            if self._preemption.begin_step(progress.step + 1) and not self._is_preempted:
                self._is_preempted = True
                self._saver.request()
            waited = time.perf_counter()
            step = next(steps, None)
            meter.data_s += time.perf_counter() - waited
            if step is None:
                self._data.check_used(progress)
                mark_as_stepped(self.optimizer)  # it was, in this epoch, before the run was resumed
            else:
                self._take_step(step, meter)
            if is_over := step is None or step.last:
                progress.end_epoch()
                self.schedule.after_epoch()
            yield

    def _take_step(self, batches: StepBatches, meter: Meter) -> None:
        """Take one step, and log it if it is due. Collective."""
        self.backend.progress.step = step = self.progress.step + 1
        logs = self._records and self._log_is_due(step, batches.last)
        self._stepper.take(batches, meter, logs, self.on_batch)
        self._own_samples += batches.own
        if logs:
            self.log(self._stepper.record(meter))
        self._callbacks.call("on_step_end", self)
        self._saver.raise_error()
        if self._records and not logs and self._saver.will_save():  # requested by a callback
            self.log(self._stepper.record(meter))
        if logs:
            with meter.paused():
                self._complete_save(wait=False)
        self.optimizer.zero_grad()
        self.console.advance(step)

    def _log_is_due(self, step: int, ends_epoch: bool) -> bool:
        """Return whether a step has a record: also each before an evaluation or a checkpoint, so
        that its loss is checked, and no diverged state is saved.
        """
        config, commits = self.config, self._commits
        return (
            step % config.log_every == 0
            or ends_epoch
            or step == config.max_steps
            or self._eval_is_due(step)
            or self._saver.is_due(step)
            or self._is_preempted
            or (commits is not None and commits.is_due(step))
        )

    def _after_step(self) -> None:
        """Evaluate and save, if it is due; end a preempted run that has its checkpoint. Collective.

        At the end of an epoch, `progress` is at the start of the next one.
        """
        progress, ends_epoch = self.progress, not self.progress.sample
        if progress.step == self._first_step + 1:
            self._check_equal()
        done = self._is_finished()  # before what an evaluation decides
        if ends_epoch or done:
            self._record_samples()
        if done:
            self._prepared.synchronize()
        of_epoch = ends_epoch and self._eval_epochs and progress.epoch % self._eval_epochs == 0
        if done or of_epoch or self._eval_is_due(progress.step):
            assert self.meter is not None
            with self.meter.paused():
                metrics = self._evaluate()
                # Before the checkpoint: a resumed run must not see this evaluation again.
                try:
                    self.schedule.after_evaluation(metrics, progress.step)
                except InputError:  # its metric is missing, on every rank: lose no step
                    self._save()
                    self._complete_save()
                    raise
                if metrics:
                    self._callbacks.call("on_evaluate", self, metrics)
        if ends_epoch:
            self._callbacks.call("on_epoch_end", self)
        is_last = done and self.config.has_checkpoints
        self._save_if_due(is_last or self._saver.is_due(progress.step, ends_epoch))
        stops = self._is_finished()
        is_preempted = self._is_preempted and self._saver.has_saved() and not stops
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
        # A stop that an evaluation asks for may come between two averages of local SGD.
        if self._prepared.synchronize() or self._evaluated_step != self.progress.step:
            self._evaluate()
        metrics = self._metrics
        if self.config.has_checkpoints:
            self._save()
        digest = agreed_fingerprint(self.backend, self.model)
        self._complete_save()
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
        self._complete_save()
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
            # Written at once: the next world of an elastic run begins with what is in the file.
            self._run_dir.update(seen=[*seen, new])

    def _call_on_gradients(self, losses: list[Tensor]) -> bool:
        """Call the hook, and return whether to leave the step out."""
        self._skips = False
        self._callbacks.call("on_gradients", self, losses)
        return self._skips

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        """Return the metrics of the whole evaluation data, exact for any number of ranks. Between
        two synchronizations of local SGD they are those of the averaged parameters.
        """
        self._evaluated_step = self.progress.step
        if self._data.has_evaluation:
            self._callbacks.call("on_evaluation_start", self)
            with self._prepared.averaged():
                self._metrics = self._evaluate_model()
        return self._metrics

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
        stop, best = config.early_stop_criterion(), config.keep_best_criterion()
        wanted = {
            "--early-stop": None if stop is None else stop.metric,
            "--keep-best": None if best is None else best.metric,
            "the schedule": watched,
        }
        has_none = bool(errors) and not metrics
        for option, metric in wanted.items():
            if metric is None or has_none:
                continue
            try:
                number_of(metrics, metric, option)
            except InputError as error:
                # A later batch may have it, as one with both classes has an AUC.
                if metric in metrics or self._data.is_evaluated_at_once:
                    raise
                if self._records:
                    warn(error)

    def _evaluate_model(self) -> dict[str, Any]:
        # The unwrapped model: ranks may have different numbers of batches, and the collectives of
        # a wrapper would hang.
        batches = self._data.evaluation_batches(self.precision.convert_batch)
        model = self.eval_model
        metrics = evaluate_each(model, batches, self._checked, self.backend, self.precision)
        record = {"step": self.progress.step, "epoch": self.progress.epoch_number}
        if self._run_dir is not None and self.progress.step == self._first_step:
            self._run_dir.drop_evaluation(self.progress.step)  # a run before may have done it
        self.log({**record, **{f"eval_{name}": value for name, value in metrics.items()}})
        return metrics

    def log(self, record: dict[str, Any]) -> None:
        """Write one record to metrics.jsonl and show it, on rank 0 only. A record without `step` is
        one of the current step.
        """
        record = {"step": self.progress.step, **record}
        if self._run_dir is not None:
            self._run_dir.log(record)
        self.console.log(record)
        self._callbacks.call("on_log", self, record)

    def _save_if_due(self, is_due: bool) -> None:
        assert self.meter is not None
        saves = self._saver.take_request(is_due)
        if saves:
            with self.meter.paused():
                self._save()
        commits, progress = self._commits, self.progress
        if commits is None or not (saves or not progress.sample or commits.is_due(progress.step)):
            return
        with self.meter.paused():
            self._saver.commit()
        if not (self._is_finished() or self._is_preempted):
            commits.check_hosts()

    def _save(self) -> None:
        """Write a checkpoint, or begin to, unless this step has one. Collective."""
        if self._saver.has_saved():
            return
        self._check_equal()
        self._complete_save()  # at most one is being written
        self._saver.save()
        if not self.config.checkpoint_async:
            self._complete_save()

    def _check_equal(self) -> None:
        """Raise WorldMismatch if the parameters differ between ranks. Collective."""
        if self._prepared.in_sync:
            check_equal(self.backend, self.model, f"after step {self.progress.step}")

    def _complete_save(self, wait: bool = True) -> None:
        """Call `on_checkpoint` if a checkpoint has become complete. Collective.

        `wait`: wait for one that is being written.
        """
        if self._saver.complete(wait):
            self._callbacks.call("on_checkpoint", self, self._saver.saved_path)

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
