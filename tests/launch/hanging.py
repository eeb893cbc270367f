"""A loop of one's own, and a task, in which rank 1 keeps rank 0 waiting: see test_hangs.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from hvdtrain import Backend, BackendOptions, Task, detect, open_backend

LONG_S = 60


def read() -> None:
    time.sleep(LONG_S)


def main() -> None:
    """Hang in step 5 on rank 1; with "link", run until the network does."""
    backend_name, transport, how, mark = sys.argv[1:]
    timeout_s = 15 if how == "link" else 3  # names of hosts are looked up for seconds there
    options = BackendOptions(transport=transport, timeout_s=timeout_s)
    with open_backend(backend_name, options=options) as backend:
        for step in range(1, 1_000_000):
            backend.progress.step = step
            if step == 5:
                hang(backend, how, mark)
            backend.all_reduce(torch.ones(3))


def hang(backend: Backend, how: str, mark: str) -> None:
    if how == "link":
        time.sleep(2)  # for heartbeats that say so
        Path(mark).touch()
    elif backend.world.rank == 1 and how == "other":
        backend.broadcast_(torch.ones(70))
    elif backend.world.rank == 1 and how == "stop":
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif backend.world.rank == 1:
        read()


class Stalled(Task):
    """Rank 1's data stall in the fifth step."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01)

    def datasets(self) -> tuple[Dataset[Any], None]:
        return Samples(), None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = net(batch).sum()
        return loss


class Samples(Dataset[Tensor]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        if self.read == 4 * 8 + 1 and detect().rank == 1:
            read()
        return torch.zeros(2)


if __name__ == "__main__":
    main()
