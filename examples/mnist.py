"""The ConvNet of everyone's MNIST tutorial, on torchvision's MNIST: about 99 % after 14 epochs.

    pip install torchvision        # the one that belongs to your torch
    torchrun --nproc-per-node 2 -m hvdtrain --task examples/mnist.py:MNIST --set download=True \\
        --epochs 14 --batch-size 32

`download` works on every rank, and for several jobs at once: a lock lets one process of a host (of
all hosts, where `data` is on a shared file system with locks) download, while the others wait.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from hvdtrain import Task
from hvdtrain.errors import InputError


class MNIST(Task):
    """Adadelta, whose rate falls by `gamma` after each epoch."""

    about_data = "real: 28x28 images of handwritten digits (MNIST), from torchvision"

    def __init__(
        self,
        data: str = "data",
        download: bool = False,
        lr: float = 1.0,
        gamma: float = 0.7,
    ) -> None:
        _import_datasets()  # at once, before anything is made
        self.data = Path(data)
        self.download = download
        self.lr = lr
        self.gamma = gamma

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(),
            nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adadelta(model.parameters(), lr=self.lr)

    def schedule(
        self, optimizer: torch.optim.Optimizer, steps_per_epoch: int, total_steps: int
    ) -> StepLR:
        return StepLR(optimizer, steps_per_epoch, self.gamma)

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        datasets = _import_datasets()
        try:
            with _alone(self.data) if self.download else nullcontext():
                train = datasets.MNIST(self.data, train=True, download=self.download)
                test = datasets.MNIST(self.data, train=False)
        except (RuntimeError, OSError) as error:  # torchvision's own words for a missing file
            said = " ".join(str(error).split())
            raise InputError(
                f"no MNIST in {self.data} ({said}); give the folder that holds MNIST/raw with "
                f"--set data=PATH, or download it with --set download=True"
            ) from None
        return as_tensors(train), as_tensors(test)

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(net(images), labels)

    def metrics(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        scores = net(images)
        right = (scores.argmax(1) == labels).float().mean()
        return {"accuracy": right, "loss": F.cross_entropy(scores, labels)}


def as_tensors(mnist: Any) -> TensorDataset:
    """All images at once, normalised: much faster than one PIL image after the other."""
    images = (mnist.data.unsqueeze(1).float() / 255 - 0.1307) / 0.3081
    return TensorDataset(images, mnist.targets)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given up when the file is closed
        yield


def _import_datasets() -> Any:
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        raise InputError(
            f"this task needs the torchvision that belongs to torch {torch.__version__} ({error}); "
            f"install it with: pip install torchvision"
        ) from None
    return datasets
