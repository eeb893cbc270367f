"""Arms with one fault each, as users write backends on torch.distributed, and a task."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.backends.c10d import C10d
from hvdtrain.tasks.convnet import ConvNet

PROVED = 12
"""Steps after which an arm of the tests has been proved correct."""


class Correct(C10d):
    """The mean over all ranks, one all-reduce for each parameter."""

    name: ClassVar[str] = "correct"
    steps = 0

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        self.steps += 1
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.reduce(p)

    def reduce(self, p: Tensor) -> None:
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad.div_(self.world.size)


class Drifts(Correct):
    """Adds something to the gradients, on all ranks alike, once it has been proved correct."""

    def reduce(self, p: Tensor) -> None:
        super().reduce(p)
        if self.steps > PROVED:
            p.grad.add_(1e-4)  # type: ignore[union-attr]


class Parts(Correct):
    """Leaves its ranks to themselves once it has been proved correct."""

    def reduce(self, p: Tensor) -> None:
        if self.steps <= PROVED:
            super().reduce(p)


class Raises(Correct):
    """Fails on rank 1 once it has been proved correct."""

    def reduce(self, p: Tensor) -> None:
        if self.steps == PROVED and self.world.rank == 1:
            raise RuntimeError("on purpose")
        super().reduce(p)


class Biased(ConvNet):
    """A bias before every BatchNorm, whose true gradient is zero: Adam steps on its rounding."""

    def __init__(self) -> None:
        super().__init__(image_size=8, samples=512)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 8), (8, 16)):
            convolution = nn.Conv2d(before, after, 3, padding=1)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, self.classes))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)
