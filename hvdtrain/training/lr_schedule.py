"""Learning-rate scaling and schedules. Both are chosen by options and printed in the ledger."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hvdtrain.training.config import TrainConfig


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


def build_schedule(
    optimizer: Optimizer,
    config: TrainConfig,
    start_step: int,
    total_steps: int,
    steps_per_epoch: int,
    epoch_steps: int | None = None,
) -> LRScheduler:
    """Return a scheduler that warms up, then holds, anneals or drops the learning rate.

    It is a function of the step, so it needs no saved state. The optimizer's groups must have
    `initial_lr`. `epoch_steps` is the progress in epochs, as a number of this run's steps; it
    differs from `start_step` after a resume at another batch size.
    """
    ahead = 0 if epoch_steps is None else epoch_steps - start_step

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
        return 1.0

    # The constructor of LambdaLR takes one step, to `start_step`.
    return LambdaLR(optimizer, factor, last_epoch=start_step - 1)


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
