"""The checkpoints of one run: what is in them, when they are due, and what all ranks do.

The Trainer calls `load` once, after the backend has prepared the model, and then asks `should_save`
after each step. A checkpoint has parts by name; `checkpoint` says how their files are written:

    model, optimizer   plain state dicts, so that any backend at any world size loads them
    masters            the fp32 weights of a half model, if it has any
    trainer            progress, seed, loss scale, schedule, and each rank's place in a stream
    callbacks          the states of callbacks, by name
    rank-0, rank-1 ..  what each rank keeps for itself, by name, such as the errors of PowerSGD

Rank 0 alone reads and writes. What each rank keeps goes there, and back, one rank after another.
With `--checkpoint-async` a thread of rank 0 writes, and the ranks agree later that the files are
there. The thread calls no collective, and does not write run.json:

    all ranks   save                 synchronize, send          collective
    rank 0                           write each rank's own state, copy the rest, start the thread
    rank 0      raise_error          after each step            not collective
    all ranks   complete(wait=...)   at a logged step, before the next save, at the end; collective
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.backends.base import Backend
from hvdtrain.errors import CheckpointError, HvdtrainError, one_line
from hvdtrain.optim.model_sync import broadcast_state, broadcast_tree, to_cpu, uncompiled
from hvdtrain.system import provenance
from hvdtrain.system.trees import map_tree
from hvdtrain.training import checkpoint
from hvdtrain.training.callback_list import CallbackList
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.console import Console
from hvdtrain.training.data.order import EpochBatches
from hvdtrain.training.precision import Precision
from hvdtrain.training.prepared_model import PreparedModel
from hvdtrain.training.progress import Progress
from hvdtrain.training.run_dir import RunDirectory, checkpoints_of
from hvdtrain.training.schedule import RateSchedule
from hvdtrain.training.snapshot import Snapshot


class Checkpointer:
    """Loads and saves the parts of a run. Every method is collective, unless it says otherwise."""

    schedule: RateSchedule
    """Set after `load`: it is built from what that returns."""
    on_saved: Callable[[Path | None], None]
    """Called on all ranks once a checkpoint is complete, with its path on rank 0."""

    def __init__(
        self,
        backend: Backend,
        config: TrainConfig,
        prepared: PreparedModel,
        batches: EpochBatches,
        progress: Progress,
        callbacks: CallbackList,
        run_dir: RunDirectory | None,
        console: Console,
    ) -> None:
        """`run_dir`: None on the ranks that write none."""
        self._backend, self._config, self._console = backend, config, console
        self._prepared, self._batches, self._progress = prepared, batches, progress
        self._callbacks, self._run_dir = callbacks, run_dir
        self._every, self._epochs = config.checkpoint_interval()
        self._snapshot = Snapshot()
        self._versions = provenance.versions()
        self.resumed_from: Path | None = None
        """The checkpoint that the run continues from; on rank 0."""
        self.is_requested = False
        """Whether a checkpoint follows this step, as a callback or a signal asks for it."""
        self._begun: Progress | None = None
        """The progress of the newest checkpoint, which may still be being written. Not the step
        alone: an epoch may end without one.
        """
        self._is_writing = False
        self.saved_step = -1
        """The step of the newest checkpoint that is complete; -1 without one."""

    # Saving

    def should_save(self, step: int, ends_epoch: bool = False) -> bool:
        """Return whether a checkpoint follows a step, as it is requested or `--checkpoint-every`
        asks for it. `ends_epoch`: it is the last of an epoch, and the progress is at the start of
        the next one. Not collective.
        """
        of_epoch = ends_epoch and self._epochs > 0 and self._progress.epoch % self._epochs == 0
        return self.is_requested or of_epoch or (self._every > 0 and step % self._every == 0)

    @property
    def is_saved(self) -> bool:
        """Whether this progress has a checkpoint, or one that is being written."""
        return self._begun == self._progress

    def save(self) -> None:
        """Write a checkpoint, unless this progress has one; with `--checkpoint-async` copy its
        content, and begin to write. An error on rank 0 is raised on all ranks.
        """
        self.is_requested = False
        if self.is_saved:
            return
        self.complete()  # at most one is being written
        step, run_dir, is_async = self._progress.step, self._run_dir, self._config.checkpoint_async
        writer = None
        with self._backend.share_errors():
            if run_dir is not None:
                run_dir.check()
                writer = checkpoint.Writer(run_dir.checkpoints, step)
        try:
            self._write_rank_states(writer)
            data = None
            if self._batches.has_state and self._progress.sample:
                data = self._backend.all_gather_object(self._batches.state())
            with self._backend.share_errors():
                if run_dir is not None and writer is not None:
                    parts = self._collect(data)
                    if is_async:
                        parts = self._snapshot.take(parts)
                    about = self._about()
                    write = partial(_write, run_dir, writer, parts, about, self._config.keep)
                    if is_async:
                        writer = None  # the thread's, whatever happens here
                        run_dir.background.start(write)
                    else:
                        write()
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        self._begun, self._is_writing = replace(self._progress), True
        if not is_async:
            self.complete()

    def raise_error(self) -> None:
        """Raise what the thread has failed with, on rank 0, after any step: an error of one rank
        ends the job. Not collective.
        """
        if self._run_dir is not None:
            self._run_dir.background.raise_error()

    def complete(self, wait: bool = True) -> None:
        """Wait for the checkpoint that is being written, if there is one; unless `wait`, do nothing
        while it is. An error on rank 0 is raised on all ranks. Raises CheckpointError if writing
        takes longer than `--timeout`.
        """
        if not self._is_writing or self._begun is None:
            return
        step, run_dir, path = self._begun.step, self._run_dir, None
        if self._config.checkpoint_async and not wait:
            has_ended = run_dir is not None and not run_dir.background.is_running()
            if not self._backend.broadcast_object(has_ended):
                return
        with self._backend.share_errors():
            if run_dir is not None:
                self._wait(run_dir, step)
                run_dir.update(last_step=step)
                path = checkpoint.path_of(run_dir.checkpoints, step)
        self._is_writing, self.saved_step = False, step
        self.on_saved(path)

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

    def _write_rank_states(self, writer: checkpoint.Writer | None) -> None:
        """Write what each rank keeps for itself, one rank after another: no rank holds more than
        one other rank's. Also with `--checkpoint-async`.
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

    def _collect(self, data: list[Any] | None) -> dict[str, Any]:
        """Return the parts that all ranks have alike, on the CPU. Not collective."""
        prepared, optimizer = self._prepared, self._prepared.optimizer
        with prepared.precision.masters_in(optimizer) as masters:
            optimizer_state = to_cpu(optimizer.state_dict())
        model = to_cpu(prepared.model.state_dict())
        parts = {
            "model": {uncompiled(name): value for name, value in model.items()},
            "optimizer": optimizer_state,
            "trainer": {
                "position": asdict(self._progress),
                "scaler": prepared.precision.scaler.state_dict(),
                "schedule": self.schedule.state_dict(),
                "seed": self._config.seed,
                "data": data,
            },
            "masters": to_cpu(masters),
            "callbacks": self._callbacks.state_dict(),
        }
        return {name: part for name, part in parts.items() if part or name == "model"}

    def _about(self) -> dict[str, Any]:
        """Return what the manifest says of the run. Not collective."""
        about = {
            "task": self._config.task,
            "world_size": self._backend.world.size,
            "backend": self._backend.name,
            "global_batch": self._batches.global_micro_batch * self._config.accumulate,
            "versions": self._versions,
        }
        kept = self._callbacks.kept_steps()
        return {**about, "kept_steps": kept} if kept else about

    # Loading

    def load(self, is_restart: bool) -> dict[str, Any]:
        """Load the checkpoint that `--resume` chooses on rank 0, and broadcast it; after a restart
        the newest one of `--run-dir`, if there is one.

        Returns the trainer's part, with the states of callbacks; empty for a fresh start. Raises
        CheckpointError, on every rank, if it cannot be used.
        """
        loaded: dict[str, Any] = {}
        backend, prepared, progress = self._backend, self._prepared, self._progress
        with backend.share_errors():
            if self._run_dir is not None:
                loaded = self._read(self._run_dir, is_restart and bool(self._config.run_dir))
        states = loaded.pop("callbacks", {})
        loaded = backend.broadcast_object(loaded)
        if not loaded:
            return loaded
        loaded["callbacks"] = broadcast_tree(backend, states)
        with prepared.precision.masters_in(prepared.optimizer) as masters:
            broadcast_state(backend, prepared.model, prepared.optimizer)
            for master in masters.values():
                master.copy_(backend.broadcast_(master.contiguous()))
        if loaded["scaler"]:  # empty unless the checkpoint is of an fp16 run
            prepared.precision.scaler.load_state_dict(loaded["scaler"])
        self._load_rank_states()
        progress.move_to(**loaded["position"])
        if loaded["is_own"]:
            self._begun, self.saved_step = replace(progress), progress.step
        if progress.sample:
            self._continue_epoch(loaded)
        return loaded

    def _read(self, run_dir: RunDirectory, is_restart: bool) -> dict[str, Any]:
        """Load model and optimizer, and set later checkpoints aside; return the trainer's part."""
        root, resume = run_dir.checkpoints, self._config.resume
        if resume == "none" and is_restart:
            resume = "auto"
        if resume == "none":
            return {}
        self.resumed_from = path = self._choose(root, resume, is_restart)
        prepared, loaded, step = self._prepared, dict[str, Any](), -1
        if path is not None:
            loaded = restore(path, prepared.model, prepared.optimizer, prepared.precision)
            step = loaded["position"]["step"]
            loaded["is_own"] = root.exists() and path.resolve().parent == root.resolve()
        for old in checkpoint.set_aside(root, step):
            self._console.print_line(f"resume   set aside {old.name}")
        if path is not None:
            self._console.print_line(f"resume   from {path}, step {step}")
        return loaded

    def _choose(self, root: Path, resume: str, is_restart: bool) -> Path | None:
        """Return the checkpoint to resume from, and print which ones are skipped and why. Raises
        CheckpointError for `--resume must` without one.
        """
        given = None if resume in ("auto", "must") else Path(resume)
        if given is not None and not is_restart:
            of_run = checkpoints_of(resume)
            if of_run is None:
                return given
            root, given, resume = of_run, None, "must"
        path, skipped = checkpoint.newest(root)
        print_line = self._console.print_line
        for item in skipped:
            print_line(f"resume   skipped {item.path.name}: {item.reason}")
        if path is not None or given is not None:
            return path or given
        if resume == "must":
            raise CheckpointError(
                f"--resume {self._config.resume} found no valid checkpoint in {root}"
            )
        if skipped:
            print_line(
                f"resume   WARNING: none of the {len(skipped)} checkpoints in {root} is valid; "
                "TRAINING STARTS AGAIN FROM STEP 0; --resume must ends with an error instead"
            )
        else:
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
        backend, states, path = self._backend, self._prepared.rank_states, self.resumed_from
        size, names = 0, set[str]()
        with backend.share_errors():
            if path is not None:
                size = sum(name.startswith("rank-") for name in checkpoint.part_names(path))
                names = {*checkpoint.load(path, "rank-0", mapped=True)} if size else names
        size, names = backend.broadcast_object((size, names))
        mine: dict[str, Any] = {}
        if states and size == backend.world.size:
            for rank in range(size):
                theirs: dict[str, Any] = {}
                with backend.share_errors():
                    if path is not None:
                        theirs = checkpoint.load(path, f"rank-{rank}", mapped=True)
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


