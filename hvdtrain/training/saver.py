"""Saving one run: when a checkpoint is due, and what all ranks do around its files.

The Trainer's loop uses it. `run_state` says what is in a checkpoint, `checkpoint` how its files are
written. Rank 0 alone writes. What each rank keeps for itself goes there one rank after another.

With `--checkpoint-async` a thread of rank 0 writes, and the ranks agree later that the files are
there. The thread calls no collective, and does not write run.json.

    all ranks   save                 synchronize, send          collective
    rank 0                           write each rank's own state, copy the rest, start the thread
    rank 0      raise_error          after each step            not collective
    all ranks   complete(wait=...)   at a logged step, before the next save, at the end; collective
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.errors import CheckpointError
from hvdtrain.optim.model_sync import broadcast_tree, to_cpu
from hvdtrain.system import provenance
from hvdtrain.training import checkpoint, run_state
from hvdtrain.training.callback_list import CallbackList
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import ShardedBatches
from hvdtrain.training.prepared_model import PreparedModel
from hvdtrain.training.run_dir import RunDirectory
from hvdtrain.training.schedule import RateSchedule
from hvdtrain.training.snapshot import Snapshot
from hvdtrain.training.streams import StreamBatches


class Saver:
    """Writes the checkpoints of a run."""

    def __init__(
        self,
        backend: Backend,
        config: TrainConfig,
        prepared: PreparedModel,
        batches: ShardedBatches | StreamBatches,
        progress: run_state.Progress,
        schedule: RateSchedule,
        callbacks: CallbackList,
        run_dir: RunDirectory | None,
        is_saved: bool = False,
    ) -> None:
        """`run_dir`: None on the ranks that write none. `is_saved`: whether the run directory has a
        checkpoint of the progress that the run begins with.
        """
        self._backend, self._config = backend, config
        self._prepared, self._batches, self._progress = prepared, batches, progress
        self._schedule, self._callbacks = schedule, callbacks
        self._run_dir = run_dir
        self._every, self._epochs = config.checkpoint_interval()
        self._snapshot = Snapshot()
        self._versions = provenance.versions()
        self.is_requested = False
        """Whether a checkpoint follows this step, as a callback or a signal asks for it."""
        self._begun = replace(progress) if is_saved else None
        """The progress of the newest checkpoint, which may still be being written. Not the step
        alone: an epoch may end without one.
        """
        self._is_writing = False
        self.saved_step = progress.step if is_saved else -1
        """The step of the newest checkpoint that is complete; -1 without one."""
        self.saved_path: Path | None = None
        """Its path, on rank 0, if this run has written it."""

    def is_due(self, step: int, ends_epoch: bool = False) -> bool:
        """Return whether `--checkpoint-every` asks for a checkpoint after a step. `ends_epoch`: it
        is the last of an epoch, and the progress is at the start of the next one.
        """
        if ends_epoch and self._epochs > 0 and self._progress.epoch % self._epochs == 0:
            return True
        return self._every > 0 and step % self._every == 0

    def take_request(self, is_due: bool) -> bool:
        """Return whether to save now: if it `is_due`, or was requested. Clears the request."""
        saves, self.is_requested = is_due or self.is_requested, False
        return saves

    def has_saved(self) -> bool:
        """Return whether this progress has a checkpoint, or one that is being written."""
        return self._begun == self._progress

    def save(self) -> None:
        """Write a checkpoint; with `--checkpoint-async` copy its content, and begin to write.

        `complete` must follow, before the next `save`. Collective: an error on rank 0 is raised on
        all ranks.
        """
        step, run_dir = self._progress.step, self._run_dir
        writer = None
        with self._backend.share_errors():
            if run_dir is not None:
                run_dir.check()
                writer = checkpoint.Writer(run_dir.checkpoints, step)
        try:
            self._write_rank_states(writer)
            data = self._gather_data()
            with self._backend.share_errors():
                if run_dir is not None and writer is not None:
                    parts = self._collect(data)
                    if self._config.checkpoint_async:
                        parts = self._snapshot.take(parts)
                    write = partial(
                        _write, run_dir, writer, parts, self._about(), self._config.keep
                    )
                    if self._config.checkpoint_async:
                        writer = None  # the thread's, whatever happens here
                        run_dir.background.start(write)
                    else:
                        write()
                        run_dir.update(last_step=step)
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        self._begun, self._is_writing = replace(self._progress), True

    def _write_rank_states(self, writer: checkpoint.Writer | None) -> None:
        """Write what each rank keeps for itself, one rank after another: no rank holds more than
        one other rank's. Also with `--checkpoint-async`. Collective.
        """
        states, world = self._prepared.rank_states, self._backend.world
        if not states:
            return
        mine = to_cpu({name: state.state_dict() for name, state in states.items()})
        for rank in range(world.size):
            theirs = broadcast_tree(self._backend, mine if rank == world.rank else None, rank)
            with self._backend.share_errors():
                if writer is not None:
                    writer.add(run_state.rank_part(rank), theirs)
            del theirs

    def _gather_data(self) -> list[Any] | None:
        """Return the position of each rank in a stream, in the middle of an epoch. Collective."""
        if self._batches.has_state and self._progress.sample:
            return self._backend.all_gather_object(self._batches.state())
        return None

    def raise_error(self) -> None:
        """Raise what the thread has failed with, on rank 0, after any step: an error of one rank
        ends the job. Not collective.
        """
        if self._run_dir is not None:
            self._run_dir.background.raise_error()

    def complete(self, wait: bool = True) -> bool:
        """Return whether the checkpoint that `save` began is complete now; False if there is none.
        Unless `wait`, return False if it is still being written.

        Collective: an error on rank 0 is raised on all ranks. Raises CheckpointError if writing
        takes longer than `--timeout`.
        """
        if not self._is_writing or self._begun is None:
            return False
        step, run_dir = self._begun.step, self._run_dir
        if self._config.checkpoint_async:
            if not wait:
                has_ended = run_dir is not None and not run_dir.background.is_running()
                if not self._backend.broadcast_object(has_ended):
                    return False
            with self._backend.share_errors():
                if run_dir is not None:
                    self._wait(run_dir, step)
        self._is_writing = False
        self.saved_step = step
        if run_dir is not None:
            self.saved_path = checkpoint.path_of(run_dir.checkpoints, step)
        return True

    def _wait(self, run_dir: RunDirectory, step: int) -> None:
        timeout_s = self._config.timeout
        try:
            run_dir.background.wait(timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"the checkpoint of step {step} is not written yet, {timeout_s:g} s after the next "
                f"one or the end was due (--timeout): the disk of {run_dir.checkpoints} hangs, or "
                "is too slow for --checkpoint-every"
            ) from None
        run_dir.update(last_step=step)

    def _collect(self, data: list[Any] | None) -> dict[str, Any]:
        """Return the parts of a checkpoint that all ranks have. `data`: the position of each in a
        stream, in rank order.
        """
        prepared = self._prepared
        parts = run_state.collect(
            prepared.model,
            prepared.optimizer,
            prepared.precision,
            self._schedule.state_dict(),
            self._progress,
            self._config.seed,
        )
        if states := self._callbacks.state_dict():
            parts["callbacks"] = states
        parts["trainer"]["data"] = data
        return parts

    def _about(self) -> dict[str, Any]:
        """Return what the manifest says of the run."""
        about = {
            "task": self._config.task,
            "world_size": self._backend.world.size,
            "backend": self._backend.name,
            "global_batch": self._batches.global_micro_batch * self._config.accumulate,
            "versions": self._versions,
        }
        if kept := self._callbacks.kept_steps():
            about["kept_steps"] = kept
        return about


def _write(
    run_dir: RunDirectory,
    writer: checkpoint.Writer,
    parts: dict[str, Any],
    about: dict[str, Any],
    keep: int,
) -> None:
    """Complete a checkpoint, and remove old ones. May run in a thread."""
    run_dir.check()
    try:
        for name, value in parts.items():
            writer.add(name, value)
        writer.finish(about)
        checkpoint.prune(run_dir.checkpoints, keep)
    except CheckpointError:
        run_dir.check()  # a directory that is removed meanwhile is the cause
        raise
