"""The state of a run in its checkpoints: what rank 0 saves and restores. Used by the Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.errors import CheckpointError, HvdtrainError, one_line
from hvdtrain.optim.model_sync import to_cpu, uncompiled
from hvdtrain.training import checkpoint, run_dir
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.precision import Precision


@dataclass
class Progress:
    """The progress of a run: optimizer steps done, epochs done, and samples that all ranks have
    used in this epoch.
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0

    @property
    def epoch_number(self) -> int:
        """The epoch of the last step, counted from 1."""
        return self.epoch + (1 if self.sample else 0)

    def move_to(self, step: int, epoch: int, sample: int) -> None:
        """Continue from a position of another run."""
        self.step, self.epoch, self.sample = step, epoch, sample

    def is_complete(self, config: TrainConfig) -> bool:
        """Return whether all epochs, or the steps of `--max-steps`, are done."""
        maximum = config.max_steps
        return self.epoch >= config.max_epochs() or (maximum is not None and self.step >= maximum)

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.sample = self.epoch + 1, 0


def collect(
    model: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    schedule: dict[str, Any] | None,
    progress: Progress,
    seed: int,
) -> dict[str, Any]:
    """Return the parts of a checkpoint, on the CPU. `schedule`: its state."""
    with precision.masters_in(optimizer) as masters:
        optimizer_state = to_cpu(optimizer.state_dict())
    trainer = {
        "position": asdict(progress),
        "scaler": precision.scaler.state_dict(),
        "masters": bool(masters),
        "schedule": schedule,
        "seed": seed,
    }
    parts = {
        "model": {uncompiled(name): v for name, v in to_cpu(model.state_dict()).items()},
        "optimizer": optimizer_state,
        "trainer": trainer,
    }
    return {**parts, "masters": to_cpu(masters)} if masters else parts


def restore(
    source: Path | Mapping[str, Any], model: nn.Module, optimizer: Optimizer, precision: Precision
) -> dict[str, Any]:
    """Load model, optimizer and fp32 masters, in place; return the trainer's part.

    `source` is the path of a checkpoint, of which one part is in memory at a time, or its parts.
    The entry "callbacks" of what is returned has the states of the callbacks, by name. A run
    without masters takes those of the checkpoint as its weights; a run with masters takes the
    weights of a checkpoint that has none.

    Raises CheckpointError if it is of another model or optimizer, or cannot be read.
    """
    path, parts = (source, {}) if isinstance(source, Path) else (None, source)

    def read(name: str) -> Any:
        # A copy of a part in memory: an optimizer takes the tensors themselves as its state.
        return checkpoint.load(path, name) if path else copy.deepcopy(parts[name])

    def has(name: str) -> bool:
        return (path / f"{name}.pt").exists() if path else name in parts

    trainer: dict[str, Any] = read("trainer")
    trainer["callbacks"] = read("callbacks") if has("callbacks") else {}
    try:
        # The model may be compiled, and an old checkpoint may have the names of a compiled one.
        names = {uncompiled(name): name for name in model.state_dict()}
        saved = {uncompiled(k): v for k, v in read("model").items()}
        model.load_state_dict({names.get(k, k): v for k, v in saved.items()})
        exact = read("masters") if trainer.get("masters") else {}
        with precision.masters_in(optimizer) as masters, torch.no_grad():
            for name, p in model.named_parameters():
                if uncompiled(name) in exact:
                    p.copy_(exact[uncompiled(name)])
            for name, master in masters.items():
                master.copy_({**saved, **exact}[name])
            optimizer.load_state_dict(read("optimizer"))
    except HvdtrainError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path or 'the commit'} is of another model or optimizer: {one_line(error)}"
        ) from None
    return trainer


def rank_part(rank: int) -> str:
    """Return the name of the part of a checkpoint that is what a rank kept for itself."""
    return f"rank-{rank}"


class RankStates:
    """What each rank kept for itself, in a checkpoint: states by name, such as `PowerSGD`."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, as the methods do."""
        self._path, names = path, checkpoint.part_names(path)
        self._in_one_part = "ranks" in names  # a list in ranks.pt, as versions before 0.2 write it
        self.size = sum(name.startswith("rank-") for name in names)
        """The ranks whose states there are; 0 if they kept none."""
        if self._in_one_part:
            self.size = len(checkpoint.load(path, "ranks", mapped=True))
        self.names: set[str] = set(self.load(0)) if self.size else set()

    def load(self, rank: int) -> dict[str, Any]:
        """Return the states of a rank; their tensors are read from the file as they are used."""
        if self._in_one_part:
            states: dict[str, Any] = checkpoint.load(self._path, "ranks", mapped=True)[rank]
        else:
            states = checkpoint.load(self._path, rank_part(rank), mapped=True)
        return states


def _checkpoints_of(resume: str) -> Path | None:
    """Return the folder of the checkpoints, if `resume` is a run directory, or its run.json."""
    path = run_dir.locate(Path(resume))
    return path / "checkpoints" if (path / "run.json").exists() else None


def check(resume: str) -> None:
    """Raise CheckpointError if `resume` is a path without a checkpoint that could be used."""
    if resume in ("none", "auto", "must"):
        return
    root = _checkpoints_of(resume)
    if root is None:
        why = checkpoint.problem(Path(resume))
    else:
        why = None if checkpoint.list_checkpoints(root) else "the run has no checkpoint"
    if why is not None:
        raise CheckpointError(f"cannot resume from {resume}: {why}")


def choose(root: Path, resume: str, print_line: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume from: for "auto" and "must" the newest valid one under
    `root`, and for a run directory that of its own; else the path `resume`.

    Print which ones are skipped and why. If there is none, return None for "auto", and else raise
    CheckpointError.
    """
    if resume not in ("auto", "must"):
        of_run = _checkpoints_of(resume)
        if of_run is None:
            return Path(resume)
        root = of_run
    path, skipped = checkpoint.newest(root)
    for item in skipped:
        print_line(f"resume   skipped {item.path.name}: {item.reason}")
    if path is not None:
        return path
    if resume != "auto":
        raise CheckpointError(f"--resume {resume} found no valid checkpoint in {root}")
    if skipped:
        print_line(
            f"resume   WARNING: none of the {len(skipped)} checkpoints in {root} is valid; "
            "TRAINING STARTS AGAIN FROM STEP 0; --resume must ends with an error instead"
        )
    else:
        print_line(f"resume   no checkpoint in {root}; starting afresh")
    return None
