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
from hvdtrain.training.criterion import Criterion, number_of
from hvdtrain.training.data.order import EpochBatches
from hvdtrain.training.progress import Progress
from hvdtrain.training.task import CheckedTask, Task

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
        """Return the rates at the start and at the end; "" if all are one."""
        course = ((self.lr_at_start, "at the start"), (self.lr_at_end, "at the end"))
        known = [(lrs, when) for lrs, when in course if lrs]
        if all(lrs == self.lr_after for lrs, _ in known):
            return ""
        return "; " + ", ".join(f"{format_rates(lrs)} {when}" for lrs, when in known)


def format_rates(lrs: list[float]) -> str:
    """Return the learning rates of all parameter groups, for people."""
    return ", ".join(f"{lr:.6g}" for lr in lrs)


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


class Schedule:
    """The plan of a run, and the scheduler of torch that sets its learning rates.

    The constructor takes what the plan depends on; `start` makes it, once the progress is loaded.
    No method is collective: what it is made of is equal on all ranks, and evaluations have the same
    bits on all of them, so every rank sets the same rate.
    """

    scheduler: LRScheduler
    ledger: Ledger

    def __init__(
        self,
        task: Task,
        checked: CheckedTask,
        config: TrainConfig,
        num_ranks: int,
        batches: EpochBatches,
        progress: Progress,
        optimizer: Optimizer,
        lrs: tuple[list[float], list[float]],
    ) -> None:
        """`lrs`: the rates of the parameter groups, before and after scaling."""
        self._task, self._checked, self._config = task, checked, config
        self._num_ranks, self._batches, self._progress = num_ranks, batches, progress
        self._optimizer, self._lrs_before, self._lrs = optimizer, *lrs
        self.watched: str | None = None
        """The metric that a ReduceLROnPlateau is stepped with; None for other schedulers."""
        self._steps_each_epoch = False
        """Whether the scheduler is stepped after each epoch, and not after each step."""
        self._warmup: LRScheduler | None = None
        """What a plateau has before it, for `--warmup-steps`. Evaluations do not count in these."""

    def start(self, loaded: dict[str, Any]) -> None:
        """Plan the rest of the run, and make its scheduler: the task's own, else that of the
        options. `loaded`: the trainer's part of a checkpoint, or empty.

        Raises InputError, on every rank, if it needs a number of steps that is not known.
        """
        config, optimizer = self._config, self._optimizer
        per_epoch, total, ahead = self._count_steps()
        self._check_steps_are_known(per_epoch, total)
        if loaded:  # the rates are those of this run's options, not those of the checkpoint
            self._set_lrs()
        own = self._make_own(per_epoch, total)
        name, start, end = "the task's own", None, None
        if own is not None:
            self._use_own(own)
            if not loaded:
                start = [float(group["lr"]) for group in optimizer.param_groups]
        else:
            name, factor = config.schedule, lr_factors(config, total, per_epoch, ahead)
            start = [lr * lr_factors(config, total, per_epoch)(0) for lr in self._lrs]
            # The constructor takes one step, to the current one.
            self.scheduler = LambdaLR(optimizer, factor, last_epoch=self._progress.step - 1)
            if (watched := config.schedule_option().criterion) is not None:
                self._follow(watched)
            elif total:
                end = [lr * factor(total - 1) for lr in self._lrs]
        if self.watched is not None:
            self._continue_plateau(loaded.get("schedule") or {})
        elif own is not None:
            self._repeat(self._progress.epoch if self._steps_each_epoch else self._progress.step)
        batches = self._batches
        self.ledger = Ledger(
            batches.batch_size,
            config.accumulate,
            self._num_ranks,
            batches.num_samples,
            batches.leftover(),
            per_epoch or None,
            total or None,
            self._lrs_before,
            self._lrs,
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
        another batch size.
        """
        config, progress = self._config, self._progress
        per_epoch, total = self._steps_left(0), config.max_steps or 0
        done = per_epoch - self._steps_left(progress.sample)
        if per_epoch:
            # Not `epochs * per_epoch`: before a resume, steps may have had another batch size.
            whole = max(0, config.max_epochs() - progress.epoch)
            planned = progress.step + whole * per_epoch - done * (whole > 0)
            total = min(planned, total or planned)
        return per_epoch, total, progress.epoch * per_epoch + done - progress.step

    def _steps_left(self, sample: int) -> int:
        """Return the number of steps from position `sample` to the end of an epoch."""
        return -(-self._batches.batches_from(sample) // self._config.accumulate)

    def _check_steps_are_known(self, per_epoch: int, total: int) -> None:
        """Raise InputError for a schedule that needs a number of steps which is not known."""
        has_own = self._checked.has_schedule
        kind = "the task's own" if has_own else self._config.schedule_option().kind
        needs_total = kind in ("cosine", "one-cycle")
        needs_epochs = kind == "step" or has_own
        if (needs_total and not total) or (needs_epochs and not per_epoch):
            raise InputError(
                f"the learning-rate schedule ({kind}) needs the "
                "number of steps, which a stream does not say; give the dataset a method __len__, "
                "or, for cosine and one-cycle, --max-steps",
                on_all_ranks=True,
            )

    def _set_lrs(self, factor: float = 1.0) -> None:
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = group["initial_lr"] = factor * lr

    def _make_own(self, per_epoch: int, total: int) -> LRScheduler | None:
        """Return the scheduler of the task, if it has one. Raises InputError if an option gives the
        rate and it sets its own: one that is made at twice the rate begins with the same.
        """
        config, begins = self._config, []
        option = f"--lr-scaling {config.lr_scaling}" * (self._lrs != self._lrs_before)
        option = option if config.lr is None else f"--lr {config.lr:g}"
        if not (option and self._checked.has_schedule):
            return self._checked.schedule(self._optimizer, per_epoch, total)
        for factor in (2.0, 1.0):
            self._set_lrs(factor)
            own = self._checked.schedule(self._optimizer, per_epoch, total)
            initial = [group["initial_lr"] for group in self._optimizer.param_groups]
            begins.append(own and getattr(own, "base_lrs", initial))
        if own is not None and begins[0] == begins[1]:
            raise InputError(
                f"{option} has no effect on the schedule of the task, a {type(own).__name__}, "
                "which sets its rates itself; leave it out, or make the schedule of "
                "optimizer.param_groups[0]['lr']",
                on_all_ranks=True,
            )
        return own

    def _use_own(self, own: LRScheduler) -> None:
        """Take the scheduler of the task. Raises InputError if a warm-up would have no effect."""
        if self._config.warmup_steps:
            raise InputError(
                f"--warmup-steps {self._config.warmup_steps} has no effect on the schedule of the "
                f"task, a {type(own).__name__}; leave --warmup-steps out, and put the warm-up into "
                "the task's schedule",
                on_all_ranks=True,
            )
        self.scheduler = own
        self._steps_each_epoch = self._task.schedule_unit == "epoch"
        if isinstance(own, ReduceLROnPlateau):
            self.watched = self._task.schedule_metric

    def _follow(self, watched: Criterion) -> None:
        """Step a ReduceLROnPlateau by evaluations, once the warm-up is over."""
        mode: Any = watched.mode
        factor = self._config.schedule_option().factor
        self._warmup = self.scheduler
        self.scheduler = ReduceLROnPlateau(self._optimizer, mode, factor, watched.patience)
        self.watched = watched.metric

    def after_step(self) -> None:
        """Step a schedule by step, or the warm-up of a plateau."""
        if self.watched is None and not self._steps_each_epoch:
            self.scheduler.step()
        elif self._warmup is not None and self._is_warming_up():
            self._warmup.step()

    def after_epoch(self) -> None:
        """Step a schedule by epoch."""
        if self.watched is None and self._steps_each_epoch:
            self.scheduler.step()

    def after_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Step a ReduceLROnPlateau. Raises InputError, on every rank, if its metric is missing."""
        if self.watched is not None and self._progress.step >= self._config.warmup_steps:
            plateau: Any = self.scheduler
            plateau.step(number_of(metrics, self.watched, "the schedule"))

    def _is_warming_up(self) -> bool:
        return self._warmup is not None and self._warmup.last_epoch < self._config.warmup_steps

    def state_dict(self) -> dict[str, Any] | None:
        """Return the progress of a plateau for a checkpoint; None for other schedules."""
        if self.watched is None:
            return None
        lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        return {
            "kind": _PLATEAU,
            "state": self.scheduler.state_dict(),
            "start_lrs": self._lrs,
            # In a warm-up not the rates of the moment: the run may be resumed with a shorter one.
            "lrs": self._lrs if self._is_warming_up() else lrs,
        }

    def _continue_plateau(self, saved: dict[str, Any]) -> None:
        """Continue from what `state_dict` has returned, at this run's rates."""
        if not saved:  # the run before had another schedule
            return
        if saved.get("kind") != _PLATEAU:
            raise CheckpointError(
                "the checkpoint has the state of another kind of schedule, as earlier versions "
                f"wrote it, than {_PLATEAU}; take its weights with --init-from",
                on_all_ranks=True,
            )
        state = saved["state"]
        self.scheduler.load_state_dict({key: state[key] for key in _PLATEAU_STATE})
        if self._is_warming_up():
            return  # the rate is that of the warm-up, a function of the step
        rates = zip(saved["lrs"], self._lrs, saved["start_lrs"], strict=True)
        for group, (lr, now, before) in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * (now / before) if before else lr

    def _repeat(self, num_steps: int) -> None:
        """Step the scheduler of the task as often as those of the runs before were stepped."""
        # OneCycleLR refuses more steps than a shorter plan has: then none is left to take.
        with warnings.catch_warnings(), suppress(ValueError):
            # Torch warns of steps without one of the optimizer, which the run before has taken.
            warnings.simplefilter("ignore")
            for _ in range(num_steps):
                self.scheduler.step()
