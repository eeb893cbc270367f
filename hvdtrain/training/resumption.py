"""Resuming one run from a checkpoint, on all ranks.

The Trainer uses it once, after the backend has prepared the model. Rank 0 alone reads the files:
it loads model and optimizer, and broadcasts them, with the position in the data; then each rank
takes back what it kept for itself, one after another. `run_state` says what is in a checkpoint.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hvdtrain.backends.base import Backend
from hvdtrain.errors import CheckpointError
from hvdtrain.optim.model_sync import broadcast_state, broadcast_tree
from hvdtrain.system.trees import map_tree
from hvdtrain.training import checkpoint, run_state
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console
from hvdtrain.training.data_loading import ShardedBatches
from hvdtrain.training.prepared_model import PreparedModel
from hvdtrain.training.restart import Restart
from hvdtrain.training.run_dir import RunDirectory
from hvdtrain.training.streams import StreamBatches

if TYPE_CHECKING:
    from hvdtrain.training.commits import Commits


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
        restart: Restart | None,
        commits: Commits | None = None,
    ) -> None:
        """`run_dir` and `restart`: None on the ranks that write none. `commits`: of an elastic run,
        which continues from the newest one, if there is one.
        """
        self._backend, self._config = backend, config
        self._prepared, self._batches, self._progress = prepared, batches, progress
        self._run_dir, self._console, self._restart = run_dir, console, restart
        self._commits = commits
        self.path: Path | None = None
        """The checkpoint that the run continues from, or that of a commit's step; on rank 0."""
        self.is_saved = False
        """Whether the state has a checkpoint in the run directory: not one of another directory's,
        and not a commit.
        """

    def load(self) -> dict[str, Any]:
        """Load a checkpoint on rank 0, or the newest commit on its rank, and broadcast it.
        Collective.

        Returns the trainer's part of the checkpoint; empty for a fresh start. Raises
        CheckpointError, on every rank, if it cannot be used.
        """
        loaded: dict[str, Any] = {}
        backend, prepared = self._backend, self._prepared
        root = None if self._commits is None else self._commits.root
        with backend.share_errors():
            if self._commits is not None and root is not None:
                loaded = self._restore_commit(self._commits, backend.world.rank == root)
            elif self._run_dir is not None and (self._config.resume != "none" or self._restart):
                loaded = self._restore(self._run_dir)
        is_commit, root = root is not None, root or 0
        states = loaded.pop("callbacks", {})
        loaded = backend.broadcast_object(loaded, root)
        if not loaded:
            return loaded
        loaded["callbacks"] = broadcast_tree(backend, states, root)
        self.is_saved = loaded.get("is_saved", False)
        optimizer, precision = prepared.optimizer, prepared.precision
        with precision.masters_in(optimizer) as masters:
            broadcast_state(backend, prepared.model, optimizer, root)
            for master in masters.values():
                master.copy_(backend.broadcast_(master.contiguous(), root))
        if loaded["scaler"]:  # empty unless the checkpoint is of an fp16 run
            precision.scaler.load_state_dict(loaded["scaler"])
        self._resume_rank_states(is_commit)
        prepared.load_shared_state(loaded)
        self._progress.move_to(**loaded["position"])
        if self._progress.sample:
            self._check_seed(loaded.get("seed", self._config.seed))
            self._resume_data(loaded.get("data"))
        return loaded

    def _restore_commit(self, commits: Commits, is_root: bool) -> dict[str, Any]:
        """Restore the newest commit on its rank, and set later checkpoints aside on rank 0."""
        step = commits.agreed.step
        if self._run_dir is not None:
            root = self._run_dir.checkpoints
            for old in checkpoint.set_aside(root, step):
                self._console.print_line(f"resume   set aside {old.name}")
            self.path = checkpoint.path_of(root, step)
        parts = self._prepared.model, self._prepared.optimizer, self._prepared.precision
        return run_state.restore(commits.parts, *parts) if is_root else {}

    def _restore(self, run_dir: RunDirectory) -> dict[str, Any]:
        """Restore the chosen checkpoint, and set later ones aside; return the trainer's part."""
        root, resume, print_line = (
            run_dir.checkpoints,
            self._config.resume,
            self._console.print_line,
        )
        if self._restart is None:
            path = run_state.choose(root, resume, print_line)
        else:
            path = self._choose_after_restart(self._restart, run_dir)
        parts = self._prepared.model, self._prepared.optimizer, self._prepared.precision
        loaded = {} if path is None else run_state.restore(path, *parts)
        step = loaded["position"]["step"] if loaded else -1
        for old in checkpoint.set_aside(root, step):
            self._console.print_line(f"resume   set aside {old.name}")
        if path is not None and self._restart is None:
            print_line(f"resume   from {path}, step {step}")
        self.path = path
        if path is not None:
            loaded["is_saved"] = root.exists() and path.resolve().parent == root.resolve()
        return loaded

    def _choose_after_restart(self, restart: Restart, run_dir: RunDirectory) -> Path | None:
        """Return the newest valid checkpoint of this run, if there is one; else do what --resume
        says. Print which. Raises CheckpointError for `--resume must` without a checkpoint.
        """
        root, resume, print_line = (
            run_dir.checkpoints,
            self._config.resume,
            self._console.print_line,
        )
        is_path = resume not in ("none", "auto", "must")
        path: Path | None = None
        skipped: list[checkpoint.Skipped] = []
        if run_dir.continues or not is_path:
            path, skipped = checkpoint.newest(root)
        for item in skipped:
            print_line(f"resume   skipped {item.path.name}: {item.reason}")
        if path is not None:
            print_line(restart.line(f"continues from {path}"))
        elif is_path:
            path = run_state.choose(root, resume, print_line)
            print_line(restart.line(f"starts from {path} again, as it has no checkpoint yet"))
        elif resume == "must":
            run_state.choose(root, resume, print_line)  # raises
        elif restart.run_dir is None:
            print_line(restart.line("starts from step 0: no run directory is known"))
        elif restart.made_on not in ("", socket.gethostname()) and not run_dir.run["attempts"]:
            text = (
                f"WARNING: {run_dir.path} of host {restart.made_on} is not on this host; TRAINING "
            )
            text += "STARTS AGAIN FROM STEP 0; put it on a file system that all hosts share"
            print_line(restart.line(text))
        else:
            why = f"there is no checkpoint in {root} yet"
            if skipped:
                why = f"WARNING: none of the {len(skipped)} checkpoints in {root} is valid"
            print_line(restart.line(f"starts from step 0: {why}"))
        return path

    def _check_seed(self, before: int) -> None:
        """Raise CheckpointError, on every rank, if another seed orders the rest of the epoch."""
        if before != self._config.seed:
            raise CheckpointError(
                f"the checkpoint is in the middle of an epoch in the order of --seed {before}: "
                f"--seed {self._config.seed} would leave samples out, and train others twice; "
                f"give --seed {before}, or resume from a checkpoint at the end of an epoch",
                on_all_ranks=True,
            )

    def _resume_data(self, states: list[Any] | None) -> None:
        """Continue in the middle of an epoch. Collective.

        The samples left of it may be too few for a step of this run: then it ends without one.
        """
        progress, batches = self._progress, self._batches
        with self._backend.share_errors():
            batches.load_state(states or [], progress.sample, self._console.print_line)
        batches.begin(self._backend, progress.epoch, progress.sample)

    def _resume_rank_states(self, is_commit: bool) -> None:
        """Give each rank what it kept for itself, one rank after another. Print what another
        method, or another number of ranks, cannot use. A commit has none. Collective.
        """
        backend, states = self._backend, self._prepared.rank_states
        saved: run_state.RankStates | None = None
        with backend.share_errors():
            if self.path is not None and not is_commit:
                saved = run_state.RankStates(self.path)
        about = (saved.size, saved.names) if saved is not None else (0, set[str]())
        size, names = backend.broadcast_object(about)
        mine: dict[str, Any] = {}
        if states and size == backend.world.size:
            for rank in range(size):
                theirs: dict[str, Any] = {}
                with backend.share_errors():
                    if saved is not None:
                        theirs = saved.load(rank)
                theirs = broadcast_tree(backend, theirs)
                if rank == backend.world.rank:
                    mine = map_tree(Tensor.clone, Tensor, theirs)  # rank 0's are in the file
        for name, state in states.items():
            if name in mine:
                state.load_state_dict(mine[name])
                continue
            has = f"is of {size} ranks" if name in names else "has none"
            self._console.print_line(
                f"resume   {name}: each rank's own state starts afresh, as the checkpoint {has}"
            )
        for name in sorted(names - states.keys()):
            self._console.print_line(f"resume   {name}: the checkpoint's state is not used")
