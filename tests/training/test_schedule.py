"""The learning rate at every step, and after every resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
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

TOTAL, PER_EPOCH = 40, 4
OWN_RATES = ("one-cycle", "cyclic", "chained one-cycle")
"""The schedules of the task that set their rates themselves."""
CONFIGS = {
    "constant": TrainConfig(),
    "warm-up": TrainConfig(warmup_steps=3),
    "cosine": TrainConfig(schedule="cosine"),
    "cosine after warm-up": TrainConfig(schedule="cosine", warmup_steps=8),
    "step": TrainConfig(schedule="step:2, 5,7:0.5"),
    "one-cycle": TrainConfig(schedule="one-cycle"),
    "step after warm-up": TrainConfig(schedule="step:2", warmup_steps=10),
}


def optimizer_of(*lrs: float) -> Optimizer:
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs])


def begin_at(
    step: int, optimizer: Optimizer, config: TrainConfig, total: int = TOTAL, ahead: int = 0
) -> LambdaLR:
    """Return the schedule of the options at a step, as the plan of a run makes it."""
    factor = lr_factors(config, total, PER_EPOCH, ahead)
    return LambdaLR(optimizer, factor, last_epoch=step - 1)


def rates(
    config: TrainConfig, optimizer: Optimizer, start: int = 0, stop: int = TOTAL
) -> list[list[float]]:
    """The rates that steps `start` to `stop` - 1 are taken with, by group."""
    schedule = begin_at(start, optimizer, config)
    found = []
    for _ in range(start, stop):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def rates_of(config: TrainConfig) -> list[float]:
    return [group[0] for group in rates(config, optimizer_of(1.0))]


def test_warm_up_is_linear_and_ends_at_the_rate() -> None:
    assert rates_of(CONFIGS["warm-up"]) == [0.25, 0.5, 0.75] + [1.0] * (TOTAL - 3)


def test_step_drops_at_epochs() -> None:
    found = rates_of(CONFIGS["step"])
    assert found == [1.0] * 8 + [0.5] * 12 + [0.25] * 8 + [0.125] * 12


def test_step_counts_epochs_from_the_start_of_the_warm_up() -> None:
    found = rates_of(CONFIGS["step after warm-up"])
    assert found[9] == pytest.approx(10 / 11)
    assert found[10:] == pytest.approx([0.1] * 30)


def test_epochs_may_be_ahead_of_the_steps() -> None:
    """After a resume at a smaller batch size, of which a step is half as much."""
    optimizer = prepared(1.0)
    schedule = begin_at(4, optimizer, CONFIGS["step"], ahead=2)
    found = []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == [1.0, 1.0, 0.5, 0.5], "it drops after two epochs, which are 8 steps"


@pytest.mark.parametrize("total", [1, 3, TOTAL])
def test_one_cycle_has_the_rates_of_torch(total: int) -> None:
    ours, plain = prepared(0.3, 0.02), optimizer_of(0.3, 0.02)
    schedule = begin_at(0, ours, TrainConfig(schedule="one-cycle"), total)
    theirs = OneCycleLR(plain, [0.3, 0.02], total_steps=total, cycle_momentum=False)
    for _ in range(total):
        for one, other in zip(ours.param_groups, plain.param_groups, strict=True):
            assert one["lr"] == pytest.approx(other["lr"], rel=1e-12)
        last = [group["lr"] for group in ours.param_groups]
        for optimizer in (ours, plain):
            optimizer.step()
        schedule.step()
        theirs.step()
    assert [group["lr"] for group in ours.param_groups] == last, "beyond the end it stays"


def test_a_warm_up_longer_than_the_run() -> None:
    found = rates_of(TrainConfig(schedule="cosine", warmup_steps=100))
    assert found == pytest.approx([step / 101 for step in range(1, TOTAL + 1)])


@pytest.mark.parametrize("name", CONFIGS)
def test_resuming_at_any_step_continues_the_schedule(name: str) -> None:
    config = CONFIGS[name]
    whole = rates(config, prepared(0.3, 0.02))
    for start in range(TOTAL):
        optimizer = prepared(0.3, 0.02)
        rates(config, optimizer, stop=start)
        restored = prepared(0.3, 0.02)
        restored.load_state_dict(optimizer.state_dict())
        set_base_lr_of_options(restored, [0.3, 0.02])
        assert rates(config, restored, start) == whole[start:]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_changed_rate_takes_effect_on_resume_and_is_not_compounded(name: str) -> None:
    """Scaling what the checkpoint holds would scale it once more at every resume."""
    config = CONFIGS[name]
    whole = rates(config, prepared(1.0))
    optimizer = prepared(1.0)
    rates(config, optimizer, stop=5)
    for start in (5, 12):
        restored = prepared(1.0)
        restored.load_state_dict(optimizer.state_dict())
        set_base_lr_of_options(restored, [4.0])
        found = rates(config, restored, start)
        assert found == [[4 * lr] for (lr,) in whole[start:]]
        optimizer = restored


def prepared(*lrs: float) -> Optimizer:
    optimizer = optimizer_of(*lrs)
    set_base_lr(optimizer, None, 1.0)
    return optimizer


def set_base_lr_of_options(optimizer: Optimizer, lrs: list[float]) -> None:
    """What the trainer does after it has loaded the state."""
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = group["initial_lr"] = lr


def begin(own: str, total: int, done: int = 0) -> tuple[Optimizer, Schedule]:
    """Return the schedule of a task in a run of one epoch, after `done` of `total` steps."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.02, momentum=0.9)
    task, config = resume.Stateful(own), TrainConfig(epochs=1, batch_size=1)
    batches = ShardedBatches(TensorDataset(torch.ones(total)), config, World())
    task.schedule_unit = "step"
    about = config, 1, batches, Progress(done, 0, done)
    lrs = set_base_lr(optimizer, None, 1.0)
    schedule = Schedule(CheckedTask(task), *about, optimizer, *lrs)
    schedule.start({})
    return optimizer, schedule


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # constructors of parts
@pytest.mark.parametrize("done", [5, 17])
@pytest.mark.parametrize("total", [TOTAL, 20])
@pytest.mark.parametrize("name", [name for name in resume.SCHEDULES if name != "plateau"])
def test_a_resume_with_another_number_of_steps_follows_the_new_plan(
    name: str, total: int, done: int
) -> None:
    """As another number of epochs, ranks or samples in a batch makes it: the rates, and what else
    the schedule sets, are those of a run that has had the new plan from its first step.
    """

    def advance(optimizer: Optimizer, schedule: Schedule, steps: int) -> list[dict[str, Any]]:
        taken_with = []
        for _ in range(steps):
            taken_with.append({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
            optimizer.step()
            schedule.after_step()
        return taken_with

    resumed = begin(name, total, done)
    assert advance(*resumed, total - done) == advance(*begin(name, total), total)[done:]


def test_a_run_is_extended_with_the_schedule_of_its_task(tmp_path: Path) -> None:
    """Cosine annealing to the end of a longer run; with the plan of before, it climbs again."""
    folder = str(tmp_path / "run")
    config = replace(resume.CONFIG, run_dir=folder, schedule="constant", warmup_steps=0)

    def rate_at_end(config: TrainConfig) -> float:
        trainer = Trainer(resume.Stateful("cosine"), single(), config)
        trainer.fit()
        return float(trainer.optimizer.param_groups[0]["lr"])

    assert rate_at_end(config) == pytest.approx(0.001)
    longer = replace(config, epochs=2 * config.max_epochs(), resume="must")
    assert rate_at_end(longer) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("scaling", "factor"), [("none", 1.0), ("linear", 12.0), ("sqrt", math.sqrt(12))]
)
def test_lr_factor(scaling: str, factor: float) -> None:
    assert lr_factor(scaling, num_ranks=4, accumulate=3) == factor
    assert lr_factor(scaling, 1, 1) == 1.0


def test_set_base_lr() -> None:
    optimizer = optimizer_of(0.1, 0.2)
    assert set_base_lr(optimizer, None, 4.0) == ([0.1, 0.2], [0.4, 0.8])
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.8]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.4, 0.8]
    assert set_base_lr(optimizer, 0.5, 2.0) == ([0.5, 1.0], [1.0, 2.0])
    assert set_base_lr(optimizer_of(0.0), 0.5, 1.0) == ([0.5], [0.5])
    with pytest.raises(InputError, match="no ratio"):
        set_base_lr(optimizer_of(0.0, 0.1), 0.5, 1.0)


