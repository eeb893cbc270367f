"""The checkpoints of one run: what is in them, when they are due, and what all ranks do.

The Trainer calls `load` once, after the backend has prepared the model, and then asks `should_save`
after each step. A checkpoint has parts by name; `checkpoint` says how their files are written:

    model, optimizer   plain state dicts, so that any backend at any world size loads them
    masters            the fp32 weights of a half model, if it has any
    trainer            progress, seed, loss scale, schedule, and each rank's place in a stream
    callbacks          the states of callbacks, by name
    rank-0, rank-1 ..  what each rank keeps for itself, by name, such as the errors of PowerSGD

Rank 0 alone reads and writes. What each rank keeps goes there, and back, one rank after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.backends.base import Backend
from hvdtrain.errors import CheckpointError, HvdtrainError, one_line
from hvdtrain.optim.model_sync import broadcast_tree, to_cpu, uncompiled
from hvdtrain.training import checkpoint
from hvdtrain.training.callback_list import CallbackList
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console
from hvdtrain.training.data.order import EpochBatches
from hvdtrain.training.precision import Precision
from hvdtrain.training.progress import Progress
from hvdtrain.training.run_dir import RunDirectory, checkpoints_of
from hvdtrain.training.schedule import Schedule
from hvdtrain.training.stepper import Stepper


class Checkpointer:
    """Loads and saves the parts of a run. Every method is collective, unless it says otherwise."""

    def __init__(
        self,
        backend: Backend,
        config: TrainConfig,
        prepared: Stepper,
        batches: EpochBatches,
        progress: Progress,
        schedule: Schedule,
        callbacks: CallbackList,
        run_dir: RunDirectory | None,
        console: Console,
    ) -> None:
        """`run_dir`: None on the ranks that write none."""
        self._backend, self._config, self._console = backend, config, console
        self._prepared, self._batches, self._progress = prepared, batches, progress
        self._schedule, self._callbacks, self._run_dir = schedule, callbacks, run_dir
        self._every = config.checkpoint_interval()
        self.resumed_from: Path | None = None
        """The checkpoint that the run continues from; on rank 0."""
        self._names: list[str] = []
        """Its parts."""
        self.is_requested = False
        """Whether a checkpoint follows this step, as a callback or a signal asks for it."""
        self._saved = Progress(step=-1)
        """The progress of the newest checkpoint. Not the step alone: an epoch may end without one.
        """

    # Saving

    def should_save(self, step: int, ends_epoch: bool = False) -> bool:
        """Return whether a checkpoint follows a step, as it is requested or `--checkpoint-every`
        asks for it. `ends_epoch`: it is the last of an epoch, and the progress is at the start of
        the next one. Not collective.
        """
        of_epoch = ends_epoch and self._every.after_epoch(self._progress.epoch)
        return self.is_requested or of_epoch or self._every.after_step(step)

    @property
    def is_saved(self) -> bool:
        """Whether this progress has a checkpoint."""
        return self._saved == self._progress

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint; -1 without one."""
        return self._saved.step

    def save(self) -> None:
        """Write a checkpoint, unless this progress has one, and remove old ones. An error on rank 0
        is raised on all ranks.
        """
        self.is_requested = False
        if self.is_saved:
            return
        backend, run_dir, step = self._backend, self._run_dir, self._progress.step
        path = writer = None
        with ExitStack() as stack:
            with backend.share_errors():
                if run_dir is not None:
                    run_dir.check()
                    writer = stack.enter_context(checkpoint.Writer(run_dir.checkpoints, step))
            self._write_rank_states(writer)
            data = None
            if self._batches.has_state and self._progress.sample:
                data = backend.all_gather_object(self._batches.state())
            with backend.share_errors():
                if run_dir is not None and writer is not None:
                    try:
                        for name, value in self._parts(data):
                            writer.add(name, value)
                        path = writer.finish(self._about(run_dir))
                        checkpoint.prune(run_dir.checkpoints, self._config.keep)
                    except CheckpointError:
                        run_dir.check()  # a directory that is removed meanwhile is the cause
                        raise
                    run_dir.update(last_step=step)
        self._saved = replace(self._progress)
        self._callbacks.call("on_checkpoint", path)

    def _write_rank_states(self, writer: checkpoint.Writer | None) -> None:
        """Write what each rank keeps for itself, one rank after another: no rank holds more than
        one other rank's.
        """
        states, world = self._prepared.rank_states, self._backend.world
        if not states:
            return
        mine = to_cpu({name: state.state_dict() for name, state in states.items()})
        for rank in range(world.size):
            theirs = broadcast_tree(self._backend, mine if rank == world.rank else None, rank)
            with self._backend.share_errors():
                if writer is not None:
                    writer.add(f"rank-{rank}", theirs)
            del theirs

    def _parts(self, data: list[Any] | None) -> Iterator[tuple[str, Any]]:
        """Yield the parts that all ranks have alike, on the CPU, one by one. Not collective.

        `data`: each rank's place in a stream.
        """
        prepared, optimizer = self._prepared, self._prepared.optimizer
        model = to_cpu(prepared.model.state_dict())
        yield "model", {uncompiled(name): value for name, value in model.items()}
        with prepared.precision.masters_in(optimizer) as masters:
            state, masters = to_cpu((optimizer.state_dict(), masters))
        yield "optimizer", state
        if masters:
            yield "masters", masters
        yield (
            "trainer",
            {
                "position": asdict(self._progress),
                "scaler": prepared.precision.scaler.state_dict(),
                "schedule": self._schedule.state_dict(),
                "seed": self._config.seed,
                "data": data,
            },
        )
        if states := self._callbacks.state_dict():
            yield "callbacks", states

    def _about(self, run_dir: RunDirectory) -> dict[str, Any]:
        """Return what the manifest says of the run. Not collective."""
        return {
            "task": self._config.task,
            "world_size": self._backend.world.size,
            "backend": self._backend.name,
            "global_batch": self._batches.global_micro_batch * self._config.accumulate,
            "versions": run_dir.run["versions"],
            "kept_steps": self._callbacks.kept_steps(),
        }

    # Loading

    def load(self, is_restart: bool) -> dict[str, Any]:
        """Load the checkpoint that `--resume` chooses on rank 0; after a restart the newest one of
        `--run-dir`, if there is one. Set later ones aside.

        Returns the trainer's part, with the states of callbacks; empty for a fresh start. Raises
        CheckpointError, on every rank, if it cannot be used.
        """
        backend, progress, run_dir = self._backend, self._progress, self._run_dir
        is_own, loaded = False, dict[str, Any]()
        with backend.share_errors():
            if run_dir is not None:
                root = run_dir.checkpoints
                self.resumed_from = path = self._choose(root, is_restart)
                if path is not None:
                    self._names = checkpoint.part_names(path)
                    is_own = path.resolve().parent == root.resolve()
        self._names, is_own = backend.broadcast_object((self._names, is_own))
        if self._names:
            loaded = {**self._part("trainer"), "callbacks": self._part("callbacks")}
            progress.move_to(**loaded["position"])
            self._console.print_line(f"resume   from {self.resumed_from}, step {progress.step}")
            prepared = self._prepared
            restore(self._part, prepared.model, prepared.optimizer, prepared.precision)
            if loaded["scaler"]:  # empty unless the checkpoint is of an fp16 run
                self._prepared.precision.scaler.load_state_dict(loaded["scaler"])
            self._load_rank_states()
        with backend.share_errors():
            if run_dir is not None:
                for old in checkpoint.set_aside(
                    run_dir.checkpoints, progress.step if loaded else -1
                ):
                    self._console.print_line(f"resume   set aside {old.name}")
        if is_own:
            self._saved = replace(progress)
        if progress.sample:
            self._continue_epoch(loaded)
        return loaded

    def _part(self, name: str) -> Any:
        """Return one part of the checkpoint, on the CPU; empty if it has none. Rank 0 reads it."""
        tree: Any = {}
        if name in self._names:
            with self._backend.share_errors():
                if self.resumed_from is not None:
                    tree = checkpoint.load(self.resumed_from, name)
            tree = broadcast_tree(self._backend, tree)
        return tree

    def _choose(self, root: Path, is_restart: bool) -> Path | None:
        """Return the checkpoint to resume from, and print which ones are skipped and why; None to
        start afresh. Raises CheckpointError if there must be one.
        """
        resume, print_line, given = self._config.resume, self._console.print_line, None
        is_restart = is_restart and bool(self._config.run_dir)
        roots = [root] if is_restart or resume in ("auto", "must") else []
        if resume not in ("none", "auto", "must"):
            given = Path(resume)
            if (of_run := checkpoints_of(resume)) is not None:
                roots, given, resume = [*roots, of_run], None, "must"
        skipped: dict[Path, str] = {}
        for root in roots:
            path, skipped = checkpoint.newest(root)
            for other, why in skipped.items():
                print_line(f"resume   skipped {other.name}: {why}")
            if path is not None:
                return path
        if given is not None:
            return given
        if resume == "must":
            raise CheckpointError(
                f"--resume {self._config.resume} found no valid checkpoint in {root}"
            )
        if skipped:
            print_line(
                f"resume   WARNING: none of the {len(skipped)} checkpoints in {root} is valid; "
                "TRAINING STARTS AGAIN FROM STEP 0; --resume must ends with an error instead"
            )
        elif roots:
            print_line(f"resume   no checkpoint in {root}; starting afresh")
        return None

    def _continue_epoch(self, loaded: dict[str, Any]) -> None:
        """Continue in the middle of an epoch. The samples left of it may be too few for a step of
        this run: then it ends without one. Raises CheckpointError for another seed.
        """
        progress, seed = self._progress, self._config.seed
        before = loaded.get("seed", seed)
        if before != seed:
            raise CheckpointError(
                f"the checkpoint is in the middle of an epoch in the order of --seed {before}: "
                f"--seed {seed} would leave samples out, and train others twice; "
                f"give --seed {before}, or resume from a checkpoint at the end of an epoch",
                on_all_ranks=True,
            )
        with self._backend.share_errors():
            states = loaded.get("data") or []
            self._batches.load_state(states, progress.sample, self._console.print_line)
        self._batches.begin(self._backend, progress.epoch, progress.sample)

    def _load_rank_states(self) -> None:
        """Give each rank what it kept for itself, one rank after another. Print what another
        method, or another number of ranks, cannot use.
        """
        world, states = self._backend.world, self._prepared.rank_states
        size = sum(name.startswith("rank-") for name in self._names)
        mine: dict[str, Any] = {}
        for rank in range(size if size == world.size else 0):
            theirs = self._part(f"rank-{rank}")
            if rank == world.rank:
                mine = theirs
            del theirs
        for name, state in states.items():
            if name in mine:
                state.load_state_dict(mine[name])
            else:
                self._console.print_line(
                    f"resume   {name}: each rank's own state starts afresh, as the checkpoint has "
                    f"none of {world.size} ranks"
                )
        for name in mine.keys() - states.keys():
            self._console.print_line(f"resume   {name}: the checkpoint's state is not used")


