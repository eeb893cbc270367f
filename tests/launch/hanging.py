"""A task in which rank 1 keeps rank 0 waiting: see test_hangs.py."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from hvdtrain import Task, detect


def read() -> None:
    time.sleep(600)


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
