"""Interrupt training at a step, resume it, and compare with the run that was left alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.optim.swa_utils import SWALR
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, Callback, Task, TrainConfig, Trainer
from tests.launching import wait_until
from tests.ranks import single
from tests.runs import Values, fit_watched


def warm_up(optimizer: Any, steps: int = 3) -> LRScheduler:
    return schedulers.LinearLR(optimizer, 0.1, total_iters=steps)


SCHEDULES: dict[str, Callable[[Any, int], LRScheduler]] = {
    "step": lambda o, n: schedulers.StepLR(o, 2, 0.5),
    "by epoch": lambda o, n: schedulers.StepLR(o, 1, 0.5),
    "one-cycle": lambda o, n: schedulers.OneCycleLR(o, 0.1, total_steps=n + 1),
    "plateau": lambda o, n: schedulers.ReduceLROnPlateau(o, mode="max", factor=0.5, patience=0),
    "warm-up from 0": lambda o, n: schedulers.LambdaLR(o, lambda step: min(1.0, step / 7)),
    "cosine": lambda o, n: schedulers.CosineAnnealingLR(o, n, 0.001),
    "cyclic": lambda o, n: schedulers.CyclicLR(o, 0.001, 0.1, 3, mode="exp_range", gamma=0.9),
    "own rate's one-cycle": lambda o, n: schedulers.OneCycleLR(
        o, [group["lr"] for group in o.param_groups], total_steps=n + 1
    ),
    "chained one-cycle": lambda o, n: ChainedScheduler(
        [schedulers.OneCycleLR(o, 0.1, total_steps=n + 1)]
    ),
    "average of weights": lambda o, n: SWALR(o, 0.001, 8),
    "sequential": lambda o, n: SequentialLR(
        o, [warm_up(o), schedulers.CosineAnnealingLR(o, n - 3)], [3]
    ),
    "sequential of chained": lambda o, n: SequentialLR(
        o,
        [
            ChainedScheduler([warm_up(o, 5), schedulers.StepLR(o, 2, 0.9)]),
            schedulers.ExponentialLR(o, 0.8),
        ],
        [6],
    ),
}
"""A task's own schedules: torch's, made of the optimizer and the number of steps."""
OWN_RATES = ("one-cycle", "cyclic", "chained one-cycle")
"""Those that set their rates themselves, whatever the optimizer's."""
STEPPED_FIRST = "ignore:Detected call of .lr_scheduler.step"
"""A warning filter: torch's constructor of a schedule that is made of others steps them."""


class Net(nn.Module):
    """Its layers are registered in another order than their gradients become ready in."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, 1)
        self.body = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


class Stateful(Task):
    """What carries state from step to step: dropout, BatchNorm, momentum, a scheduler."""

    def __init__(
        self,
        own_schedule: str = "",
        evaluates: bool = True,
        optimizer: str = "adamw",
        **of_subclass: Any,
    ) -> None:
        vars(self).update(of_subclass)
        self.own_schedule = own_schedule
        self.evaluates = evaluates
        self.schedule_unit = "epoch" if own_schedule == "by epoch" else "step"
        self.kind = optimizer
        self.seen: list[list[int]] = []

    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        inputs = torch.randn(50, 5, generator=torch.Generator().manual_seed(2))
        data = TensorDataset(inputs, torch.arange(50))
        return data, TensorDataset(inputs[:7], torch.arange(7)) if self.evaluates else None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        inputs, index = batch
        if net.training:
            self.seen.append(index.tolist())
        loss: Tensor = (net(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        return loss

    def schedule(
        self, optimizer: torch.optim.Optimizer, steps_per_epoch: int, total_steps: int
    ) -> LRScheduler | None:
        make = SCHEDULES.get(self.own_schedule)
        return None if make is None else make(optimizer, total_steps)


CONFIG = TrainConfig(
    seed=7,
    epochs=3,
    global_batch_size=12,
    schedule="cosine",
    warmup_steps=3,
    log_every=2,
    checkpoint_every=1,
    keep=99,
    threads=1,
)  # 50 samples in steps of 12: 4 steps an epoch, 12 in all
CASES: dict[str, Values] = {
    "plain": {},
    "average of weights, best": {"ema": 0.9, "keep_best": "loss"},
    "fp32 masters": {"precision": "bf16", "opt_level": "O2"},
    "scaled loss": {"precision": "fp16"},
    "plateau": {"schedule": "plateau", "warmup_steps": 0},
    "own schedule": {"own_schedule": "one-cycle", "schedule": "constant", "warmup_steps": 0},
}
"""What a copy of a run's state must contain: options of CONFIG, by name."""


def train(
    backend: Backend,
    /,
    run_dir: Path,
    stop_at: int = -1,
    resume: str = "none",
    signals: dict[int, int] | None = None,
    callbacks: Sequence[Callback] = (),
    task: Callable[[], Any] | None = None,
    **changes: Any,
) -> Values:
    """Train, or die before step `stop_at`; return what was seen, the rates and the weights.

    `signals`: the steps after which some ranks get SIGUSR1, by rank. `task`: makes another one than
    Stateful, which has `seen`, too.
    """
    of_task = {k: changes.pop(k) for k in ("own_schedule", "optimizer") if k in changes}
    if of_task.get("own_schedule"):
        changes.setdefault("warmup_steps", 0)  # the warm-up is that of the options' schedules
    config = replace(CONFIG, run_dir=str(run_dir), resume=resume, **changes)
    plateau = of_task.get("own_schedule") == "plateau" or config.schedule.startswith("plateau")
    decides = config.early_stop or config.keep_best or config.ema or config.callback
    evaluates = bool(decides or plateau)
    made = Stateful(evaluates=evaluates, **of_task) if task is None else task()
    trainer = Trainer(made, backend, config, callbacks=callbacks)

    def signal_at(step: int) -> None:
        if signals is not None and step == signals.get(backend.world.rank):
            preempt(trainer)

    return {**fit_watched(trainer, stop_at, signal_at), "seen": made.seen}


def preempt(trainer: Trainer) -> None:
    """Send SIGUSR1 to this process, and wait until it has been seen: the run may be over else."""
    signal.raise_signal(signal.SIGUSR1)
    wait_until(lambda: trainer._preemption.cause, "the signal")


def fit_on(
    backend: Backend,
    /,
    folder: Path,
    *callbacks: Callback,
    task: Task | None = None,
    **changes: Any,
) -> Trainer:
    """Train with callbacks, and an evaluation after each epoch; return the Trainer."""
    config = replace(CONFIG, run_dir=str(folder), **changes)
    trainer = Trainer(task or Stateful(), backend, config, callbacks=callbacks)
    trainer.fit()
    return trainer


def fit(folder: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    """Train in this process."""
    return fit_on(single(), folder, *callbacks, **changes)


class Asks(Callback):
    """Calls a method of the Trainer, or a function with it, in one hook after the given steps."""

    def __init__(
        self, hook: str, steps: Collection[int], method: str | Callable[..., None], *arguments: Any
    ) -> None:
        def ask(trainer: Trainer, *_: Any) -> None:
            if trainer.progress.step in steps:
                call = getattr(Trainer, method) if isinstance(method, str) else method
                call(trainer, *arguments)

        setattr(self, hook, ask)


class Dies(Callback):
    """Ends the run like a kill, at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.step:
            raise ArithmeticError("as told")
