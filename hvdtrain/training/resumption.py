"""Resuming one run from a checkpoint, on all ranks.

The Trainer uses it once, after the backend has prepared the model. Rank 0 alone reads the files:
it loads model and optimizer, and broadcasts them, with the position in the data; then each rank
takes back what it kept for itself. `run_state` says what is in a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.model_sync import broadcast_state, broadcast_tree
from hvdtrain.training import checkpoint, run_state
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console
from hvdtrain.training.data_loading import ShardedBatches
from hvdtrain.training.prepared_model import PreparedModel
from hvdtrain.training.run_dir import RunDirectory
from hvdtrain.training.streams import StreamBatches


class Resumption:
    """The checkpoint that `--resume` chooses, if any."""

    def __init__(
        self,
        backend: Backend,
        config: TrainConfig,
        prepared: PreparedModel,
        batches: ShardedBatches | StreamBatches,
        progress: run_state.Progress,
        run_dir: RunDirectory | None,
        console: Console,
    ) -> None:
        """`run_dir`: None on the ranks that write none."""
        self._backend, self._config = backend, config
        self._prepared, self._batches, self._progress = prepared, batches, progress
        self._run_dir, self._console = run_dir, console
        self.path: Path | None = None
        """The checkpoint that the run continues from; on rank 0."""

    def load(self) -> dict[str, Any]:
        """Load a checkpoint on rank 0 and broadcast it. Collective.

        Returns the trainer's part of the checkpoint; empty for a fresh start. Raises
        CheckpointError, on every rank, if it cannot be used.
        """
        loaded: dict[str, Any] = {}
        if self._config.resume == "none":
            return loaded
        backend, prepared = self._backend, self._prepared
        with backend.share_errors():
            if self._run_dir is not None:
                loaded = self._restore(self._run_dir.checkpoints)
        states = loaded.pop("callbacks", {})
        loaded = backend.broadcast_object(loaded)
        if not loaded:
            return loaded
        loaded["callbacks"] = broadcast_tree(backend, states)
        optimizer, precision = prepared.optimizer, prepared.precision
        with precision.masters_in(optimizer) as masters:
            broadcast_state(backend, prepared.model, optimizer)
            for master in masters.values():
                master.copy_(backend.broadcast_(master.contiguous()))
        # Learning rates are those of this run's options, not those of the checkpoint.
        for group, lr in zip(optimizer.param_groups, prepared.lr_after, strict=True):
            group["lr"] = group["initial_lr"] = lr
        if loaded["scaler"]:  # empty unless the checkpoint is of an fp16 run
            precision.scaler.load_state_dict(loaded["scaler"])
        self._resume_rank_states(loaded["ranks"])
        if prepared.local is not None:
            prepared.local.resume(loaded.get("outer"))
        self._progress.move_to(**loaded["position"])
        if self._progress.sample:
            self._resume_data(loaded.get("data"))
        return loaded

    def _restore(self, root: Path) -> dict[str, Any]:
        """Restore the chosen checkpoint, and set later ones aside; return the trainer's part."""
        path = run_state.choose(root, self._config.resume, self._console.print_line)
        parts = self._prepared.model, self._prepared.optimizer, self._prepared.precision
        loaded = {} if path is None else run_state.restore(path, *parts)
        step = loaded["position"]["step"] if loaded else -1
        for old in checkpoint.set_aside(root, step):
            self._console.print_line(f"resume   set aside {old.name}")
        if path is not None:
            self._console.print_line(f"resume   from {path}, step {step}")
            self.path = path
        return loaded

    def _resume_data(self, states: list[Any] | None) -> None:
        """Continue in the middle of an epoch. Collective."""
        progress, batches = self._progress, self._batches
        with self._backend.share_errors():
            batches.load_state(states or [], progress.sample, self._console.print_line)
        batches.begin(self._backend, progress.epoch, progress.sample)
        if batches.is_over(progress.sample):
            # The samples left of the epoch are too few for a step of this run: drop them, as at the
            # end of any epoch.
            progress.end_epoch()

    def _resume_rank_states(self, ranks: list[dict[str, Any]]) -> None:
        """Give each rank what it kept for itself. Print what another method, or another number of
        ranks, cannot use.
        """
        world, states = self._backend.world, self._prepared.rank_states
        saved = dict(ranks[world.rank]) if len(ranks) == world.size else {}
        names = set(ranks[0]) if ranks else set()
        for state in states:
            name = type(state).__name__
            if name in saved:
                state.load_state_dict(saved[name])
                continue
            has = f"is of {len(ranks)} ranks" if name in names else "has none"
            self._console.print_line(
                f"resume   {name}: each rank's own state starts afresh, as the checkpoint {has}"
            )
        for name in sorted(names - {type(state).__name__ for state in states}):
            self._console.print_line(f"resume   {name}: the checkpoint's state is not used")
