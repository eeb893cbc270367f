"""The learning rate at every step, and after every resume."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from hvdtrain import Trainer, World
from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.order import ShardedBatches
from hvdtrain.training.progress import Progress
from hvdtrain.training.schedule import Schedule, lr_factor, lr_factors, set_base_lr
from hvdtrain.training.task import CheckedTask
from tests.messages import Message
from tests.parity import resume
from tests.ranks import single
from tests.runs import Values

TOTAL, PER_EPOCH = 40, 4
OPTIONS: dict[str, Values] = {
    "constant": {},
    "warm-up": {"warmup_steps": 3},
    "cosine": {"schedule": "cosine"},
    "cosine after warm-up": {"schedule": "cosine", "warmup_steps": 8},
    "step": {"schedule": "step:2, 5,7:0.5"},
    "one-cycle": {"schedule": "one-cycle"},
    "step after warm-up": {"schedule": "step:2", "warmup_steps": 10},
    "warm-up beyond the end": {"schedule": "cosine", "warmup_steps": 100},
}
"""The schedules of the options."""


def optimizer_of(*lrs: float) -> Optimizer:
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs], momentum=0.9)


def begin(
    task: resume.Stateful,
    options: Values,
    total: int = TOTAL,
    done: int = 0,
    before: Optimizer | None = None,
    factor: float = 1.0,
) -> tuple[Optimizer, Schedule]:
    """Return the schedule of a run that is begun, or resumed after `done` of `total` steps with the
    optimizer of the run before.
    """
    optimizer = optimizer_of(0.3, 0.02)
    config = TrainConfig(epochs=total // PER_EPOCH, batch_size=1, **options)
    batches = ShardedBatches(TensorDataset(torch.ones(PER_EPOCH)), config, World())
    about = config, 1, batches, Progress(done, *divmod(done, PER_EPOCH))
    lrs = set_base_lr(optimizer, None, factor)
    if before is not None:
        optimizer.load_state_dict(before.state_dict())
    schedule = Schedule(CheckedTask(task), *about, optimizer, *lrs)
    schedule.start({"step": done} if before is not None else {})
    return optimizer, schedule


def advance(optimizer: Optimizer, schedule: Schedule, steps: int) -> list[list[Values]]:
    """Take steps; return what each is taken with, by group of parameters."""
    taken_with = []
    for _ in range(steps):
        groups = ({**group} for group in optimizer.param_groups)
        taken_with.append([{k: v for k, v in g.items() if "param" not in k} for g in groups])
        optimizer.step()
        schedule.after_step()
    return taken_with


def rates(taken_with: list[list[Values]]) -> list[float]:
    return [group["lr"] for groups in taken_with for group in groups]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step", [1.0] * 8 + [0.5] * 12 + [0.25] * 8 + [0.125] * 12),
        # It counts epochs from the start of the warm-up.
        ("step after warm-up", [step / 11 for step in range(1, 11)] + [0.1] * 30),
        ("warm-up beyond the end", [step / 101 for step in range(1, 41)]),
    ],
)
def test_the_rates_of_the_options(name: str, expected: list[float]) -> None:
    taken_with = advance(*begin(resume.Stateful(), OPTIONS[name]), TOTAL)
    assert rates(taken_with)[::2] == pytest.approx([0.3 * factor for factor in expected])


def test_epochs_may_be_ahead_of_the_steps() -> None:
    """After a resume at a smaller batch size, of which a step is half as much."""
    factor = lr_factors(TrainConfig(**OPTIONS["step"]), TOTAL, PER_EPOCH, ahead=2)
    # It drops after two epochs, which are 8 steps.
    assert [factor(step) for step in range(4, 8)] == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("total", [1, 3, TOTAL])
def test_one_cycle_has_the_rates_of_torch(total: int) -> None:
    factor, optimizer = lr_factors(TrainConfig(schedule="one-cycle"), total, 1), optimizer_of(1.0)
    plain = OneCycleLR(optimizer, 1.0, total_steps=total, cycle_momentum=False)
    for step in range(total):
        assert factor(step) == pytest.approx(plain.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        plain.step()
    assert factor(total) == factor(total - 1), "beyond the end it stays"


@pytest.mark.filterwarnings(resume.STEPPED_FIRST)
@pytest.mark.parametrize("total", [TOTAL, 20])
@pytest.mark.parametrize("name", [*OPTIONS, *(own for own in resume.SCHEDULES if own != "plateau")])
def test_a_resumed_run_follows_the_new_plan_at_the_new_rate(name: str, total: int) -> None:
    """As another number of epochs, ranks or samples in a batch makes it: the rates, and what else
    the schedule sets, are those of a run that has had the new plan from its first step. Scaling
    what the checkpoint holds would scale it once more at every resume.
    """
    task = resume.Stateful("" if name in OPTIONS else name)
    task.schedule_unit = "step"
    options, factor = OPTIONS.get(name, {}), 1.0 if name in resume.OWN_RATES else 4.0
    whole = advance(*begin(task, options, total, factor=factor), total)
    before = begin(task, options)
    for done in range(1, total):
        advance(*before, 1)
        resumed = begin(task, options, total, done, before[0], factor)
        assert advance(*resumed, total - done) == whole[done:]


def test_lr_factor() -> None:
    for scaling, factor in {"none": 1.0, "linear": 12.0, "sqrt": math.sqrt(12)}.items():
        assert lr_factor(scaling, num_ranks=4, accumulate=3) == factor
        assert lr_factor(scaling, 1, 1) == 1.0


def test_set_base_lr() -> None:
    optimizer = optimizer_of(0.1, 0.2)
    assert set_base_lr(optimizer, None, 4.0) == ([0.1, 0.2], [0.4, 0.8])
    for key in ("lr", "initial_lr"):
        assert [group[key] for group in optimizer.param_groups] == [0.4, 0.8]
    assert set_base_lr(optimizer, 0.5, 2.0) == ([0.5, 1.0], [1.0, 2.0])
    assert set_base_lr(optimizer_of(0.0), 0.5, 1.0) == ([0.5], [0.5])
    adam = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    assert set_base_lr(adam, None, 2.0) == ([0.5], [1.0])
    assert type(adam.param_groups[0]["lr"]) is float
    with pytest.raises(InputError, match="no ratio"):
        set_base_lr(optimizer_of(0.0, 0.1), 0.5, 1.0)


@pytest.mark.parametrize("rate", [{"lr": None}, {}], ids=str)
def test_a_group_without_a_rate_is_refused(rate: Values, message: Message) -> None:
    """As that of an Adafactor that finds its own rate."""
    optimizer = optimizer_of(0.1, 0.2)
    del optimizer.param_groups[1]["lr"]
    optimizer.param_groups[1] |= rate
    with message.raises(InputError) as refused:
        set_base_lr(optimizer, None, 1.0)
    assert refused.value.on_all_ranks


def set_up(own: str, **options: Any) -> Trainer:
    """Set up a run with the schedule of its task."""
    config = replace(resume.CONFIG, **{"schedule": "constant", "warmup_steps": 0, **options})
    trainer = Trainer(resume.Stateful(own), single(), config)
    trainer.set_up(record=False)
    return trainer


@pytest.mark.parametrize("own", resume.OWN_RATES)
@pytest.mark.parametrize("options", [{"lr": 0.2}, {"lr_scaling": "linear", "accumulate": 2}])
def test_a_rate_that_the_schedule_of_the_task_does_not_use_is_refused(
    own: str, options: Values, message: Message
) -> None:
    """Its own rates would count, whatever the options say. That the rate is that of every other
    schedule: the test above.
    """
    with message.raises(InputError) as refused:
        set_up(own, **options)
    assert refused.value.on_all_ranks
    set_up(own)


def test_a_warm_up_of_a_schedule_of_the_task_is_refused(message: Message) -> None:
    """It would have no effect; a task whose method returns None has the schedule of the options."""
    with message.raises(InputError) as refused:
        set_up("step", warmup_steps=3)
    assert refused.value.on_all_ranks
    set_up("step")
    assert set_up("", warmup_steps=3).ledger.warmup_steps == 3
