"""The state of a run in its checkpoints: what rank 0 saves and restores. Used by the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.errors import CheckpointError, HvdtrainError, one_line
from hvdtrain.optim.model_sync import to_cpu, uncompiled
from hvdtrain.training import checkpoint
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
    path: Path, model: nn.Module, optimizer: Optimizer, precision: Precision
) -> dict[str, Any]:
    """Load model, optimizer and fp32 masters, in place; return the trainer's part.

    One part of the checkpoint `path` is in memory at a time. The entry "callbacks" of what is
    returned has the states of the callbacks, by name. A run without masters takes those of the
    checkpoint as its weights; a run with masters takes the weights of a checkpoint that has none.

    Raises CheckpointError if it is of another model or optimizer, or cannot be read.
    """
    trainer: dict[str, Any] = checkpoint.load(path, "trainer")
    has_callbacks = (path / "callbacks.pt").exists()
    trainer["callbacks"] = checkpoint.load(path, "callbacks") if has_callbacks else {}
    try:
        # The model may be compiled, and an old checkpoint may have the names of a compiled one.
        names = {uncompiled(name): name for name in model.state_dict()}
        saved = {uncompiled(k): v for k, v in checkpoint.load(path, "model").items()}
        model.load_state_dict({names.get(k, k): v for k, v in saved.items()})
        exact = checkpoint.load(path, "masters") if trainer.get("masters") else {}
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
    return trainer


def rank_part(rank: int) -> str:
    """Return the name of the part of a checkpoint that is what a rank kept for itself."""
    return f"rank-{rank}"


class RankStates:
    """What each rank kept for itself, in a checkpoint: states by name, such as `PowerSGD`."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, as the methods do."""
        self._path, names = path, checkpoint.part_names(path)
        self.size = sum(name.startswith("rank-") for name in names)
        """The ranks whose states there are; 0 if they kept none."""
        self.names: set[str] = set(self.load(0)) if self.size else set()

    def load(self, rank: int) -> dict[str, Any]:
        """Return the states of a rank; their tensors are read from the file as they are used."""
        states: dict[str, Any] = checkpoint.load(self._path, rank_part(rank), mapped=True)
        return states


def check(resume: str) -> None:
    """Raise CheckpointError if `resume` is the path of a checkpoint that is not valid."""
    if resume not in ("none", "auto", "must"):
        why = checkpoint.problem(Path(resume))
        if why is not None:
            raise CheckpointError(f"cannot resume from {resume}: {why}")


def choose(
    root: Path, resume: str, print_line: Callable[[str], None], is_restart: bool = False
) -> Path | None:
    """Return the checkpoint to resume from: for "auto" and "must" the newest valid one under
    `root`, else the path `resume`; after a restart the newest one, if there is one, in its place.

    Print which ones are skipped and why. Return None if there is none; for "must", raise
    CheckpointError.
    """
    given = None if resume in ("auto", "must") else Path(resume)
    if given is not None and not is_restart:
        return given
    path, skipped = checkpoint.newest(root)
    for item in skipped:
        print_line(f"resume   skipped {item.path.name}: {item.reason}")
    if path is not None or given is not None:
        return path or given
    if resume == "must":
        raise CheckpointError(f"--resume must found no valid checkpoint in {root}")
    if skipped:
        print_line(
            f"resume   WARNING: none of the {len(skipped)} checkpoints in {root} is valid; "
            "TRAINING STARTS AGAIN FROM STEP 0; --resume must ends with an error instead"
        )
    else:
        print_line(f"resume   no checkpoint in {root}; starting afresh")
    return None