def restore(
    part: Callable[[str], Any], model: nn.Module, optimizer: Optimizer, precision: Precision
) -> None:
    """Load model, fp32 masters and optimizer, in place, one after another: all parts of a large
    model would not fit into the memory of every rank at once. Collective if `part` is.

    `part` returns one by its name. A run without masters takes those of the checkpoint as its
    weights; a run with masters takes the weights of a checkpoint that has none. Raises
    CheckpointError, as on all ranks, if it is of another model or optimizer.
    """
    # The model may be compiled.
    names = {uncompiled(name): name for name in model.state_dict()}
    saved = {uncompiled(name): value for name, value in part("model").items()}
    with _is_of_this_run():
        model.load_state_dict({names.get(name, name): value for name, value in saved.items()})
    exact = part("masters")
    with precision.masters_in(optimizer) as masters:
        with _is_of_this_run(), torch.no_grad():
            for name, p in model.named_parameters():
                if uncompiled(name) in exact:
                    p.copy_(exact[uncompiled(name)])
            for name, master in masters.items():
                master.copy_({**saved, **exact}[name])
        del saved, exact
        state = part("optimizer")
        with _is_of_this_run():
            optimizer.load_state_dict(state)


@contextmanager
def _is_of_this_run() -> Iterator[None]:
    """Raise CheckpointError, as on all ranks, for what loading raises."""
    try:
        yield
    except (HvdtrainError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint is of another model or optimizer: {one_line(error)}",
            on_all_ranks=True,
        ) from None
