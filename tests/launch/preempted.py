"""A task that tells each rank's process, for test_preemption.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Task, detect


class Told(Task):
    """Writes the process id of each rank at its third step. `hangs`: that rank then hangs."""

    def __init__(self, folder: str, hangs: int = -1) -> None:
        self.folder, self.hangs, self.steps = folder, hangs, 0

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01)

    def datasets(self) -> tuple[Dataset[Any], None]:
        return TensorDataset(torch.zeros(1 << 20, 2)), None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        rank = detect().rank
        if self.steps == 3:
            fresh = Path(self.folder, f"fresh-{rank}")
            fresh.write_text(str(os.getpid()))
            fresh.rename(Path(self.folder, f"rank-{rank}"))
        if self.steps == 4 and rank == self.hangs:
            time.sleep(600)
        time.sleep(0.005)
        loss: Tensor = net(batch[0]).sum()
        return loss