def test_a_rate_in_a_tensor() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    assert set_base_lr(optimizer, None, 2.0) == ([0.5], [1.0])
    assert rates(CONFIGS["warm-up"], optimizer, stop=2) == [[0.25], [0.5]]


@pytest.mark.parametrize("lr", [None, "none"])
def test_a_group_without_a_rate_is_refused(lr: float | None, message: Message) -> None:
    """As that of an Adafactor that finds its own rate."""
    optimizer = optimizer_of(0.1, 0.2)
    if lr is None:
        optimizer.param_groups[1]["lr"] = None
    else:
        del optimizer.param_groups[1]["lr"]
    with pytest.raises(InputError) as refused:
        set_base_lr(optimizer, None, 1.0)
    assert refused.value.on_all_ranks
    message(refused.value)


@pytest.mark.parametrize("own", OWN_RATES)
@pytest.mark.parametrize("options", [{"lr": 0.2}, {"lr_scaling": "linear", "accumulate": 2}])
def test_a_rate_that_the_schedule_of_the_task_does_not_use_is_refused(
    own: str, options: dict[str, Any], tmp_path: Path, message: Message
) -> None:
    """Its own rates would count, whatever the options say."""
    config = replace(resume.CONFIG, run_dir=str(tmp_path), schedule="constant", warmup_steps=0)
    with pytest.raises(InputError) as refused:
        Trainer(resume.Stateful(own), single(), replace(config, **options)).fit()
    assert refused.value.on_all_ranks
    message(refused.value)
    Trainer(resume.Stateful(own), single(), config).set_up(record=False)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # constructors of parts
