"""Learning-rate scaling and schedules. Both are chosen by options and printed in the ledger.

The Trainer steps a `RateSchedule` after each step, epoch or evaluation. There are two kinds. A
function of the step (constant, cosine, step, one-cycle) needs no saved state: a resumed run
computes it anew. The state of the others (plateau, and any of a task's own) is in checkpoints, as
torch's own `state_dict` gives it. That contains the numbers of the plan it was built for, such as
`T_max`: a run with another number of steps builds it anew and steps it to where it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hvdtrain.errors import CheckpointError, InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.criterion import Criterion, number_of

Unit = Literal["step", "epoch", "evaluation"]

# torch's defaults of OneCycleLR: the part of the run in which the rate rises, and the factors by
# which the first and the last rate are smaller than the highest.
_RISE, _FIRST, _LAST = 0.3, 25.0, 25.0 * 1e4

# The progress of a ReduceLROnPlateau. The rest of its state_dict are its options, which are this
# run's and not the checkpoint's.
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")


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


def planned_rates(
    config: TrainConfig, lrs: list[float], total_steps: int, steps_per_epoch: int, ahead: int
) -> dict[str, Any]:
    """Return the rates at the start, after the warm-up and at the end, for the ledger.

    `lrs`: those of the parameter groups, scaled. `ahead`: see `lr_factors`.
    """

    def at(step: int, ahead: int = 0) -> list[float]:
        factor = lr_factors(config, total_steps, steps_per_epoch, ahead)(step)
        return [lr * factor for lr in lrs]

    warmup, last = config.warmup_steps, max(0, total_steps - 1)
    return {
        "lr_at_start": at(0),
        "lr_after_warmup": at(warmup) if warmup <= last else None,
        "lr_at_end": None if config.schedule_option().kind == "plateau" else at(last, ahead),
    }


def build_schedule(
    optimizer: Optimizer,
    config: TrainConfig,
    start_step: int,
    total_steps: int,
    steps_per_epoch: int,
    ahead: int = 0,
) -> LRScheduler:
    """Return a scheduler that warms up, then holds, anneals or drops the learning rate.

    It is a function of the step, so it needs no saved state. The optimizer's groups must have
    `initial_lr`. `ahead`: see `lr_factors`.
    """
    factor = lr_factors(config, total_steps, steps_per_epoch, ahead)
    # The constructor of LambdaLR takes one step, to `start_step`.
    return LambdaLR(optimizer, factor, last_epoch=start_step - 1)


def build_plateau(optimizer: Optimizer, criterion: Criterion, factor: float) -> ReduceLROnPlateau:
    """Return torch's scheduler for `--schedule plateau`. Build it at the rates after warm-up."""
    mode: Any = criterion.mode
    return ReduceLROnPlateau(optimizer, mode, factor, criterion.patience)


