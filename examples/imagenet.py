"""ResNet-50 on ImageNet, by the usual recipe: about 76 % top-1 after 90 epochs.

    pip install torchvision        # the one that belongs to your torch

`data` is a folder of train/<class>/*.jpg and val/<class>/*.jpg. The rate of 0.1 is for 256 samples;
--lr-scaling linear multiplies it by the ranks, which five epochs of warm-up (1560 steps of 16 x 256
samples) make safe. The same line goes on from the last checkpoint after a stop. On 16 GPUs:

    set -- --task examples/imagenet.py:ImageNet --set data=/data/imagenet --batch-size 256 \\
        --epochs 90 --precision bf16 --workers 8 --lr-scaling linear --warmup-steps 1560 \\
        --schedule step:30,60,80 --run-dir runs/imagenet --resume auto

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id imagenet \\
        --rdzv-endpoint host1:29500 -m hvdtrain "$@"        # on each of the two hosts
    horovodrun -np 16 -H host1:8,host2:8 hvdtrain "$@"
    mpirun -np 16 -H host1:8,host2:8 --bind-to none -x PATH hvdtrain "$@"
    srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --cpus-per-task 8 hvdtrain "$@"

--schedule cosine is as common as these steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain import Task
from hvdtrain.errors import InputError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageNet(Task):
    """`arch` is the name of any classifier of torchvision.models."""

    about_data = "real: photographs in folders by class, such as ImageNet's"

    def __init__(
        self,
        data: str = "imagenet",
        arch: str = "resnet50",
        classes: int = 1000,
        image_size: int = 224,
        lr: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 1e-4,
        label_smoothing: float = 0.1,
    ) -> None:
        torchvision = import_torchvision()  # at once, before anything is made
        if arch not in torchvision.models.list_models(torchvision.models):
            raise InputError(f"arch={arch!r} is not the name of a classifier of torchvision.models")
        self.data = Path(data)
        self.arch = arch
        self.classes = classes
        self.image_size = image_size
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.label_smoothing = label_smoothing

    def model(self) -> nn.Module:
        make = import_torchvision().models.get_model
        # The last BatchNorm of each block starts at zero: large batches then start as stably as
        # small ones.
        more = {"zero_init_residual": True} if self.arch.startswith("resnet") else {}
        model: nn.Module = make(self.arch, weights=None, num_classes=self.classes, **more)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = decay_groups(model, self.weight_decay)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        from torchvision import transforms as t

        size = self.image_size
        end = [t.ToTensor(), t.Normalize(MEAN, STD)]
        crop = [t.RandomResizedCrop(size), t.RandomHorizontalFlip()]
        whole = [t.Resize(size * 256 // 224), t.CenterCrop(size)]
        return (
            self._folder("train", t.Compose(crop + end)),
            self._folder("val", t.Compose(whole + end)),
        )

    def _folder(self, name: str, transform: Any) -> Dataset[Any]:
        folder = self.data / name
        try:
            found = import_torchvision().datasets.ImageFolder(folder, transform)
        except OSError as error:
            raise InputError(
                f"no images in {folder} ({error}); give the folder that holds "
                f"train/<class>/*.jpg and val/<class>/*.jpg with --set data=PATH"
            ) from None
        if len(found.classes) != self.classes:
            raise InputError(
                f"{folder} has {len(found.classes)} classes, and the model has {self.classes}; "
                f"use --set classes={len(found.classes)}"
            )
        return found  # type: ignore[no-any-return]

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(net(images), labels, label_smoothing=self.label_smoothing)

    def metrics(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        scores = net(images)
        return {**top_k(scores, labels), "loss": F.cross_entropy(scores, labels)}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The optimizer's groups: no decay for biases and norms, which are the one-dimensional ones."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def top_k(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """How often the label is the best score, and is among the best five."""
    right = scores.topk(min(5, scores.shape[1])).indices == labels.unsqueeze(1)
    return {"top1": right[:, 0].float().mean(), "top5": right.any(1).float().mean()}


def import_torchvision() -> Any:
    """Import it on use: the rest of this file works without."""
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        raise InputError(
            f"this task needs the torchvision that belongs to torch {torch.__version__} ({error}); "
            f"install it with: pip install torchvision"
        ) from None
    return torchvision
