"""The checkpoints of one run: what is in them, when they are due, and what all ranks do.

The Trainer calls `load` once, after the backend has prepared the model, and then asks `should_save`
after each step. A checkpoint has parts by name; `checkpoint` says how their files are written:

    model, optimizer   plain state dicts, so that any backend at any world size loads them
    masters            the fp32 weights of a half model, if it has any
    trainer            progress, seed, loss scale, schedule, samples of a stream used by each rank
    callbacks          the states of callbacks, by name
    rank-0, rank-1 ..  what each rank keeps for itself, by name, such as the errors of PowerSGD

Rank 0 alone reads and writes. What each rank keeps goes there, and back, one rank after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.backends.base import Backend
from hvdtrain.errors import CheckpointError
from hvdtrain.optim.model_sync import broadcast_tree, to_cpu, uncompiled
from hvdtrain.training import checkpoint
from hvdtrain.training.callback_list import CallbackList
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console
from hvdtrain.training.data.order import EpochBatches
from hvdtrain.training.loop_checkpoints import of_this_run, read_part
from hvdtrain.training.precision import Precision
from hvdtrain.training.progress import Progress
from hvdtrain.training.run_dir import RunDirectory, checkpoints_of
from hvdtrain.training.schedule import Schedule
from hvdtrain.training.stepper import Stepper


@dataclass
class Checkpointer:
    """Loads and saves the parts of a run. Every method is collective, unless it says otherwise."""

    backend: Backend
    config: TrainConfig
    prepared: Stepper
    batches: EpochBatches
    progress: Progress
    schedule: Schedule
    callbacks: CallbackList
    run_dir: RunDirectory | None
    """None on the ranks that write none."""
    console: Console
    resumed_from: Path | None = None
    """The checkpoint that the run continues from; on rank 0."""
    is_requested: bool = False
    """Whether a checkpoint follows this step, as a callback or a signal asks for it."""

    def __post_init__(self) -> None:
        self._every = self.config.checkpoint_interval()
        self.saved = Progress(step=-1)
        """The progress of the newest checkpoint. Not the step alone: an epoch may end without one.
        """

    # Saving

    def should_save(self, step: int, ends_epoch: bool = False) -> bool:
        """Return whether a checkpoint follows a step, as it is requested or `--checkpoint-every`
        asks for it. `ends_epoch`: it is the last of an epoch, and the progress is at the start of
        the next one. Not collective.
        """
        of_epoch = ends_epoch and self._every.after_epoch(self.progress.epoch)
        return self.is_requested or of_epoch or self._every.after_step(step)

    @property
    def is_saved(self) -> bool:
        """Whether this progress has a checkpoint."""
        return self.saved == self.progress

    def save(self) -> None:
        """Write a checkpoint, unless this progress has one, and remove old ones. An error on rank 0
        is raised on all ranks.
        """
        self.is_requested = False
        if self.is_saved:
            return
        backend, run_dir, step = self.backend, self.run_dir, self.progress.step
        path = writer = None
        with ExitStack() as stack:
            with backend.share_errors():
                if run_dir is not None:
                    run_dir.check()
                    writer = stack.enter_context(checkpoint.Writer(run_dir.checkpoints, step))
            self._write_rank_states(writer)
            with backend.share_errors():
                if run_dir is not None and writer is not None:
                    try:
                        for name, value in self._parts():
                            writer.add(name, value)
                        path = writer.finish(self._about(run_dir))
                        checkpoint.prune(run_dir.checkpoints, self.config.keep)
                    except CheckpointError:
                        run_dir.check()  # a directory that is removed meanwhile is the cause
                        raise
                    run_dir.update(last_step=step)
        self.saved = replace(self.progress)
        self.callbacks.call("on_checkpoint", path)

    def _write_rank_states(self, writer: checkpoint.Writer | None) -> None:
        """Write what each rank keeps for itself, one rank after another: no rank holds more than
        one other rank's.
        """
        states, world = self.prepared.rank_states, self.backend.world
        if not states:
            return
        mine = to_cpu({name: state.state_dict() for name, state in states.items()})
        for rank in range(world.size):
            theirs = broadcast_tree(self.backend, mine if rank == world.rank else None, rank)
            with self.backend.share_errors():
                if writer is not None:
                    writer.add(f"rank-{rank}", theirs)
            del theirs

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the parts that all ranks have alike, on the CPU, one by one. Not collective."""
        prepared, optimizer = self.prepared, self.prepared.optimizer
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
                "position": asdict(self.progress),
                "scaler": prepared.precision.scaler.state_dict(),
                "schedule": self.schedule.state_dict(),
                "seed": self.config.seed,
                "data": self.batches.state() if self.progress.sample else None,
            },
        )
        if states := self.callbacks.state_dict():
            yield "callbacks", states

    def _about(self, run_dir: RunDirectory) -> dict[str, Any]:
        """Return what the manifest says of the run. Not collective."""
        return {
            "task": self.config.task,
            "world_size": self.backend.world.size,
            "backend": self.backend.name,
            "global_batch": self.batches.global_micro_batch * self.config.accumulate,
            "versions": run_dir.run["versions"],
            "kept_steps": self.callbacks.kept_steps(),
        }

    # Loading

    def load(self, is_restart: bool) -> dict[str, Any]:
        """Load the checkpoint that `--resume` chooses on rank 0; after a restart the newest one of
        `--run-dir`, if there is one. Set later ones aside.

        Returns the trainer's part, with the states of callbacks; empty for a fresh start. Raises
        CheckpointError, on every rank, if it cannot be used.
        """
        backend, progress, run_dir = self.backend, self.progress, self.run_dir
        names, is_own, loaded = list[str](), False, dict[str, Any]()
        with backend.share_errors():
            if run_dir is not None:
                root = run_dir.checkpoints
                self.resumed_from = path = self._choose(root, is_restart)
                if path is not None:
                    names = checkpoint.part_names(path)
                    is_own = path.resolve().parent == root.resolve()
        names, is_own = backend.broadcast_object((names, is_own))

        def part(name: str) -> Any:
            return read_part(backend, self.resumed_from, name) if name in names else {}

        if names:
            loaded = {**part("trainer"), "callbacks": part("callbacks")}
            vars(progress).update(loaded["position"])
            self.console.print_line(f"resume   from {self.resumed_from}, step {progress.step}")
            prepared = self.prepared
            restore(part, prepared.model, prepared.optimizer, prepared.precision)
            if loaded["scaler"]:  # empty unless the checkpoint is of an fp16 run
                prepared.precision.scaler.load_state_dict(loaded["scaler"])
            self._load_rank_states(part, sum(name.startswith("rank-") for name in names))
        with backend.share_errors():
            if run_dir is not None:
                for old in checkpoint.set_aside(
                    run_dir.checkpoints, progress.step if loaded else -1
                ):
                    self.console.print_line(f"resume   set aside {old.name}")
        if is_own:
            self.saved = replace(progress)
        if progress.sample:
            self._continue_epoch(loaded)
        return loaded

    def _choose(self, root: Path, is_restart: bool) -> Path | None:
        """Return the checkpoint to resume from, and print which ones are skipped and why; None to
        start afresh. Raises CheckpointError if there must be one.
        """
        resume, print_line = self.config.resume, self.console.print_line
        is_path = resume not in ("none", "auto", "must")
        of_run = checkpoints_of(resume) if is_path else None
        is_own = resume in ("auto", "must") or (is_restart and self.config.run_dir)
        roots = [root] if is_own else []
        if of_run is not None:
            roots.append(of_run)
        skipped: dict[Path, str] = {}
        for root in roots:
            path, skipped = checkpoint.newest(root)
            for other, why in skipped.items():
                print_line(f"resume   skipped {other.name}: {why}")
            if path is not None:
                return path
        if is_path and of_run is None:
            return Path(resume)
        if is_path or resume == "must":
            raise CheckpointError(f"--resume {resume} found no valid checkpoint in {root}")
        if skipped:
            print_line(
                f"resume   WARNING: none of the {len(skipped)} checkpoints in {root} is valid; "
                "TRAINING STARTS AGAIN FROM STEP 0; give --resume must to get an error instead"
            )
        elif roots:
            print_line(f"resume   no checkpoint in {root}; starting afresh")
        return None

    def _continue_epoch(self, loaded: dict[str, Any]) -> None:
        """Continue in the middle of an epoch. The samples left of it may be too few for a step of
        this run: then it ends without one. Raises CheckpointError for another seed.
        """
        progress, seed = self.progress, self.config.seed
        before = loaded.get("seed", seed)
        if before != seed:
            raise CheckpointError(
                f"the checkpoint is in the middle of an epoch in the order of --seed {before}: "
                f"--seed {seed} would leave out some samples and repeat others; "
                f"give --seed {before}, or resume from a checkpoint at the end of an epoch",
                on_all_ranks=True,
            )
        with self.backend.share_errors():
            state = loaded.get("data") or []
            self.batches.load_state(state, progress.sample, self.console.print_line)
        self.batches.begin(self.backend, progress.epoch, progress.sample)

    def _load_rank_states(self, part: Callable[[str], Any], size: int) -> None:
        """Give each rank what it kept for itself, one rank after another. Print what another
        method, or another number of ranks, cannot use. `size`: the ranks in the checkpoint.
        """
        world, states = self.backend.world, self.prepared.rank_states
        mine: dict[str, Any] = {}
        for rank in range(size if size == world.size else 0):
            theirs = part(f"rank-{rank}")
            if rank == world.rank:
                mine = theirs
            del theirs
        for name, state in states.items():
            if name in mine:
                state.load_state_dict(mine[name])
            else:
                self.console.print_line(
                    f"resume   {name}: each rank starts without a state: the checkpoint has none "
                    f"for {world.size} ranks"
                )
        for name in mine.keys() - states.keys():
            self.console.print_line(f"resume   {name}: the checkpoint's state is not used")


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
    with of_this_run():
        model.load_state_dict({names.get(name, name): value for name, value in saved.items()})
    exact = part("masters")
    with precision.masters_in(optimizer) as masters:
        with of_this_run(), torch.no_grad():
            for name, p in model.named_parameters():
                if uncompiled(name) in exact:
                    p.copy_(exact[uncompiled(name)])
            for name, master in masters.items():
                master.copy_({**saved, **exact}[name])
        del saved, exact
        state = part("optimizer")
        with of_this_run():
            optimizer.load_state_dict(state)
