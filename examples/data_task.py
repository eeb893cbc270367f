"""Data read line by line from a file, a part on each rank; and a task with its own sampler.

torchrun --nproc-per-node 2 -m hvdtrain --task examples/data_task.py:Lines --uneven join --epochs 2
torchrun --nproc-per-node 2 -m hvdtrain --task examples/data_task.py:Balanced --epochs 2
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from hvdtrain import Task, shard_bounds

ROWS = 1001
FOLDER = tempfile.TemporaryDirectory()  # a real file would be there already


def table() -> Tensor:
    """Return a synthetic table: three inputs, and whether their sum is above 1 (rare)."""
    inputs = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return torch.cat([inputs, (inputs.sum(1, keepdim=True) > 1).float()], dim=1)


class FileLines(IterableDataset[Tensor]):
    """The lines `start` to `end` of a text file with numbers."""

    def __init__(self, path: Path, start: int = 0, end: int = ROWS) -> None:
        self.path, self.start, self.end = path, start, end

    def rank_shard(self, rank: int, size: int) -> FileLines:
        # Called once. Each rank then reads its own lines: 501 and 500 at two ranks.
        return FileLines(self.path, *shard_bounds(ROWS, rank, size))

    def __iter__(self) -> Iterator[Tensor]:
        with self.path.open() as file:
            for line in islice(file, self.start, self.end):
                yield torch.tensor([float(number) for number in line.split()])


class Lines(Task):
    about_data = "1,001 synthetic lines of a text file"

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        path = Path(FOLDER.name) / "table.txt"
        path.write_text("".join(" ".join(map(str, row)) + "\n" for row in table().tolist()))
        return FileLines(path), TensorDataset(table())

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        rows = batch if isinstance(batch, Tensor) else batch[0]
        return nn.functional.binary_cross_entropy_with_logits(net(rows[:, :3]), rows[:, 3:])


class Balanced(Lines):
    """Draws both classes equally often, with replacement."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        return TensorDataset(table()), TensorDataset(table())

    def sampler(self, dataset: Dataset[Any], seed: int) -> WeightedRandomSampler:
        classes = table()[:, 3].long()
        weights = 1.0 / classes.bincount()[classes]
        # Called at the start of every epoch. The ranks divide what it draws.
        return WeightedRandomSampler(weights.tolist(), ROWS)
