"""Saving one run: when a checkpoint is due, and what all ranks do around its files.

The Trainer's loop uses it. `run_state` says what is in a checkpoint, `checkpoint` how its files are
written. Each rank sends what it keeps for itself to rank 0, which alone writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain import provenance
from hvdtrain.backends.base import Backend
from hvdtrain.backends.model_sync import to_cpu
from hvdtrain.training import checkpoint, run_state
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import ShardedBatches
from hvdtrain.training.decisions import Decisions
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
        decisions: Decisions,
        run_dir: RunDirectory | None,
    ) -> None:
        """`run_dir`: None on the ranks that write none."""
        self._backend, self._config = backend, config
        self._prepared, self._batches, self._progress = prepared, batches, progress
        self._schedule, self._decisions = schedule, decisions
        self._run_dir = run_dir
        self._is_due = False
        self._saved_step = progress.step or -1  # a resumed run has a checkpoint of its step
        self.best_path: Path | None = None
        """Where the checkpoint of the best evaluation is; on rank 0."""

    def is_due(self, step: int) -> bool:
        """Return whether `--checkpoint-every` asks for a checkpoint after a step."""
        every = self._config.checkpoint_every
        return every > 0 and step % every == 0

    def will_save(self, step: int) -> bool:
        """Return whether a checkpoint follows a step in the middle of an epoch."""
        return self.is_due(step) or (self._is_due and self._prepared.is_in_sync(step))

    def may_save_next(self) -> bool:
        """Return whether a checkpoint may follow the next step, in the middle of an epoch."""
        step = self._progress.step + 1
        return self.is_due(step) or step == self._config.max_steps or self._is_due

    def save_if_due(self, is_due: bool) -> None:
        """Save a checkpoint that is due; with local SGD, after the next step that synchronizes.
        Collective.
        """
        self._is_due |= is_due
        if self._is_due and self._prepared.is_in_sync(self._progress.step):
            self._is_due = False
            self.save()

    def save(self) -> None:
        """Write a checkpoint, unless this step has one.

        Collective: an error on rank 0 is raised on all ranks.
        """
        if self._saved_step == self._progress.step:
            return
        states = self._prepared.rank_states
        mine = {type(state).__name__: state.state_dict() for state in states}
        ranks = self._backend.all_gather_object(to_cpu(mine)) if mine else []
        data = None
        if self._batches.has_state and self._progress.sample:
            data = self._backend.all_gather_object(self._batches.state())
        with self._backend.share_errors():
            if self._run_dir is not None:
                self._write(self._run_dir, ranks, data)
        self._saved_step = self._progress.step

    def _write(self, run_dir: RunDirectory, ranks: list[Any], data: list[Any] | None) -> None:
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
            self._decisions.state_dict(),
        )
        if ranks:
            parts["ranks"] = ranks
        if prepared.local is not None:
            parts["trainer"]["outer"] = prepared.local.outer_state()
        parts["trainer"]["data"] = data
        about = {
            "task": self._config.task,
            "world_size": self._backend.world.size,
            "backend": self._backend.name,
            "global_batch": self._batches.global_micro_batch * self._config.accumulate,
            "versions": provenance.versions(),
        }
        best = self._decisions.best
        if best is not None and best.value is not None:
            about["best_step"] = best.step
        path = checkpoint.save(run_dir.checkpoints, step, parts, about)
        checkpoint.prune(run_dir.checkpoints, self._config.keep)
        run_dir.update(last_step=step)
        if best is not None and best.step == step:
            self.best_path = path
            run_dir.update(best_checkpoint=best.about(path))
