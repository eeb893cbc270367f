"""How many steps a run takes, and with which learning rates: its ledger and its schedule.

The Trainer makes both once, after it has loaded the state: a resumed run may have another batch
size, and its own rates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.criterion import Criterion
from hvdtrain.training.data_loading import ShardedBatches
from hvdtrain.training.ledger import Ledger
from hvdtrain.training.lr_schedule import (
    RateSchedule,
    Unit,
    build_plateau,
    build_schedule,
    planned_rates,
)
from hvdtrain.training.prepared_model import PreparedModel
from hvdtrain.training.run_state import Progress
from hvdtrain.training.streams import StreamBatches
from hvdtrain.training.task import CheckedTask, Task


class RunPlan:
    """The plan of a run from its current progress. No method is collective.

    The values that it is made of are equal on all ranks, so the plans are.
    """

    def __init__(
        self,
        config: TrainConfig,
        num_ranks: int,
        batches: ShardedBatches | StreamBatches,
        progress: Progress,
        prepared: PreparedModel,
    ) -> None:
        self._config = config
        self._batches = batches
        self._progress = progress
        self._optimizer: Optimizer = prepared.optimizer
        self._lrs = prepared.lr_after
        self._lr_option = ""
        """The option that gives the learning rate, if one does."""
        if config.lr is not None:
            self._lr_option = f"--lr {config.lr:g}"
        elif prepared.lr_before != prepared.lr_after:
            self._lr_option = f"--lr-scaling {config.lr_scaling}"
        self.ledger = self._make_ledger(num_ranks, prepared.lr_before, prepared.lr_after)

    def _make_ledger(self, num_ranks: int, lr_before: list[float], lr_after: list[float]) -> Ledger:
        config, batches = self._config, self._batches
        per_epoch = self._steps_left(0) or None
        total = config.max_steps
        if per_epoch is not None:
            total = self._total_steps(per_epoch)
        rates: dict[str, Any] = {}
        if total is not None:
            ahead = self._steps_ahead(per_epoch or 0)
            rates = planned_rates(config, lr_after, total, per_epoch or 0, ahead)
        return Ledger(
            batches.batch_size,
            config.accumulate,
            num_ranks,
            batches.num_samples,
            batches.leftover(),
            per_epoch,
            total,
            lr_before,
            lr_after,
            config.lr_scaling,
            config.schedule,
            config.warmup_steps,
            samples_by_rank=batches.samples_by_rank(),
            order=batches.order_name,
            **rates,
        )

    def _total_steps(self, per_epoch: int) -> int:
        """Return the steps of the run, with those that a resumed run has done before."""
        config = self._config
        # Not `epochs * per_epoch`: before a resume, steps may have had another batch size.
        whole = max(0, config.max_epochs() - self._progress.epoch)
        total = self._progress.step + whole * per_epoch - self._epoch_steps_done() * (whole > 0)
        if config.max_steps is not None:
            total = min(total, config.max_steps)
        return total

    def _steps_ahead(self, per_epoch: int) -> int:
        """Return the progress in epochs, as a number of this run's steps, minus the step's number.

        It is not 0 after a resume at another batch size.
        """
        progress = self._progress
        return progress.epoch * per_epoch + self._epoch_steps_done() - progress.step

    def _steps_left(self, sample: int) -> int:
        """Return the number of steps from position `sample` to the end of an epoch."""
        return -(-self._batches.batches_from(sample) // self._config.accumulate)

    def _epoch_steps_done(self) -> int:
        """Return how many steps of the current epoch are done, at this run's batch size."""
        return self._steps_left(0) - self._steps_left(self._progress.sample)

    def make_schedule(
        self, task: Task, checked: CheckedTask, loaded: dict[str, Any]
    ) -> RateSchedule:
        """Return the task's own schedule, else that of the options, at the current step, and write
        it into the ledger. `loaded`: the trainer's part of a checkpoint, or empty.

        Raises InputError, and CheckpointError for the state of another schedule, on every rank.
        """
        self._check_schedule(checked.has_schedule)
        total, per_epoch = self.ledger.total_steps or 0, self.ledger.steps_per_epoch or 0
        loaded_groups = [dict(group) for group in self._optimizer.param_groups]
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
            schedule = RateSchedule(own, unit, True, task.schedule_metric, plan=(per_epoch, total))
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
            schedule.load_state_dict(loaded["schedule"], loaded_groups)
        return schedule

    def _make_own(self, checked: CheckedTask, per_epoch: int, total: int) -> LRScheduler | None:
        """Return the task's own schedule, if it has one. Raises InputError if options give the rate
        and it begins with another: one that is built at twice the rate begins with the same.
        """
        begins = []
        for factor in (2, 1) if self._lr_option else ():
            self._set_lrs([factor * lr for lr in self._lrs])
            own = checked.schedule(self._optimizer, per_epoch, total)
            initial = [group["initial_lr"] for group in self._optimizer.param_groups]
            begins.append(getattr(own, "base_lrs", initial))
        if begins and begins[0] == begins[1]:
            raise InputError(
                f"{self._lr_option} has no effect on the schedule of the task, a "
                f"{type(own).__name__}, which sets its rates itself; leave it out, or make the "
                "schedule of optimizer.param_groups[0]['lr']",
                on_all_ranks=True,
            )
        return own if begins else checked.schedule(self._optimizer, per_epoch, total)

    def _set_lrs(self, lrs: list[float]) -> None:
        for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
            group["lr"] = group["initial_lr"] = lr

    def _make_plateau(self, watched: Criterion) -> RateSchedule:
        """Return the schedule of `--schedule plateau`, which may have a warm-up before."""
        config, factor = self._config, self._config.schedule_option().factor
        plateau = build_plateau(self._optimizer, watched, factor)  # at the rates after the warm-up
        name = f"plateau of {watched.metric} ({watched.mode}, patience {watched.patience})"
        self.ledger = replace(self.ledger, schedule=name)
        warming = self._progress.step < config.warmup_steps
        warmup = self._make_step_schedule() if warming else None
        return RateSchedule(plateau, "step", True, watched.metric, warmup, config.warmup_steps)

    def _make_step_schedule(self) -> LRScheduler:
        """Return the scheduler of the options, a function of the step, at the current step."""
        step, per_epoch = self._progress.step, self.ledger.steps_per_epoch or 0
        total, ahead = self.ledger.total_steps or 0, self._steps_ahead(per_epoch)
        return build_schedule(self._optimizer, self._config, step, total, per_epoch, ahead)

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
