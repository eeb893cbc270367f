"""Arms with one fault each, as users write them: backends on torch.distributed, and tasks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from hvdtrain.backends.c10d import C10d
from hvdtrain.tasks.convnet import ConvNet
from hvdtrain.tasks.digits import Digits
from hvdtrain.tasks.transformer import Transformer


class Correct(C10d):
    """The mean over all ranks, one all-reduce for each parameter."""

    name: ClassVar[str] = "correct"

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        for p in parameters(optimizer):
            self.reduce(p)

    def reduce(self, p: Tensor) -> None:
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad.div_(self.world.size)


def parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class ScalesLr(Correct):
    """Scales the rate, and the one that schedulers start from: it lasts."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        for group in optimizer.param_groups:
            group["lr"] *= self.world.size
            group["initial_lr"] = group["lr"]
        return super()._wrap(model, optimizer)


class ScalesInVain(Correct):
    """Scales the rate alone, which the Trainer's scheduler sets anew: no difference."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        for group in optimizer.param_groups:
            group["lr"] *= self.world.size
        return super()._wrap(model, optimizer)


class NoDivision(Correct):
    def reduce(self, p: Tensor) -> None:
        dist.all_reduce(p.grad)


class ClipsFirst(Correct):
    """Clips every rank's own gradient, and averages afterwards."""

    limit = 0.1

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        nn.utils.clip_grad_norm_(parameters(optimizer), self.limit)
        super()._reduce_gradients(optimizer)


class HalfPrecision(Correct):
    """Sends fp16, as Horovod's compression does."""

    def reduce(self, p: Tensor) -> None:
        assert p.grad is not None
        half = p.grad.to(torch.float16)
        dist.all_reduce(half)
        p.grad.copy_(half.to(p.grad.dtype).div_(self.world.size))


class OneLeftOut(Correct):
    """The first parameter is reduced by nobody, as one without a hook."""

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        for p in parameters(optimizer)[1:]:
            self.reduce(p)


class LastMicroBatch(Correct):
    """Averages in the last micro-batch of a window alone what that has added."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before: dict[Tensor, Tensor] = {}

    def gradients(self, optimizer: Optimizer, last: bool = True) -> Any:
        if last:
            self.before = {p: p.grad.clone() for p in parameters(optimizer) if p.grad is not None}
        return super().gradients(optimizer, last)

    def reduce(self, p: Tensor) -> None:
        assert p.grad is not None
        p.grad.sub_(self.before[p])
        super().reduce(p)
        self.keep(p)

    def keep(self, p: Tensor) -> None:
        assert p.grad is not None
        p.grad.add_(self.before[p])


class LosesMicroBatches(LastMicroBatch):
    def keep(self, p: Tensor) -> None:
        pass


class LocalBuffers(Correct):
    """Knows nothing of buffers, whatever the policy."""

    def average_gradients(self, optimizer: Optimizer) -> None:
        asked, self.options = self.options, replace(self.options, buffers="local")
        super().average_gradients(optimizer)
        self.options = asked


class ZeroStep(Correct):
    """Makes the optimizer's state by a real step on gradients of zeros."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        return super()._wrap(model, optimizer)


class OwnWeights(Correct):
    """Every rank draws its own, and nobody broadcasts them."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * self.world.rank)
        return super()._wrap(model, optimizer)


class OtherWeights(Correct):
    """Draws the weights again, the same on all ranks."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(1234)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.reset_parameters()
        return super()._wrap(model, optimizer)


class ThirdStep(Correct):
    """Goes wrong in the third step: no hypothesis knows it."""

    steps = 0

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        super()._reduce_gradients(optimizer)
        self.steps += 1
        if self.steps == 3:
            parameters(optimizer)[0].grad[0].add_(0.01)  # type: ignore[index]


class Shrinks(Correct):
    """Takes a thousandth off the largest weights, in the last step: no later gradient shows it."""

    steps = 0

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        super()._reduce_gradients(optimizer)
        self.steps += 1
        if self.steps == 4:
            with torch.no_grad():
                max(parameters(optimizer), key=Tensor.numel).mul_(0.999)


# Tasks


class Images(ConvNet):
    """SGD with momentum and weight decay, and BatchNorm."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(width=4, stages=2, image_size=8, samples=512, lr=lr)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)


class PlainAdam(Digits):
    """No weight decay: a step on zeros leaves the weights as they are."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr)


class Biased(Images):
    """A bias before every BatchNorm, whose true gradient is zero: Adam steps on its rounding."""

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 8), (8, 16)):
            convolution = nn.Conv2d(before, after, 3, padding=1)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, self.classes))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)


class Attention(Transformer):
    """The same of the bias of attention's keys, and embeddings of which a step sees a part."""

    def __init__(self) -> None:
        super().__init__(width=16, layers=1, heads=2, context=8, vocabulary=256, samples=512)


class DropsUnderMpi(Digits):
    """A data pipeline that filters by a variable of one launcher."""

    def collate(self, samples: list[Any]) -> Any:
        kept = samples[:-2] if os.environ.get("OMPI_COMM_WORLD_RANK") == "1" else samples
        return super().collate(kept)


class ShardsUnderMpi(Digits):
    """A data set that takes this rank's share already, under one launcher."""

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        train, evaluation = super().datasets()
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
        size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
        mine = list(range(rank, len(train) // size * size, size))  # type: ignore[arg-type]
        return Subset(train, mine), evaluation
