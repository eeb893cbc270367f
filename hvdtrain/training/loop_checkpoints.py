"""The checkpoints of a loop of your own: `Checkpoints`.

Scripts use it, and `checkpointer` uses `read_part` and `of_this_run`. Rank 0 alone reads and
writes; what it has read is broadcast, so that all ranks load the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hvdtrain.backends.base import Backend
from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import CheckpointError, HvdtrainError, InputError, one_line
from hvdtrain.optim.model_sync import broadcast_tree, to_cpu
from hvdtrain.training import checkpoint


class Checkpoints:
    """The checkpoints of a loop of your own. Each is complete or does not exist, and has hashes.

        checkpoints = Checkpoints(backend, "runs/mine")
        first = checkpoints.load(model=model, optimizer=optimizer)
        for step in range(first, 1000):
            ...
            if (step + 1) % 100 == 0:
                checkpoints.save(step + 1, model=model, optimizer=optimizer)

    A part has `state_dict` and `load_state_dict`, which every rank calls; or it is a dict of
    numbers, texts and tensors, which `load` updates. Give the optimizer that `prepare` returned,
    and the model itself: a wrapper may change its names. What is saved is rank 0's; any number of
    ranks, on any backend, loads it. `keep`: how many are kept. Every method is collective,
    and an HvdtrainError of one rank is raised on all.
    """

    def __init__(self, backend: Backend, folder: Path | str, keep: int = 2) -> None:
        if keep < 1:
            raise InputError(f"keep is {keep}; keep one checkpoint or more")
        self._backend, self._folder, self._keep = backend, Path(folder), keep

    def save(self, step: int, /, **parts: Any) -> None:
        """Write the checkpoint of `step`, and replace one of the same step. Rename checkpoints of
        later steps, which another run has left, and remove old ones.

        Raises InputError for a negative step, and CheckpointError if it cannot be written, or could
        not be loaded again.
        """
        backend = self._backend
        if step < 0:
            raise InputError(f"step is {step}; give the number of steps taken, from 0 on")
        with backend.share_errors():
            states = {
                name: part if isinstance(part, dict) else part.state_dict()
                for name, part in parts.items()
            }
            if backend.world.rank == 0:
                self._set_aside(step)  # else the newest would stay, and this one would leave
                about = {"world_size": backend.world.size}
                checkpoint.save(self._folder, step, to_cpu(states), about)
                checkpoint.prune(self._folder, self._keep)

    def load(self, **parts: Any) -> int:
        """Load the newest valid checkpoint, and return its step; 0 if there is none.

        Renames newer, damaged checkpoints, and prints what is wrong with them. Call it only while
        no other script saves there. Raises CheckpointError if the checkpoint does not have these
        parts, or is from another model, and WorldMismatch if the ranks name different parts.
        """
        backend, path, step = self._backend, None, -1
        check_same(backend, {"the parts of a checkpoint": ", ".join(parts)})
        with backend.share_errors():
            if backend.world.rank == 0:
                checkpoint.remove_leftovers(self._folder)
                path, damaged = checkpoint.newest(self._folder)
                if path is not None:
                    step = checkpoint.step_of(path)
                for other, why in damaged.items():
                    backend.print(f"cannot use the checkpoint {other}: {why}")
                self._set_aside(step)
        step = backend.broadcast_object(step)
        if step < 0:
            return 0
        for name, part in parts.items():
            state = read_part(backend, path, name)
            with backend.share_errors(), of_this_run():
                load = part.update if isinstance(part, dict) else part.load_state_dict
                load(state)
        return step

    def _set_aside(self, step: int) -> None:
        """Rename the checkpoints after `step`, and print which. Not collective."""
        for path in checkpoint.set_aside(self._folder, step):
            self._backend.print(f"set aside {path}")


def read_part(backend: Backend, path: Path | None, name: str) -> Any:
    """Return one part of a checkpoint, on the CPU of every rank. Collective.

    Raises CheckpointError. `path`: None but on the rank that reads it, which is rank 0.
    """
    tree = None
    with backend.share_errors():
        if path is not None:
            tree = checkpoint.load(path, name)
    return broadcast_tree(backend, tree)


@contextmanager
def of_this_run() -> Iterator[None]:
    """Raise CheckpointError, as on all ranks, for what loading raises."""
    try:
        yield
    except (HvdtrainError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint is from another model or optimizer: {one_line(error)}",
            on_all_ranks=True,
        ) from None