@pytest.mark.parametrize("own", [name for name in resume.SCHEDULES if name not in OWN_RATES])
def test_the_options_rate_is_that_of_every_other_schedule(own: str) -> None:
    def rate(**options: Any) -> float:
        config = replace(resume.CONFIG, schedule="constant", warmup_steps=0, **options)
        trainer = Trainer(resume.Stateful(own, evaluates=True), single(), config)
        trainer.set_up(record=False)
        next(trainer.steps())
        assert trainer.progress.step == 1
        return trainer.last_lrs[0]

    assert rate(lr=0.2) == pytest.approx(10 * rate())


def test_a_warm_up_of_a_schedule_of_the_task_is_refused(tmp_path: Path) -> None:
    """It would have no effect; a task whose method returns None has the schedule of the options."""
    config = replace(resume.CONFIG, run_dir=str(tmp_path / "own"), schedule="constant")
    with pytest.raises(InputError) as refused:
        Trainer(resume.Stateful("step"), single(), config).fit()
    assert str(refused.value) == (
        "--warmup-steps 3 has no effect on the schedule of the task, a StepLR; leave "
        "--warmup-steps out, and put the warm-up into the task's schedule"
    )
    assert refused.value.on_all_ranks
    Trainer(resume.Stateful("step"), single(), replace(config, warmup_steps=0)).set_up(False)
    trainer = Trainer(resume.Stateful(), single(), config)
    trainer.set_up(record=False)
    assert trainer.ledger.warmup_steps == 3
