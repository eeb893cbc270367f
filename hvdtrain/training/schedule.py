"""The learning rate of a run: `Schedule` plans the steps, and sets the rate of each.

A scheduler is built anew from the plan of this run, and is then given its progress. Those of the
options (constant, cosine, step, one-cycle) are functions of the step; one of the task's own is
stepped as often as the run has had steps, or epochs. So both follow the new plan and the new rates.
Of a plateau alone a checkpoint has a state: what evaluations have decided. The `Ledger` is the plan
in numbers: rank 0 prints it once at the start, and stores it in run.json.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hvdtrain.errors import CheckpointError, InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.criterion import number_of
from hvdtrain.training.data.order import EpochBatches
from hvdtrain.training.progress import Progress
from hvdtrain.training.task import CheckedTask

# torch's defaults of OneCycleLR: the part of the run in which the rate rises, and the factors by
# which the first and the last rate are smaller than the highest.
_RISE, _FIRST, _LAST = 0.3, 25.0, 25.0 * 1e4

_PLATEAU = "ReduceLROnPlateau"
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
    before = _current_lrs(optimizer)
    if lr is not None:
        first = before[0]
        if first == 0 and any(before):
            raise InputError(
                f"--lr {lr:g} replaces the rate of the optimizer's first group, which is 0 and has "
                "no ratio to the rates of the other groups; leave --lr out",
                on_all_ranks=True,
            )
        before = [lr * (rate / first) if first else lr for rate in before]
    after = [value * factor for value in before]
    _set_lrs(optimizer, after)
    return before, after


def _current_lrs(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _set_lrs(optimizer: Optimizer, lrs: list[float]) -> None:
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = group["initial_lr"] = lr


def lr_factors(
    config: TrainConfig, total_steps: int, steps_per_epoch: int, ahead: int = 0
) -> Callable[[int], float]:
    """Return the function from a step to the factor of the learning rate that it is taken with.

    `ahead`: by how many of this run's steps the progress in epochs exceeds the number of the step;
    not 0 after a resume at another batch size.
    """
    schedule, warmup_steps = config.schedule_option(), config.warmup_steps
    last = total_steps - 1
    peak = _RISE * total_steps - 1

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if schedule.kind == "cosine":
            return _anneal(1.0, 0.0, step - warmup_steps, max(1, total_steps - warmup_steps))
        if schedule.kind == "one-cycle":  # torch's OneCycleLR, without the cycle of momentum
            if step < peak:
                return _anneal(1 / _FIRST, 1.0, step, peak)
            return _anneal(1.0, 1 / _LAST, step - peak, last - peak)
        # Constant and plateau have no epochs after which the rate drops.
        drops = sum(step + ahead >= epoch * steps_per_epoch for epoch in schedule.epochs)
        return float(schedule.factor**drops)

    return factor


def _anneal(start: float, end: float, done: float, span: float) -> float:
    """Return the value after `done` of `span` steps on half a cosine from `start` to `end`."""
    return end + (start - end) / 2 * (math.cos(math.pi * min(1.0, done / span)) + 1)


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
    lr_at_end: list[float] | None = None
    """The rates that the last step is planned with; None if evaluations or the task decide."""

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
        lines = [
            f"batch    {self.micro_batch} samples{accumulated} x {ranks} = "
            f"{self.global_batch} a step"
        ]
        uneven = f"every sample {'of the order ' if self.order else ''}once an epoch"
        if self.leftover is None:
            uneven = "the data are a stream"
        elif self.leftover:
            what = "dropped" if self.leftover < 0 else "repeated"
            uneven = f"{abs(self.leftover)} of {self.samples} samples {what} each epoch"
        total, each = self.total_steps or "?", self.steps_per_epoch or "?"
        lines.append(f"steps    {total} ({each} an epoch); {uneven}")
        if self.order:
            parts = ", ".join(map(str, self.samples_by_rank or []))
            by_rank = f"; samples of an epoch by rank: {parts}" if parts else ""
            lines.append(f"data     in the order of {self.order}{by_rank}")
        rate, scaled = _format_rates(self.lr_before), _format_rates(self.lr_after)
        rate += "" if rate == scaled else f" -> {scaled}"
        scaling = "not scaled" if self.lr_scaling == "none" else f"{self.lr_scaling} scaling"
        warmup = f", {self.warmup_steps} steps of warm-up" if self.warmup_steps else ""
        course = {"at the start": self.lr_at_start, "at the end": self.lr_at_end}
        known = {when: lrs for when, lrs in course.items() if lrs}
        rates = ""
        if any(lrs != self.lr_after for lrs in known.values()):
            rates = "; " + ", ".join(f"{_format_rates(known[when])} {when}" for when in known)
        lines.append(f"lr       {rate} ({scaling}), {self.schedule}{warmup}{rates}")
        return lines


def _format_rates(lrs: list[float]) -> str:
    """Return the learning rates of all parameter groups, for people."""
    return ", ".join(f"{lr:.6g}" for lr in lrs)


@dataclass
class Schedule:
    """The plan of a run, and the schedulers of torch that set its learning rates.

    The constructor takes what the plan depends on; `start` makes it, once the progress is loaded.
    No method is collective: what it is made of is equal on all ranks, and evaluations have the same
    bits on all of them, so every rank sets the same rate.
    """

    task: CheckedTask
    config: TrainConfig
    num_ranks: int
    batches: EpochBatches
    progress: Progress
    optimizer: Optimizer
    lrs_before: list[float]
    """The rates of the parameter groups, before scaling."""
    lrs: list[float]
    """The same after scaling."""

    def start(self, loaded: dict[str, Any]) -> None:
        """Plan the rest of the run, and make its scheduler: the task's own, else that of the
        options. `loaded`: the trainer's part of a checkpoint, or empty.

        Raises InputError, on every rank, if it needs a number of steps that is not known.
        """
        config, optimizer, batches = self.config, self.optimizer, self.batches
        per_epoch, total, ahead = self._count_steps()
        if loaded:  # the rates are those of this run's options, not those of the checkpoint
            _set_lrs(optimizer, self.lrs)
        own = self._make_own(per_epoch, total)
        name, start, end = "the task's own", None, None
        self.watched: str | None = None
        """The metric that a ReduceLROnPlateau is stepped with; None for other schedulers."""
        self._plateau: Any = own
        """The ReduceLROnPlateau, if there is a metric. Evaluations in a warm-up do not count."""
        self._unit = "step"
        """After what the scheduler is stepped: a `step`, an `epoch`, or an `evaluation`: then
        `_scheduler` is the warm-up before it.
        """
        if own is not None:
            self._scheduler: LRScheduler = own
            self._unit = self.task.wrapped.schedule_unit
            if isinstance(own, ReduceLROnPlateau):
                self.watched = self.task.wrapped.schedule_metric
            if not loaded:
                start = _current_lrs(optimizer)
        else:
            name, factor = config.schedule, lr_factors(config, total, per_epoch, ahead)
            start = [lr * lr_factors(config, total, per_epoch)(0) for lr in self.lrs]
            # The constructor takes one step, to the current one.
            self._scheduler = LambdaLR(optimizer, factor, last_epoch=self.progress.step - 1)
            option = config.schedule_option()
            criterion: Any = option.criterion
            if criterion is not None:
                self.watched = criterion.metric
                about = criterion.mode, option.factor, criterion.patience
                self._plateau = ReduceLROnPlateau(optimizer, *about)
            elif total:
                end = [lr * factor(total - 1) for lr in self.lrs]
        if self.watched is not None:
            self._unit = "evaluation"
            if saved := loaded.get("schedule"):  # else the run before had another schedule
                self._continue_plateau(saved)
        elif own is not None:
            # Step it as often as those of the runs before were stepped. OneCycleLR refuses more
            # steps than a shorter plan has: then none is left to take.
            progress = self.progress
            with warnings.catch_warnings(), suppress(ValueError):
                # Torch warns of steps without one of the optimizer, which the run before has taken.
                warnings.simplefilter("ignore")
                for _ in range(progress.epoch if self._unit == "epoch" else progress.step):
                    own.step()
        self.ledger = Ledger(
            batches.batch_size,
            config.accumulate,
            self.num_ranks,
            batches.num_samples,
            batches.leftover(),
            per_epoch or None,
            total or None,
            self.lrs_before,
            self.lrs,
            config.lr_scaling,
            name,
            config.warmup_steps,
            batches.samples_by_rank(),
            batches.order_name,
            start,
            end,
        )

    def _count_steps(self) -> tuple[int, int, int]:
        """Return the steps of an epoch and of the run, 0 if they are not known; and the progress in
        epochs, as a number of this run's steps, minus the step's number: not 0 after a resume at
        another batch size. Raises InputError for a schedule that needs a number which is not known.
        """
        config, progress = self.config, self.progress
        per_epoch, total = self._steps_left(0), config.max_steps or 0
        done = per_epoch - self._steps_left(progress.sample)
        if per_epoch:
            # Not `epochs * per_epoch`: before a resume, steps may have had another batch size.
            whole = max(0, config.max_epochs() - progress.epoch)
            planned = progress.step + whole * per_epoch - done * (whole > 0)
            total = min(planned, total or planned)
        kind = "the task's own" if self.task.has_schedule else config.schedule_option().kind
        known = total if kind in ("cosine", "one-cycle") else per_epoch
        if not (known or kind in ("constant", "plateau")):
            raise InputError(
                f"the learning-rate schedule ({kind}) needs the "
                "number of steps, which a stream does not know; give the dataset a method __len__, "
                "or, for cosine and one-cycle, --max-steps",
                on_all_ranks=True,
            )
        return per_epoch, total, progress.epoch * per_epoch + done - progress.step

    def _steps_left(self, sample: int) -> int:
        """Return the number of steps from position `sample` to the end of an epoch."""
        return -(-self.batches.batches_from(sample) // self.config.accumulate)

    def _make_own(self, per_epoch: int, total: int) -> LRScheduler | None:
        """Return the scheduler of the task, if it has one. Raises InputError for an option that has
        no effect on it: a warm-up, or a rate if it sets its own: one that is made at twice the rate
        begins with the same.
        """
        config, optimizer, begins = self.config, self.optimizer, list[Any]()
        option = f"--lr-scaling {config.lr_scaling}" * (self.lrs != self.lrs_before)
        option = option if config.lr is None else f"--lr {config.lr:g}"
        if option and self.task.has_schedule:
            for factor in (2.0, 1.0):
                _set_lrs(optimizer, [factor * lr for lr in self.lrs])
                own = self.task.schedule(optimizer, per_epoch, total)
                initial = [group["initial_lr"] for group in optimizer.param_groups]
                begins.append(own and getattr(own, "base_lrs", initial))
        else:
            own = self.task.schedule(optimizer, per_epoch, total)
        if own is None:
            return None
        if begins and begins[0] == begins[1]:
            fix = (
                ", which sets its rates itself; leave the option out, or make the schedule use "
                "optimizer.param_groups[0]['lr']"
            )
        elif config.warmup_steps:
            option = f"--warmup-steps {config.warmup_steps}"
            fix = "; leave --warmup-steps out, and put the warm-up into the task's schedule"
        else:
            return own
        kind = type(own).__name__
        raise InputError(
            f"{option} has no effect on the task's schedule, {kind}{fix}", on_all_ranks=True
        )

    def after_step(self) -> None:
        """Step a schedule by step, or the warm-up of a plateau."""
        if self._unit == "step" or self.progress.step <= self.config.warmup_steps:
            self._scheduler.step()

    def after_epoch(self) -> None:
        """Step a schedule by epoch."""
        if self._unit == "epoch":
            self._scheduler.step()

    def after_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Step a ReduceLROnPlateau. Raises InputError, on every rank, if its metric is missing."""
        if self.watched is not None and not self._is_warming_up():
            self._plateau.step(number_of(metrics, self.watched, "the schedule"))

    def _is_warming_up(self) -> bool:
        return self.progress.step < self.config.warmup_steps

    def state_dict(self) -> dict[str, Any] | None:
        """Return the progress of a plateau for a checkpoint; None for other schedules."""
        if self.watched is None:
            return None
        return {
            "kind": _PLATEAU,
            "state": self._plateau.state_dict(),
            "start_lrs": self.lrs,
            # In a warm-up not the rates of the moment: the run may be resumed with a shorter one.
            "lrs": self.lrs if self._is_warming_up() else _current_lrs(self.optimizer),
        }

    def _continue_plateau(self, saved: dict[str, Any]) -> None:
        """Continue from what `state_dict` has returned, at this run's rates."""
        if saved.get("kind") != _PLATEAU:
            raise CheckpointError(
                "the checkpoint has the state of another schedule, which an earlier version wrote, "
                f"not of {_PLATEAU}; start from its weights with --init-from",
                on_all_ranks=True,
            )
        state = saved["state"]
        self._plateau.load_state_dict({key: state[key] for key in _PLATEAU_STATE})
        if self._is_warming_up():
            return  # the rate is that of the warm-up, a function of the step
        rates = saved["lrs"], self.lrs, saved["start_lrs"]
        for group, lr, now, before in zip(self.optimizer.param_groups, *rates, strict=True):
            group["lr"] = lr * (now / before) if before else lr
