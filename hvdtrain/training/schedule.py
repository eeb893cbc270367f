"""The plan of a run: its steps, its learning rates, and the scheduler that sets them.

A `Plan` counts the steps, and builds the scheduler: the Trainer makes one, after it has loaded the
state. A scheduler is built anew from the plan of this run, and is then given its progress. A
function of the step (constant, cosine, step, one-cycle) needs none. One of
the task's own is stepped as often as it was before, so that it follows the new plan and the new
rates; of a plateau a checkpoint has what evaluations have decided. The ledger is the plan in
numbers: rank 0 prints it once at the start, and stores it in run.json.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hvdtrain.errors import CheckpointError, InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.criterion import Criterion, number_of
from hvdtrain.training.data.order import EpochBatches
from hvdtrain.training.progress import Progress
from hvdtrain.training.task import CheckedTask, Task

Unit = Literal["step", "epoch", "evaluation"]

# torch's defaults of OneCycleLR: the part of the run in which the rate rises, and the factors by
# which the first and the last rate are smaller than the highest.
_RISE, _FIRST, _LAST = 0.3, 25.0, 25.0 * 1e4

_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""The progress of a ReduceLROnPlateau. The rest of its state_dict are this run's options."""


def lr_factor(scaling: str, num_ranks: int, accumulate: int) -> float:
    """Return the factor of the learning rate: the number of micro-batches in a step over all ranks,
    its square root, or one.
    """
    parts = num_ranks * accumulate
    return {"none": 1.0, "linear": float(parts), "sqrt": math.sqrt(parts)}[scaling]


def set_base_lr(
    optimizer: Optimizer, lr: float | None, factor: float
) -> tuple[list[float], list[float]]:
    """Set the learning rate that every schedule starts from, in place.

    `lr` replaces that of the first parameter group; those of the others keep their ratios to it.
    Returns the rates before and after scaling, by group. Raises InputError for a group that has no
    rate, or no ratio.
    """
    for number, group in enumerate(optimizer.param_groups):
        if group.get("lr") is None:
            raise InputError(
                f"the parameter group {number} of {type(optimizer).__name__} has no learning rate "
                "(lr), which schedules and the ledger need; give it one",
                on_all_ranks=True,
            )
    before = [float(group["lr"]) for group in optimizer.param_groups]
    if lr is not None:
        first = before[0]
        if first == 0 and any(before):
            raise InputError(
                f"--lr {lr:g} replaces the rate of the optimizer's first group, which is 0 and has "
                "no ratio to those of the others; leave --lr out",
                on_all_ranks=True,
            )
        before = [lr * (rate / first) if first else lr for rate in before]
    after = [value * factor for value in before]
    for group, value in zip(optimizer.param_groups, after, strict=True):
        group["lr"] = group["initial_lr"] = value
    return before, after


def lr_factors(
    config: TrainConfig, total_steps: int, steps_per_epoch: int, ahead: int = 0
) -> Callable[[int], float]:
    """Return the function from a step to the factor of the learning rate that it is taken with.

    `ahead`: by how many of this run's steps the progress in epochs exceeds the number of the step;
    not 0 after a resume at another batch size.
    """

    schedule = config.schedule_option()

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if schedule.kind == "cosine":
            span = max(1, total_steps - config.warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - config.warmup_steps) / span)))
        if schedule.kind == "step":
            done = step + ahead
            drops = sum(done >= drop * steps_per_epoch for drop in schedule.epochs)
            return float(schedule.factor**drops)
        if schedule.kind == "one-cycle":
            return _one_cycle(step, total_steps)
        assert schedule.kind in ("constant", "plateau"), schedule.kind
        return 1.0

    return factor


def _one_cycle(step: int, total_steps: int) -> float:
    """Return the factor of torch's OneCycleLR at its defaults, without the cycle of momentum."""
    peak, last = _RISE * total_steps - 1, total_steps - 1
    if step < peak:
        start, end, part = 1 / _FIRST, 1.0, step / peak
    else:
        start, end, part = 1.0, 1 / _LAST, min(1.0, (step - peak) / (last - peak))
    return end + (start - end) / 2 * (math.cos(math.pi * part) + 1)


