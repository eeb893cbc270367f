"""A small residual network on synthetic images: much arithmetic for each byte of gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain.errors import InputError
from hvdtrain.tasks import _shared
from hvdtrain.training.task import Task


class ConvNet(Task):
    """A small ResNet with BatchNorm.

    It has `stages` of `blocks` residual blocks. The first stage has `width` channels; each later
    one has twice the channels and half the image size of the one before.

    The defaults have 78,042 parameters, 0.3 MB of gradients (4 bytes each), on 32 x 32 images.
    """

    about_data = "synthetic: a pattern for each class under noise, drawn from a seed"

    def __init__(
        self,
        width: int = 16,
        stages: int = 3,
        blocks: int = 1,
        image_size: int = 32,
        classes: int = 10,
        samples: int = 2048,
        lr: float = 0.05,
        optimizer: str = "sgd",
    ) -> None:
        _shared.check_counts(width=width, stages=stages, blocks=blocks, image_size=image_size)
        _shared.check_counts(classes=classes, samples=samples)
        _shared.check_optimizer(optimizer, lr)
        if image_size < 2**stages:
            raise InputError(
                f"image_size={image_size} is too small for stages={stages}, which want {2**stages}"
            )
        self.width = width
        self.stages = stages
        self.blocks = blocks
        self.image_size = image_size
        self.classes = classes
        self.samples = samples
        self.lr = lr
        self.optimizer_name = optimizer

    def model(self) -> nn.Module:
        """Return a convolution, the stages, the mean over the image, and one linear layer."""
        layers: list[nn.Module] = [_convolution(3, self.width), nn.ReLU()]
        channels = self.width
        for stage in range(self.stages):
            for block in range(self.blocks):
                wider = stage > 0 and block == 0
                layers.append(_Block(channels, channels * 2 if wider else channels))
                channels = channels * 2 if wider else channels
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.classes)]
        return nn.Sequential(*layers, *head)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum, or AdamW."""
        return _shared.make_optimizer(self.optimizer_name, model, self.lr)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Return images of a coarse pattern for each class, with noise.

        There are `samples` to train on, and an eighth of that to evaluate.
        """
        generator = _shared.generator()
        num, size = _shared.with_evaluation(self.samples), self.image_size
        coarse = torch.randn(self.classes, 3, 4, 4, generator=generator)
        patterns = F.interpolate(coarse, size=(size, size))
        labels = torch.randint(self.classes, (num,), generator=generator)
        images = torch.randn(num, 3, size, size, generator=generator).add_(patterns[labels])
        return _shared.split(images, labels, self.samples)

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross entropy."""
        return _shared.loss(net, batch)

    def metrics(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return accuracy and loss."""
        return _shared.metrics(net, batch)


class _Block(nn.Module):
    """Two convolutions beside a shortcut; if it doubles the channels, it halves the image size."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first = _convolution(before, after, stride=stride)
        self.second = _convolution(after, after)
        self.shortcut: nn.Module = nn.Identity()
        if before != after:
            self.shortcut = _convolution(before, after, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


def _convolution(before: int, after: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    # No bias: BatchNorm subtracts the mean.
    convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))
