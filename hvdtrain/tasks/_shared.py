"""Code shared by the synthetic tasks: argument checks, optimizers, data splits, loss, metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvdtrain.errors import InputError

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, weight_decay=0.01),
}


_MOST = 10**9


def check_counts(**counts: object) -> None:
    """Raise InputError for an argument that is not a whole number from 1 to 10**9."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise InputError(f"{name}={value!r} must be a whole number greater than zero")
        if value > _MOST:
            raise InputError(f"{name}={value} must be at most {_MOST}")


def check_optimizer(name: str, lr: float) -> None:
    """Raise InputError for an unknown optimizer, and for a learning rate that is not above zero."""
    if name not in list(OPTIMIZERS):  # a list: `name` may be unhashable
        raise InputError(f"optimizer={name!r} is not one of: {', '.join(OPTIMIZERS)}")
    if not isinstance(lr, (int, float)) or not lr > 0:
        raise InputError(f"lr={lr!r} must be a number greater than zero")


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return SGD with momentum, or AdamW, by a name that `check_optimizer` accepts."""
    return OPTIMIZERS[name](model.parameters(), lr=lr)


def generator(seed: int = 0) -> torch.Generator:
    """Return a generator for the data alone: equal on every rank, independent of the run's seed."""
    return torch.Generator().manual_seed(seed)


def split(inputs: Tensor, targets: Tensor, num_train: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the first `num_train` samples to train on, and the others to evaluate."""
    return (
        TensorDataset(inputs[:num_train], targets[:num_train]),
        TensorDataset(inputs[num_train:], targets[num_train:]),
    )


def with_evaluation(num_train: int) -> int:
    """Return the number of samples to create: an eighth more than those to train on."""
    return num_train + max(1, num_train // 8)


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of scores whose last dimension is the class."""
    inputs, targets = batch
    return _cross_entropy(net(inputs), targets)


def metrics(net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return accuracy and loss."""
    inputs, targets = batch
    scores = net(inputs)
    right = (scores.argmax(-1) == targets).float().mean()
    return {"accuracy": right, "loss": _cross_entropy(scores, targets)}


def _cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())