class RateSchedule:
    """The learning rate of a run: a scheduler of torch, and when it is stepped.

    `unit`: after each step, epoch or evaluation; for a ReduceLROnPlateau always evaluation, with
    `metric`. `warmup` is stepped first, for `warmup_steps` steps; evaluations do not count in
    these. `has_state`: the scheduler's progress belongs into checkpoints. No method is collective:
    evaluations have the same bits on all ranks, so every rank sets the same rate.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        unit: Unit = "step",
        has_state: bool = False,
        metric: str = "loss",
        warmup: LRScheduler | None = None,
        warmup_steps: int = 0,
    ) -> None:
        self.scheduler, self._has_state = scheduler, has_state
        self._unit: Unit = "evaluation" if isinstance(scheduler, ReduceLROnPlateau) else unit
        self._metric = metric
        self._warmup, self._warmup_steps = warmup, warmup_steps
        self._groups = scheduler.optimizer.param_groups
        # Not 0, the first rate of many a warm-up: the rates of two runs are divided.
        self._start_lrs = [
            float((warmup is None and group["lr"]) or group.get("initial_lr", 0))
            for group in self._groups
        ]

    @property
    def watched(self) -> str | None:
        """The metric that a ReduceLROnPlateau is stepped with; None for other schedules."""
        return self._metric if self._unit == "evaluation" else None

    def after_step(self) -> None:
        """Step a schedule by step, or the warm-up of a plateau."""
        if self._unit == "step":
            self.scheduler.step()
        elif self._warmup is not None and self._is_warming_up():
            self._warmup.step()

    def after_epoch(self) -> None:
        """Step a schedule by epoch."""
        if self._unit == "epoch":
            self.scheduler.step()

    def after_evaluation(self, metrics: Mapping[str, Any], step: int) -> None:
        """Step a ReduceLROnPlateau. Raises InputError, on every rank, if its metric is missing."""
        if self._unit == "evaluation" and step >= self._warmup_steps:
            plateau: Any = self.scheduler
            plateau.step(number_of(metrics, self._metric, "the schedule"))

    def _is_warming_up(self) -> bool:
        return self._warmup is not None and self._warmup.last_epoch < self._warmup_steps

    def state_dict(self) -> dict[str, Any] | None:
        """Return the progress for a checkpoint; None if the rate is a function of the step."""
        if not self._has_state:
            return None
        lrs = [float(group["lr"]) for group in self._groups]
        return {
            "kind": _kind_of(self.scheduler),
            "state": self.scheduler.state_dict(),
            "start_lrs": self._start_lrs,
            # In a warm-up not the rates of the moment: the run may be resumed with a shorter one.
            "lrs": self._start_lrs if self._is_warming_up() else lrs,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from the progress in a checkpoint, at this run's rates and by its plan.

        Raises CheckpointError for that of another kind of schedule.
        """
        kind, own = saved.get("kind", "of an earlier version"), _kind_of(self.scheduler)
        if kind != own:
            raise CheckpointError(
                f"the checkpoint has the state of another schedule ({kind}) than {own}; resume "
                "with the schedule that it was saved with",
                on_all_ranks=True,
            )
        state = saved["state"]
        if self._unit != "evaluation":
            self._repeat(_num_steps(state))
            return
        self.scheduler.load_state_dict({key: state[key] for key in _PLATEAU_STATE})
        if self._warmup is not None:
            return  # the rate is that of the warm-up, a function of the step
        rates = zip(saved["lrs"], self._start_lrs, saved["start_lrs"], strict=True)
        for group, (lr, now, before) in zip(self._groups, rates, strict=True):
            group["lr"] = lr * (now / before) if before else lr

    def _repeat(self, num_steps: int) -> None:
        """Step the new scheduler as often as that of the checkpoint was stepped."""
        # OneCycleLR refuses more steps than a shorter plan has: then none is left to take.
        with warnings.catch_warnings(), suppress(ValueError):
            # Torch warns of steps without one of the optimizer, which the run before has taken.
            warnings.simplefilter("ignore")
            for _ in range(num_steps):
                self.scheduler.step()


def _kind_of(scheduler: LRScheduler) -> str:
    """Return the class that a checkpoint names. A subclass of a plateau is one, too."""
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    return "ReduceLROnPlateau" if is_plateau else type(scheduler).__name__


def _num_steps(state: dict[str, Any]) -> int:
    """Return how often a scheduler was stepped; a ChainedScheduler was as often as its parts."""
    while "last_epoch" not in state:
        state = state["_schedulers"][0]
    return int(state["last_epoch"])


