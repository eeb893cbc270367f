"""The training of reference.py by the Trainer, for live ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, Task, TrainConfig, Trainer
from tests.parity import reference
from tests.parity.reference import CLIP_NORM, EPOCHS, SEED, Case, State
from tests.runs import snapshot


class Regression(Task):
    """A small convolutional regression, deterministic."""

    def __init__(self, optimizer: str) -> None:
        self.kind = optimizer

    def model(self) -> nn.Module:
        return reference.make_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return reference.make_optimizer(model, self.kind)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        data = reference.make_data()
        return data, TensorDataset(*data[:50])

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        return reference.loss_of(net, *batch)


def train(backend: Backend, case: Case, precision: str, run_dir: Path) -> State:
    """Return the final state dict of the Trainer."""
    options = {**vars(case)}
    task = Regression(options.pop("optimizer"))
    config = TrainConfig(
        **options,
        seed=SEED,
        epochs=EPOCHS,
        clip_norm=CLIP_NORM,
        precision=precision,
        threads=1,
        log_every=3,
        run_dir=str(run_dir),
    )
    trainer = Trainer(task, backend, config)
    trainer.fit()
    return snapshot(trainer.model)
