"""A multi-layer perceptron on synthetic data: `width` and `depth` set the size of its gradients."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from hvdtrain.tasks.synthetic import SyntheticTask


class MLP(SyntheticTask):
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
        super().__init__(
            samples, lr, optimizer, width=width, depth=depth, features=features, classes=classes
        )
        self.width = width
        self.depth = depth
        self.features = features
        self.classes = classes

    def model(self) -> nn.Module:
        """Return linear layers with ReLU between them."""
        widths = [self.features] + [self.width] * self.depth
        layers: list[nn.Module] = []
        for sizes in pairwise(widths):
            layers += [nn.Linear(*sizes), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.classes))

    def draw(self, num: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return points of a cloud for each class."""
        centers = torch.randn(self.classes, self.features, generator=rng)
        labels = torch.randint(self.classes, (num,), generator=rng)
        return centers[labels] + torch.randn(num, self.features, generator=rng), labels