@dataclass(frozen=True)
class Ledger:
    """The arithmetic of a run. None: not known in advance, as for a stream without a length.

    `leftover`: samples that an epoch drops (< 0) or repeats (> 0). `order`: the class of the task's
    sampler or stream; empty if the samples are shuffled by the seed.
    """

    micro_batch: int
    accumulate: int
    ranks: int
    samples: int | None
    leftover: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    lr_before: list[float]
    lr_after: list[float]
    lr_scaling: str
    schedule: str
    warmup_steps: int
    samples_by_rank: list[int] | None = None
    order: str = ""
    lr_at_start: list[float] | None = None
    """The rates of the first step, by parameter group; None if the schedule does not tell."""
    lr_after_warmup: list[float] | None = None
    lr_at_end: list[float] | None = None
    """The rates of the last step: as planned, and at the end of the run as used."""

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch * self.accumulate * self.ranks

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, for run.json."""
        return {**asdict(self), "global_batch": self.global_batch}

    def lines(self) -> list[str]:
        """Return a line each about the batch, the steps and the learning rate, for printing."""
        accumulated = f" x {self.accumulate} accumulated" if self.accumulate > 1 else ""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        uneven = f"every sample {'of the order ' if self.order else ''}once an epoch"
        if self.leftover is None:
            uneven = "the data are a stream"
        elif self.leftover:
            what = "dropped" if self.leftover < 0 else "repeated"
            uneven = f"{abs(self.leftover)} of {self.samples} samples {what} each epoch"
        before, after = format_rates(self.lr_before), format_rates(self.lr_after)
        scaled = "" if before == after else f" -> {after}"
        scaling = "not scaled" if self.lr_scaling == "none" else f"{self.lr_scaling} scaling"
        warmup = f", {self.warmup_steps} steps of warm-up" if self.warmup_steps else ""
        order = []
        if self.order:
            parts = ", ".join(map(str, self.samples_by_rank or []))
            by_rank = f"; samples of an epoch by rank: {parts}" if parts else ""
            order = [f"data     in the order of {self.order}{by_rank}"]
        total, each = (_known(n) for n in (self.total_steps, self.steps_per_epoch))
        return [
            f"batch    {self.micro_batch} samples{accumulated} x {ranks} = "
            f"{self.global_batch} a step",
            f"steps    {total} ({each} an epoch); {uneven}",
            *order,
            f"lr       {before}{scaled} ({scaling}), {self.schedule}{warmup}{self._course()}",
        ]

    def _course(self) -> str:
        """Return the rates at the start, after the warm-up and at the end; "" if all are one."""
        warmup = self.lr_after_warmup if self.warmup_steps else None
        course = ((self.lr_at_start, "at the start"), (warmup, "after warm-up"))
        known = [(lrs, when) for lrs, when in (*course, (self.lr_at_end, "at the end")) if lrs]
        if all(lrs == self.lr_after for lrs, _ in known):
            return ""
        return "; " + ", ".join(f"{format_rates(lrs)} {when}" for lrs, when in known)


def format_rates(lrs: list[float]) -> str:
    """Return the learning rates of all parameter groups, for people."""
    return ", ".join(f"{lr:.6g}" for lr in lrs)


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


class Plan:
    """The plan of a run from its current progress. No method is collective.

    The values that it is made of are equal on all ranks, so the plans are.
    """

    def __init__(
        self,
        config: TrainConfig,
        num_ranks: int,
        batches: EpochBatches,
        progress: Progress,
        optimizer: Optimizer,
        lrs: tuple[list[float], list[float]],
    ) -> None:
        """`lrs`: the rates of the parameter groups, before and after scaling."""
        self._config = config
        self._batches = batches
        self._progress = progress
        self._optimizer, self._lrs = optimizer, lrs[1]
        per_epoch, total = self._steps_left(0), config.max_steps  # 0: not known
        done = per_epoch - self._steps_left(progress.sample)
        if per_epoch:
            # Not `epochs * per_epoch`: before a resume, steps may have had another batch size.
            whole = max(0, config.max_epochs() - progress.epoch)
            planned = progress.step + whole * per_epoch - done * (whole > 0)
            total = planned if total is None else min(planned, total)
        self._ahead = progress.epoch * per_epoch + done - progress.step
        """The progress in epochs, as a number of this run's steps, minus the step's number: not 0
        after a resume at another batch size.
        """
        self.ledger = Ledger(
            batches.batch_size,
            config.accumulate,
            num_ranks,
            batches.num_samples,
            batches.leftover(),
            per_epoch or None,
            total,
            *lrs,
            config.lr_scaling,
            config.schedule,
            config.warmup_steps,
            samples_by_rank=batches.samples_by_rank(),
            order=batches.order_name,
        )
        if total is not None:
            warmup, last = config.warmup_steps, max(0, total - 1)
            is_plateau = config.schedule_option().kind == "plateau"
            self.ledger = replace(
                self.ledger,
                lr_at_start=self._rates(0),
                lr_after_warmup=self._rates(warmup) if warmup <= last else None,
                lr_at_end=None if is_plateau else self._rates(last, self._ahead),
            )

    def _factors(self, ahead: int = 0) -> Callable[[int], float]:
        ledger = self.ledger
        total, per_epoch = ledger.total_steps or 0, ledger.steps_per_epoch or 0
        return lr_factors(self._config, total, per_epoch, ahead)

    def _rates(self, step: int, ahead: int = 0) -> list[float]:
        """Return the rates that a step is planned with, by parameter group."""
        factor = self._factors(ahead)(step)
        return [lr * factor for lr in self._lrs]

    def _steps_left(self, sample: int) -> int:
        """Return the number of steps from position `sample` to the end of an epoch."""
        return -(-self._batches.batches_from(sample) // self._config.accumulate)

    def make_schedule(
        self, task: Task, checked: CheckedTask, loaded: dict[str, Any]
    ) -> RateSchedule:
        """Return the task's own schedule, else that of the options, at the current step, and write
        it into the ledger. `loaded`: the trainer's part of a checkpoint, or empty.

        Raises InputError, and CheckpointError for the state of another schedule, on every rank.
        """
        self._check_schedule(checked.has_schedule)
        total, per_epoch = self.ledger.total_steps or 0, self.ledger.steps_per_epoch or 0
        if loaded:  # the rates are those of this run's options, not those of the checkpoint
            self._set_lrs(self._lrs)
        own = self._make_own(checked, per_epoch, total)
        if own is not None:
            if self._config.warmup_steps:
                raise InputError(
                    f"--warmup-steps {self._config.warmup_steps} has no effect on the schedule of "
                    f"the task, a {type(own).__name__}; leave --warmup-steps out, and put the "
                    "warm-up into the task's schedule",
                    on_all_ranks=True,
                )
            unit: Unit = "epoch" if task.schedule_unit == "epoch" else "step"
            schedule = RateSchedule(own, unit, True, task.schedule_metric)
            start = None if loaded else [float(g["lr"]) for g in self._optimizer.param_groups]
            self.ledger = replace(
                self.ledger,
                schedule="the task's own",
                warmup_steps=0,
                lr_at_start=start,
                lr_after_warmup=None,
                lr_at_end=None,
            )
        elif (watched := self._config.schedule_option().criterion) is not None:
            schedule = self._make_plateau(watched)
        else:
            return RateSchedule(self._make_step_schedule())
        if loaded.get("schedule") is not None:
            schedule.load_state_dict(loaded["schedule"])
        return schedule

    def _make_own(self, checked: CheckedTask, per_epoch: int, total: int) -> LRScheduler | None:
        """Return the task's own schedule, if it has one. Raises InputError if options give the rate
        and it begins with another: one that is built at twice the rate begins with the same.
        """
        option = f"--lr {self._config.lr:g}" if self._config.lr is not None else ""
        if not option and self.ledger.lr_before != self._lrs:
            option = f"--lr-scaling {self._config.lr_scaling}"
        begins = []
        for factor in (2, 1) if option else ():
            self._set_lrs([factor * lr for lr in self._lrs])
            own = checked.schedule(self._optimizer, per_epoch, total)
            initial = [group["initial_lr"] for group in self._optimizer.param_groups]
            begins.append(getattr(own, "base_lrs", initial))
        if begins and begins[0] == begins[1]:
            raise InputError(
                f"{option} has no effect on the schedule of the task, a {type(own).__name__}, "
                "which sets its rates itself; leave it out, or make the schedule of "
                "optimizer.param_groups[0]['lr']",
                on_all_ranks=True,
            )
        return own if begins else checked.schedule(self._optimizer, per_epoch, total)

    def _set_lrs(self, lrs: list[float]) -> None:
        for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
            group["lr"] = group["initial_lr"] = lr

    def _make_plateau(self, watched: Criterion) -> RateSchedule:
        """Return the schedule of `--schedule plateau`, which may have a warm-up before."""
        config, factor = self._config, self._config.schedule_option().factor
        mode: Any = watched.mode
        # At the rates after the warm-up.
        plateau = ReduceLROnPlateau(self._optimizer, mode, factor, watched.patience)
        name = f"plateau of {watched.metric} ({watched.mode}, patience {watched.patience})"
        self.ledger = replace(self.ledger, schedule=name)
        warming = self._progress.step < config.warmup_steps
        warmup = self._make_step_schedule() if warming else None
        return RateSchedule(plateau, "step", True, watched.metric, warmup, config.warmup_steps)

    def _make_step_schedule(self) -> LRScheduler:
        """Return the scheduler of the options at the current step: a function of the step, which
        needs no saved state.
        """
        factor = self._factors(self._ahead)
        # The constructor of LambdaLR takes one step, to the current one.
        return LambdaLR(self._optimizer, factor, last_epoch=self._progress.step - 1)

    def _check_schedule(self, has_own: bool) -> None:
        """Raise InputError for a schedule that needs a number of steps which is not known."""
        schedule = self._config.schedule_option().kind
        if self.ledger.total_steps is None and schedule in ("cosine", "one-cycle"):
            fix = "give --max-steps, or give the dataset a method __len__"
        elif self.ledger.steps_per_epoch is None and (schedule == "step" or has_own):
            schedule = "step" if schedule == "step" else "the task's own"
            fix = "give the dataset a method __len__"
        else:
            return
        raise InputError(
            f"the learning-rate schedule ({schedule}) needs the number of steps, which a stream "
            f"does not say; {fix}",
            on_all_ranks=True,
        )
