"""A small residual network on synthetic images: much arithmetic for each byte of gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.errors import InputError
from hvdtrain.tasks.synthetic import SyntheticTask


class ConvNet(SyntheticTask):
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
        super().__init__(
            samples, lr, optimizer,
            image_size=image_size, width=width, stages=stages, blocks=blocks, classes=classes,
        )  # fmt: skip
        if image_size < 2**stages:
            raise InputError(
                f"image_size={image_size} is too small for stages={stages}, which need {2**stages}"
            )
        self.width = width
        self.stages = stages
        self.blocks = blocks
        self.image_size = image_size
        self.classes = classes

    def model(self) -> nn.Module:
        """Return a convolution, the stages, global average pooling, and one linear layer."""
        channels = [
            self.width * 2**stage for stage in range(self.stages) for _ in range(self.blocks)
        ]
        return nn.Sequential(
            _convolution(3, self.width), nn.ReLU(),
            *map(_Block, [self.width, *channels], channels),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], self.classes),
        )  # fmt: skip

    def draw(self, num: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images of a coarse pattern for each class, with noise."""
        size = self.image_size
        coarse = torch.randn(self.classes, 3, 4, 4, generator=rng)
        patterns = F.interpolate(coarse, size=(size, size))
        labels = torch.randint(self.classes, (num,), generator=rng)
        images = torch.randn(num, 3, size, size, generator=rng).add_(patterns[labels])
        return images, labels


class _Block(nn.Module):
    """Two convolutions beside a shortcut; if it doubles the channels, it halves the image size."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        stride = 1 if in_channels == out_channels else 2
        self.first = _convolution(in_channels, out_channels, stride=stride)
        self.second = _convolution(out_channels, out_channels)
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else _convolution(in_channels, out_channels, kernel=1, stride=stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


def _convolution(
    in_channels: int, out_channels: int, kernel: int = 3, stride: int = 1
) -> nn.Sequential:
    # No bias: BatchNorm subtracts the mean.
    convolution = nn.Conv2d(
        in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))