class RateSchedule:
    """The learning rate of a run: a scheduler of torch, and when it is stepped.

    `unit`: after each step, epoch or evaluation; for a ReduceLROnPlateau always evaluation, with
    `metric`. `warmup` is stepped first, for `warmup_steps` steps; evaluations do not count in
    these. `has_state`: the scheduler's state belongs into checkpoints. No method is collective:
    evaluations have the same bits on all ranks, so every rank sets the same rate.

    `plan`: the steps of an epoch and of the run that the scheduler is built for.

    A run that resumes at another learning rate steps the scheduler at the rates of the checkpoint,
    and multiplies what it sets: so any scheduler follows, also one that is made of others.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        unit: Unit = "step",
        has_state: bool = False,
        metric: str = "loss",
        warmup: LRScheduler | None = None,
        warmup_steps: int = 0,
        plan: tuple[int, int] = (0, 0),
    ) -> None:
        self.scheduler = scheduler
        self._plan = plan
        self.has_state = has_state
        self.unit: Unit = "evaluation" if isinstance(scheduler, ReduceLROnPlateau) else unit
        self._metric = metric
        self._warmup, self._warmup_steps = warmup, warmup_steps
        # Not 0, the first rate of many a warm-up: the rates of two runs are divided.
        self._start_lrs = [
            float((warmup is None and group["lr"]) or group.get("initial_lr", 0))
            for group in scheduler.optimizer.param_groups
        ]
        """The rates that the scheduler starts with; after a resume, those of the first run."""
        self._ratios: list[float] = []
        """This run's rates by the scheduler's, by parameter group; empty if they are the same."""
        self._unscaled: list[float] = []
        """The rates that the scheduler has set, if there are ratios."""
        self._choose_methods()

    def _choose_methods(self) -> None:
        # Attributes, not methods: a step costs no more than the scheduler's own.
        step: Any = self._step_scaled if self._ratios else self.scheduler.step
        self.after_step: Callable[[], None] = _nothing
        if self.unit == "step":
            self.after_step = step
        elif self._warmup is not None:
            self.after_step = self._warm_up
        self.after_epoch: Callable[[], None] = step if self.unit == "epoch" else _nothing
        self._step_plateau: Callable[[float], None] = step

    @property
    def watched(self) -> str | None:
        """The metric that a ReduceLROnPlateau is stepped with; None for other schedules."""
        return self._metric if self.unit == "evaluation" else None

    def after_evaluation(self, metrics: Mapping[str, Any], step: int) -> None:
        """Step a ReduceLROnPlateau. Raises InputError, on every rank, if its metric is missing."""
        if self.unit == "evaluation" and step >= self._warmup_steps:
            self._step_plateau(number_of(metrics, self._metric, "the schedule"))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None if the rate is a function of the step."""
        if not self.has_state:
            return None
        return {
            "kind": _kind_of(self.scheduler),
            "plan": list(self._plan),
            "state": self.scheduler.state_dict(),
            "start_lrs": self._start_lrs,
            # In a warm-up not the rates of the moment: the run may be resumed with a shorter one.
            "lrs": self._start_lrs if self._is_warming_up() else self._unscaled or self._lrs(),
        }

    def load_state_dict(self, saved: dict[str, Any], loaded: list[dict[str, Any]]) -> None:
        """Continue from the state of a checkpoint, at this run's learning rates; after a change of
        the plan as a run that has had the new plan from its first step.

        `loaded`: the parameter groups of the checkpoint. Raises CheckpointError for the state of
        another kind of schedule.
        """
        own = _kind_of(self.scheduler)
        try:
            if "start_lrs" not in saved:
                saved = _from_raw_state(saved, loaded, self.scheduler, self._start_lrs)
            kind, state = saved["kind"], saved["state"]
            if kind != own:
                raise CheckpointError(
                    f"the checkpoint has the state of another schedule ({kind}) than {own}; resume "
                    "with the schedule that it was saved with",
                    on_all_ranks=True,
                )
            if self.unit != "evaluation" and tuple(saved.get("plan", self._plan)) != self._plan:
                self._replay(_num_steps(state))
                return
            if self.unit == "evaluation":
                state = {key: state[key] for key in _PLATEAU_STATE if key in state}
            self.scheduler.load_state_dict(state)
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint has the state of another {own}: {type(error).__name__}: {error}; "
                "resume with the schedule that it was saved with",
                on_all_ranks=True,
            ) from None
        if self._warmup is not None:
            return  # the rate is that of the warm-up, a function of the step
        now, before = self._start_lrs, saved["start_lrs"]
        ratios = [a / b if b else 1.0 for a, b in zip(now, before, strict=True)]
        # Some constructors have changed more of a group than its rate: momentum, betas, max_lr.
        for group, kept in zip(self.scheduler.optimizer.param_groups, loaded, strict=True):
            group.update({key: value for key, value in kept.items() if key != "params"})
        self._start_lrs = list(before)
        self._set_lrs(saved["lrs"])
        if any(ratio != 1.0 for ratio in ratios):
            self._ratios = ratios
            self._scale()
            self._choose_methods()

    def _replay(self, num_steps: int) -> None:
        """Step the new scheduler as often as that of the checkpoint was stepped."""
        # OneCycleLR refuses more steps than a shorter plan has: then none is left to take.
        with warnings.catch_warnings(), suppress(ValueError):
            # Torch warns of steps without one of the optimizer, which the run before has taken.
            warnings.simplefilter("ignore")
            for _ in range(num_steps):
                self.scheduler.step()

    def _step_scaled(self, *metric: Any) -> None:
        """Step the scheduler at its own rates, then multiply those that it has set."""
        self._set_lrs(self._unscaled)
        self.scheduler.step(*metric)
        self._scale()

    def _scale(self) -> None:
        self._unscaled = self._lrs()
        self._set_lrs([a * b for a, b in zip(self._unscaled, self._ratios, strict=True)])

    def _lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]

    def _set_lrs(self, lrs: list[float]) -> None:
        for group, lr in zip(self.scheduler.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr

    def _is_warming_up(self) -> bool:
        return self._warmup is not None and self._warmup.last_epoch < self._warmup_steps

    def _warm_up(self) -> None:
        if self._warmup is not None and self._is_warming_up():
            self._warmup.step()


def _nothing() -> None:
    pass


def _kind_of(scheduler: LRScheduler) -> str:
    """Return the class that a checkpoint names. A subclass of a plateau is one, too."""
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    return "ReduceLROnPlateau" if is_plateau else type(scheduler).__name__


def _num_steps(state: dict[str, Any]) -> int:
    """Return how often a scheduler was stepped; a ChainedScheduler was as often as its parts."""
    while "last_epoch" not in state:
        state = state["_schedulers"][0]
    return int(state["last_epoch"])


def _from_raw_state(
    saved: dict[str, Any], loaded: list[dict[str, Any]], own: LRScheduler, start_lrs: list[float]
) -> dict[str, Any]:
    """Return what an earlier hvdtrain saved in the form of `RateSchedule.state_dict`: the state
    alone, of a plateau with `last_lrs`. The rates of its run are in the `loaded` groups.
    """
    groups = zip(own.optimizer.param_groups, loaded, strict=True)
    ratios = [
        before["initial_lr"] / group["initial_lr"] if group["initial_lr"] else 1.0
        for group, before in groups
    ]
    is_plateau = "num_bad_epochs" in saved
    kind = "ReduceLROnPlateau" if is_plateau else _kind_of(own)
    if isinstance(own, ReduceLROnPlateau) and not is_plateau:
        kind = "one without a metric"
    return {
        "kind": kind,
        "state": saved,
        "start_lrs": [lr * ratio for lr, ratio in zip(start_lrs, ratios, strict=True)],
        "lrs": saved["last_lrs" if is_plateau else "_last_lr"],
    }
