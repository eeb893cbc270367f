"""Learning-rate scaling and schedules. Both are chosen by options and printed in the ledger.

The Trainer steps a `RateSchedule` after each step, epoch or evaluation. There are two kinds. A
function of the step (constant, cosine, step, one-cycle) needs no saved state: a resumed run
computes it anew. The state of the others (plateau, and any of a task's own) is in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hvdtrain.errors import CheckpointError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.criterion import number_of

Unit = Literal["step", "epoch", "evaluation"]

# torch's defaults of OneCycleLR: the part of the run in which the rate rises, and the factors by
# which the first and the last rate are smaller than the highest.
_RISE, _FIRST, _LAST = 0.3, 25.0, 25.0 * 1e4

# The progress of a ReduceLROnPlateau. The rest of its state_dict are its options, which are this
# run's and not the checkpoint's.
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


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

    Returns the rates before and after scaling, by parameter group.
    """
    before = [float(group["lr"]) if lr is None else lr for group in optimizer.param_groups]
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

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if config.schedule == "cosine":
            span = max(1, total_steps - config.warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - config.warmup_steps) / span)))
        if config.schedule == "step":
            done = step + ahead
            drops = sum(done >= drop * steps_per_epoch for drop in config.drop_epochs())
            return float(config.step_factor**drops)
        if config.schedule == "one-cycle":
            return _one_cycle(step, total_steps)
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
        "lr_at_end": None if config.schedule == "plateau" else at(last, ahead),
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


def build_plateau(optimizer: Optimizer, config: TrainConfig) -> ReduceLROnPlateau:
    """Return torch's scheduler for `--schedule plateau`. Build it at the rates after warm-up."""
    watched = config.plateau_criterion()
    mode: Any = watched.mode
    return ReduceLROnPlateau(optimizer, mode, config.step_factor, watched.patience)


class RateSchedule:
    """The learning rate of a run: a scheduler, and when it is stepped.

    `unit`: after each step, epoch or evaluation; for a ReduceLROnPlateau always evaluation, with
    `metric`. `warmup` is stepped first, for `warmup_steps` steps; evaluations do not count in
    these. `has_state`: the scheduler's state belongs into checkpoints. No method is collective:
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
        self.scheduler = scheduler
        self.has_state = has_state
        self.unit: Unit = "evaluation" if isinstance(scheduler, ReduceLROnPlateau) else unit
        self._metric = metric
        self._warmup, self._warmup_steps = warmup, warmup_steps
        # Attributes, not methods: a step costs no more than the scheduler's own.
        self.after_step: Callable[[], None] = _nothing
        if self.unit == "step":
            self.after_step = scheduler.step
        elif warmup is not None:
            self.after_step = self._warm_up
        self.after_epoch: Callable[[], None] = scheduler.step if self.unit == "epoch" else _nothing

    def after_evaluation(self, metrics: Mapping[str, Any], step: int) -> None:
        """Step a ReduceLROnPlateau. Raises InputError, on every rank, if its metric is missing."""
        if isinstance(self.scheduler, ReduceLROnPlateau) and step >= self._warmup_steps:
            self.scheduler.step(number_of(metrics, self._metric, "the schedule"))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None if the rate is a function of the step."""
        if not self.has_state:
            return None
        state = self.scheduler.state_dict()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            state = {key: state[key] for key in _PLATEAU_STATE}
            state["last_lrs"] = [float(lr) for lr in self.scheduler.get_last_lr()]
            state["base_lrs"] = self._base_lrs()
        return state

    def load_state_dict(self, saved: dict[str, Any], loaded: list[dict[str, Any]]) -> None:
        """Continue from the state of a checkpoint, at this run's learning rates.

        `loaded`: the parameter groups of the checkpoint. Raises CheckpointError for the state of
        another kind of schedule.
        """
        is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        if is_plateau != ("num_bad_epochs" in saved):
            raise CheckpointError(
                "the checkpoint has the state of another schedule than "
                f"{type(self.scheduler).__name__}; resume with the schedule that it was saved with",
                on_all_ranks=True,
            )
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self._continue_plateau(self.scheduler, saved)
        else:
            continue_schedule(self.scheduler, saved, loaded)

    def _continue_plateau(self, plateau: ReduceLROnPlateau, saved: dict[str, Any]) -> None:
        rates = zip(self._base_lrs(), saved["base_lrs"], saved["last_lrs"], strict=True)
        scaled = [last * (now / base if base else 1.0) for now, base, last in rates]
        plateau.load_state_dict({**{key: saved[key] for key in _PLATEAU_STATE}, "_last_lr": scaled})
        if self._warmup is None:
            for group, lr in zip(plateau.optimizer.param_groups, scaled, strict=True):
                group["lr"] = lr

    def _base_lrs(self) -> list[float]:
        return [float(group["initial_lr"]) for group in self.scheduler.optimizer.param_groups]

    def _warm_up(self) -> None:
        assert self._warmup is not None
        if self._warmup.last_epoch < self._warmup_steps:
            self._warmup.step()


def _nothing() -> None:
    pass


def continue_schedule(
    own: LRScheduler, saved: dict[str, Any], loaded_groups: list[dict[str, Any]]
) -> None:
    """Restore the state of a task's own scheduler, scaled to this run's learning rates.

    `loaded_groups`: the parameter groups of the checkpoint. The scheduler's constructor has changed
    the optimizer's own: `lr`, and for some schedulers momentum or betas.
    """
    base_now = list(own.base_lrs)
    own.load_state_dict(saved)
    rates = zip(own.base_lrs, own.get_last_lr(), base_now, strict=True)
    scaled = [last * (now / base if base else 1.0) for base, last, now in rates]
    own.base_lrs = base_now
    for group, before, lr in zip(own.optimizer.param_groups, loaded_groups, scaled, strict=True):
        # Everything but the rates (initial_lr, max_lr, ...): those are this run's.
        kept = {k: v for k, v in before.items() if k != "params" and not k.endswith("lr")}
        group.update(kept, lr=lr)