def restore(
    path: Path, model: nn.Module, optimizer: Optimizer, precision: Precision
) -> dict[str, Any]:
    """Load model, optimizer and fp32 masters, in place; return the trainer's part, with the states
    of callbacks. Not collective; one part of the checkpoint is in memory at a time.

    A run without masters takes those of the checkpoint as its weights; a run with masters takes the
    weights of a checkpoint that has none. Raises CheckpointError if it is of another model or
    optimizer, or cannot be read.
    """
    parts = checkpoint.part_names(path)
    loaded: dict[str, Any] = checkpoint.load(path, "trainer")
    loaded["callbacks"] = checkpoint.load(path, "callbacks") if "callbacks" in parts else {}
    try:
        # The model may be compiled.
        names = {uncompiled(name): name for name in model.state_dict()}
        saved = {uncompiled(k): v for k, v in checkpoint.load(path, "model").items()}
        model.load_state_dict({names.get(k, k): v for k, v in saved.items()})
        exact = checkpoint.load(path, "masters") if "masters" in parts else {}
        with precision.masters_in(optimizer) as masters, torch.no_grad():
            for name, p in model.named_parameters():
                if uncompiled(name) in exact:
                    p.copy_(exact[uncompiled(name)])
            for name, master in masters.items():
                master.copy_({**saved, **exact}[name])
            optimizer.load_state_dict(checkpoint.load(path, "optimizer"))
    except HvdtrainError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is of another model or optimizer: {one_line(error)}"
        ) from None
    return loaded


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
