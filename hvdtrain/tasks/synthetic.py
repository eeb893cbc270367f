"""The base classes of the built-in tasks: argument checks, optimizer, data split, loss.

All of them classify; `Digits` is the one on real data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain.errors import InputError
from hvdtrain.training.task import Task

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, weight_decay=0.01),
}

_MAX = 10**9


def check_counts(**counts: object) -> None:
    """Raise InputError for an argument that is not a whole number from 1 to 10**9."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise InputError(f"{name}={value!r} must be a whole number greater than zero")
        if value > _MAX:
            raise InputError(f"{name}={value} must be at most {_MAX}")


class Classifier(Task):
    """A task whose targets are classes. The constructor of a subclass sets `lr`."""

    lr: float
    optimizer_name: str
    """One of `OPTIMIZERS`."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum, or AdamW."""
        return OPTIMIZERS[self.optimizer_name](model.parameters(), lr=self.lr)

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross entropy of logits whose last dimension is the class."""
        inputs, targets = batch
        return _cross_entropy(net(inputs), targets)

    def metrics(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return accuracy and loss."""
        inputs, targets = batch
        logits = net(inputs)
        correct = (logits.argmax(-1) == targets).float().mean()
        return {"accuracy": correct, "loss": _cross_entropy(logits, targets)}


class SyntheticTask(Classifier):
    """A classifier of made-up data. The constructor checks the arguments that subclasses share.

    `samples` training samples, and an eighth as many for evaluation. `counts`: the sizes of the
    model and of the data, which must be whole numbers above zero.
    """

    def __init__(self, samples: int, lr: float, optimizer: str, **counts: int) -> None:
        check_counts(samples=samples, **counts)
        if optimizer not in list(OPTIMIZERS):  # a list: `optimizer` may be unhashable
            raise InputError(f"optimizer={optimizer!r} is not one of: {', '.join(OPTIMIZERS)}")
        if not isinstance(lr, (int, float)) or not lr > 0:
            raise InputError(f"lr={lr!r} must be a number greater than zero")
        self.samples = samples
        self.lr = lr
        self.optimizer_name = optimizer

    @abstractmethod
    def draw(self, num: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of `num` samples, with random numbers of `rng` alone."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Return `samples` samples to train on, and an eighth of that to evaluate."""
        n = self.samples
        # Not of the run's seed: the data are equal on every rank and in every run.
        inputs, targets = self.draw(n + max(1, n // 8), torch.Generator().manual_seed(0))
        return TensorDataset(inputs[:n], targets[:n]), TensorDataset(inputs[n:], targets[n:])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
