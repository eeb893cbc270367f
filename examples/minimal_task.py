"""The smallest task: what to train, without code for ranks, devices or backends.

torchrun --nproc-per-node 2 -m hvdtrain --task examples/minimal_task.py:MyTask --epochs 2
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvdtrain import Task


class MyTask(Task):
    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def datasets(self) -> tuple[TensorDataset, None]:
        x = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True)), None  # None: nothing to evaluate

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(net(x), y)
