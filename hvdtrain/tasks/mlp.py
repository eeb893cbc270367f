"""A multi-layer perceptron on synthetic data: `width` and `depth` set the size of its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain.tasks import _shared
from hvdtrain.training.task import Task


class MLP(Task):
    """`depth` hidden layers of `width`, with P parameters:

    P = (features + 1) * width + (depth - 1) * (width + 1) * width + (width + 1) * classes

    A step averages 4 * P bytes of gradients (fp32) and computes about 6 * P FLOPs for every sample
    of the micro-batch: `width` and `depth` choose the bytes, and `--batch-size` b then chooses the
    bytes per FLOP, 2 / (3 * b). The defaults have 3.2 million parameters, 12.9 MB of gradients.
    """

    about_data = "synthetic: a cloud of points for each class, drawn from a seed"

    def __init__(
        self,
        width: int = 1024,
        depth: int = 4,
        features: int = 64,
        classes: int = 10,
        samples: int = 4096,
        lr: float = 0.05,
        optimizer: str = "sgd",
    ) -> None:
        _shared.check_counts(
            width=width, depth=depth, features=features, classes=classes, samples=samples
        )
        _shared.check_optimizer(optimizer, lr)
        self.width = width
        self.depth = depth
        self.features = features
        self.classes = classes
        self.samples = samples
        self.lr = lr
        self.optimizer_name = optimizer

    def model(self) -> nn.Module:
        """Return linear layers with ReLU between them."""
        widths = [self.features] + [self.width] * self.depth
        layers: list[nn.Module] = []
        for before, after in zip(widths[:-1], widths[1:], strict=True):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.classes))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum, or AdamW."""
        return _shared.make_optimizer(self.optimizer_name, model, self.lr)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Return a cloud of points for each class: `samples` to train on, an eighth to evaluate."""
        generator = _shared.generator()
        num = _shared.with_evaluation(self.samples)
        centers = torch.randn(self.classes, self.features, generator=generator)
        labels = torch.randint(self.classes, (num,), generator=generator)
        points = centers[labels] + torch.randn(num, self.features, generator=generator)
        return _shared.split(points, labels, self.samples)

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross entropy."""
        return _shared.loss(net, batch)

    def metrics(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return accuracy and loss."""
        return _shared.metrics(net, batch)
