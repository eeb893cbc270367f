"""What training must give: a loop by hand, in plain PyTorch, that plays all ranks in one process.

It imports nothing of hvdtrain: order, shards and schedules are written out again, so that a fault
in the package's own cannot be in both. Used by all tests that compare bits; trained.py is the same
training on live ranks.

Gradients of the ranks are computed one after another, summed, and scaled by 1/n: with two ranks
both that scaling and the sum are exact in any order, so every backend must match it bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One training: its optimizer, and options of the run.

    200 samples in micro-batches of 18 over all ranks are 11 of them: windows of 2, and a short one.
    """

    optimizer: str = "sgd"
    global_batch_size: int = 36
    accumulate: int = 2
    schedule: str = "constant"
    warmup_steps: int = 0


SGD, ADAMW = Case(schedule="cosine", warmup_steps=2), Case("adamw")
SEED, EPOCHS, CLIP_NORM, SAMPLES = 1, 2, 0.5, 200


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
    targets = [inputs.sum((1, 2, 3)), inputs.amax((1, 2, 3)), inputs[:, 0, 0, 0]]
    return TensorDataset(inputs, torch.stack(targets, 1))


def loss_of(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = (net(inputs) - targets).square().mean()
    return loss


def seed_of(*numbers: int) -> int:
    """Return the seed of a run, or of its epoch, as hvdtrain documents it."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**62
    return seed


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the samples of an epoch in the order in which all ranks together use them."""
    generator = torch.Generator().manual_seed(seed_of(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def reference(case: Case, n: int, precision: str) -> State:
    """Return the final state dict of `n` ranks, played in this process."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    torch.manual_seed(seed_of(SEED))
    model = make_model().to(dtype)
    optimizer = make_optimizer(model, case.optimizer)
    inputs, targets = make_data().tensors
    inputs, targets = inputs.to(dtype), targets.to(dtype)
    base_lr = optimizer.param_groups[0]["lr"]
    step_samples = case.global_batch_size
    micro_samples = step_samples // case.accumulate
    kept = SAMPLES // micro_samples * micro_samples  # a last micro-batch that is short is dropped
    per_epoch = math.ceil(kept / step_samples)
    for step in range(EPOCHS * per_epoch):
        epoch, place = divmod(step, per_epoch)
        order = epoch_order(SAMPLES, SEED, epoch)[:kept]
        window = torch.split(order[place * step_samples :][:step_samples], micro_samples)
        optimizer.param_groups[0]["lr"] = base_lr * _factor(case, step, per_epoch)
        totals: list[Tensor] = []
        for rank in range(n):
            model.zero_grad()
            for micro_batch in window:
                mine = torch.chunk(micro_batch, n)[rank]
                loss = loss_of(model, inputs[mine], targets[mine])
                (loss / len(window)).backward()  # type: ignore[no-untyped-call]
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            totals = [a + b for a, b in zip(totals, grads, strict=True)] if totals else grads
        for p, total in zip(model.parameters(), totals, strict=True):
            p.grad = total / n
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def _factor(case: Case, step: int, per_epoch: int) -> float:
    if step < case.warmup_steps:
        return (step + 1) / (case.warmup_steps + 1)
    if case.schedule == "cosine":
        done = (step - case.warmup_steps) / (per_epoch * EPOCHS - case.warmup_steps)
        return (1 + math.cos(math.pi * done)) / 2
    return 1.0
