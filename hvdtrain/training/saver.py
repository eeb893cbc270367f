"""Saving one run: when a checkpoint is due, and what all ranks do around its files.

The Trainer's loop uses it. `run_state` says what is in a checkpoint, `checkpoint` how its files are
written. Each rank sends what it keeps for itself to rank 0, which alone writes.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain import provenance
from hvdtrain.backends.base import Backend
from hvdtrain.backends.model_sync import to_cpu
from hvdtrain.training import checkpoint, run_state
from hvdtrain.training.callback_list import CallbackList
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import ShardedBatches
from hvdtrain.training.lr_schedule import RateSchedule
from hvdtrain.training.prepared_model import PreparedModel
from hvdtrain.training.run_dir import RunDirectory
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
    ) -> None:
        """`run_dir`: None on the ranks that write none."""
        self._backend, self._config = backend, config
        self._prepared, self._batches, self._progress = prepared, batches, progress
        self._schedule, self._callbacks = schedule, callbacks
        self._run_dir = run_dir
        self._every, self._epochs = config.checkpoint_interval()
        self._is_due = False
        self._requested: int | None = None
        """The step after which a callback wants a checkpoint."""
        self._saved_step = progress.step or -1  # a resumed run has a checkpoint of its step

    def is_due(self, step: int) -> bool:
        """Return whether `--checkpoint-every` asks for a checkpoint after a step."""
        return self._every > 0 and step % self._every == 0

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Return whether `--checkpoint-every` asks for a checkpoint after an epoch."""
        return self._epochs > 0 and epoch % self._epochs == 0

    def request(self, step: int) -> None:
        """Make a checkpoint due after `step`, which is the current or the next one."""
        self._requested = step

    def will_save(self, step: int) -> bool:
        """Return whether a checkpoint follows the next step, `step`, in the middle of an epoch."""
        waits = self._is_due or self._requested is not None
        return self.is_due(step) or (waits and self._prepared.is_in_sync(step))

    def may_save_next(self) -> bool:
        """Return whether a checkpoint may follow the next step, in the middle of an epoch."""
        step = self._progress.step + 1
        waits = self._is_due or self._requested is not None
        return waits or self.is_due(step) or step == self._config.max_steps

    def falls_due(self, is_due: bool) -> bool:
        """Return whether to save now: a checkpoint that is due, or was; with local SGD, after the
        next step that synchronizes.
        """
        step = self._progress.step
        self._is_due |= is_due
        if self._requested is not None and step >= self._requested:
            self._is_due, self._requested = True, None
        if not (self._is_due and self._prepared.is_in_sync(step)):
            return False
        self._is_due = False
        return True

    def has_saved(self) -> bool:
        """Return whether this step has a checkpoint."""
        return self._saved_step == self._progress.step

    def save(self, stop: run_state.Stop | None) -> Path | None:
        """Write a checkpoint and return its path, on rank 0; None elsewhere. `stop`: a request to
        end the run, which is saved as long as it is not carried out.

        Collective: an error on rank 0 is raised on all ranks.
        """
        for what in ("parameters", "state"):
            self._backend.synchronize(self._prepared.optimizer, what)
        states = self._prepared.rank_states
        mine = {type(state).__name__: state.state_dict() for state in states}
        ranks = self._backend.all_gather_object(to_cpu(mine)) if mine else []
        data = None
        if self._batches.has_state and self._progress.sample:
            data = self._backend.all_gather_object(self._batches.state())
        step, path = self._progress.step, None
        is_pending = stop is not None and stop.after > step
        with self._backend.share_errors():
            if self._run_dir is not None:
                path = self._write(self._run_dir, ranks, data, stop if is_pending else None)
        self._saved_step = step
        return path

    def _write(
        self,
        run_dir: RunDirectory,
        ranks: list[Any],
        data: list[Any] | None,
        stop: run_state.Stop | None,
    ) -> Path:
        """Write a checkpoint. `ranks`: what each rank keeps for itself, in rank order; `data`: the
        position of each in a stream.
        """
        prepared, step = self._prepared, self._progress.step
        parts = run_state.collect(
            prepared.model,
            prepared.optimizer,
            prepared.precision,
            self._schedule.state_dict(),
            self._progress,
        )
        if ranks:
            parts["ranks"] = ranks
        if states := self._callbacks.state_dict():
            parts["callbacks"] = states
        if prepared.local is not None:
            parts["trainer"]["outer"] = prepared.local.outer_state()
        parts["trainer"]["data"] = data
        parts["trainer"]["stop"] = None if stop is None else asdict(stop)
        about = {
            "task": self._config.task,
            "world_size": self._backend.world.size,
            "backend": self._backend.name,
            "global_batch": self._batches.global_micro_batch * self._config.accumulate,
            "versions": provenance.versions(),
        }
        if kept := self._callbacks.kept_steps():
            about["kept_steps"] = kept
        path = checkpoint.save(run_dir.checkpoints, step, parts, about)
        checkpoint.prune(run_dir.checkpoints, self._config.keep)
        run_dir.update(last_step=step)
        return path
