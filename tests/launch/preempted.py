"""A task that tells each rank's process, for test_preemption.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hvdtrain import detect
from hvdtrain.backends.c10d import C10d
from hvdtrain.tasks.mlp import MLP
from hvdtrain.training.run_dir import RunDirectory


class Told(MLP):
    """Writes the process id of each rank at its third step.

    `fails_at`: that step raises on each rank. `terminated_in`: rank 0 receives SIGTERM as it begins
    to record the end of the run in run.json (`record`), or to close the backend (`close`).
    """

    def __init__(self, folder: str, fails_at: int = 0, terminated_in: str = "") -> None:
        super().__init__(width=2, depth=1, features=2, samples=1 << 20)
        self.folder, self.fails_at, self.steps = folder, fails_at, 0
        if terminated_in and detect().rank == 0:
            if terminated_in == "record":
                terminate_in(RunDirectory, "finish")
            else:
                terminate_in(C10d, "close")

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        rank = detect().rank
        if self.steps == 3:
            fresh = Path(self.folder, f"fresh-{rank}")
            fresh.write_text(str(os.getpid()))
            fresh.rename(Path(self.folder, f"rank-{rank}"))
        if self.steps == self.fails_at:
            raise ArithmeticError("as asked")
        time.sleep(0.005)
        return super().loss(net, batch)


def terminate_in(owner: type, name: str) -> None:
    """Let a method send SIGTERM to this process before it does its work."""
    method = getattr(owner, name)

    def terminated(*args: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return method(*args, **more)

    setattr(owner, name, terminated)
