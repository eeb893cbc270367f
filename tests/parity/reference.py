"""What training must give: a hand-written loop that plays all ranks in one process, without any
backend.

Gradients of the ranks are computed one after another, summed, and scaled by 1/n: with two ranks
both that scaling and the sum are exact in any order, so every backend must match it bit by bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, Task, TrainConfig, Trainer, World
from hvdtrain.training.data_loading import ShardedBatches, derive_seed
from tests.runs import snapshot

State = dict[str, Tensor]


class Regression(Task):
    """A small convolutional regression, deterministic."""

    def __init__(self, optimizer: str = "sgd") -> None:
        self.kind = optimizer

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(64, 16),
            nn.Tanh(),
            nn.Linear(16, 3),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(200, 1, 6, 6, generator=generator)
        targets = torch.stack(
            [inputs.sum((1, 2, 3)), inputs.amax((1, 2, 3)), inputs[:, 0, 0, 0]], 1
        )
        return TensorDataset(inputs, targets), TensorDataset(inputs[:50], targets[:50])

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        loss: Tensor = (net(inputs) - targets).square().mean()
        return loss


# 200 samples in micro-batches of 18 over all ranks are 11 of them: windows of 2, and a short one.
BASE = TrainConfig(
    seed=1,
    epochs=2,
    global_batch_size=36,
    accumulate=2,
    clip_norm=0.5,
    threads=1,
    log_every=3,
)
CASES = {
    "sgd": BASE,
    "adamw": BASE,
    "sgd-cosine": replace(BASE, schedule="cosine", warmup_steps=2, lr_scaling="none"),
    "adamw-step": replace(
        BASE, schedule="step", step_epochs="1", accumulate=1, global_batch_size=18
    ),
}


def reference(case: str, n: int, precision: str) -> State:
    """The final state dict of `n` ranks, played in this process."""
    config, task = replace(CASES[case], precision=precision), Regression(case.partition("-")[0])
    dtype = torch.float64 if precision == "fp64" else torch.float32
    torch.manual_seed(derive_seed(config.seed))
    model = task.model().to(dtype)
    optimizer = task.optimizer(model)
    data, _ = task.datasets()
    micro_batch = config.micro_batch(n)
    shards = [
        ShardedBatches(len(data), micro_batch, World(r, n, r, n), config.seed, "drop")  # type: ignore[arg-type]
        for r in range(n)
    ]
    base_lr = optimizer.param_groups[0]["lr"]
    per_epoch = -(-len(shards[0]) // config.accumulate)
    step = 0
    for epoch in range(config.epochs):
        for shard in shards:
            shard.set_epoch(epoch)
        batches = [list(shard) for shard in shards]
        for start in range(0, len(shards[0]), config.accumulate):
            window = [rank_batches[start : start + config.accumulate] for rank_batches in batches]
            for group in optimizer.param_groups:
                group["lr"] = base_lr * _factor(config, step, per_epoch)
            _mean_gradients(task, model, data, window)
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            step += 1
    return snapshot(model)


def _mean_gradients(task: Task, model: nn.Module, data: Any, window: list[list[list[int]]]) -> None:
    totals: list[Tensor] = []
    for rank_window in window:
        model.zero_grad()
        for indices in rank_window:
            inputs, targets = data[indices]
            dtype = next(model.parameters()).dtype
            loss = task.loss(model, (inputs.to(dtype), targets.to(dtype)))
            assert isinstance(loss, Tensor)
            (loss / len(rank_window)).backward()  # type: ignore[no-untyped-call]
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        totals = [a + b for a, b in zip(totals, grads, strict=True)] if totals else grads
    for p, total in zip(model.parameters(), totals, strict=True):
        p.grad = total / len(window)


def _factor(config: TrainConfig, step: int, per_epoch: int) -> float:
    """The schedules again, written out."""
    import math

    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / (per_epoch * config.epochs - config.warmup_steps)
        return (1 + math.cos(math.pi * done)) / 2
    if config.schedule == "step":
        return 0.1 if step >= per_epoch else 1.0
    return 1.0


def train(backend: Backend, case: str, precision: str, run_dir: Path) -> State:
    """The final state dict of the Trainer. Runs on live ranks."""
    config = replace(CASES[case], precision=precision, run_dir=str(run_dir))
    trainer = Trainer(Regression(case.partition("-")[0]), backend, config)
    trainer.fit()
    return snapshot(trainer.model)
