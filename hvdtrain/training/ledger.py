"""The ledger: how batch size, steps and learning rate are computed.

Rank 0 prints it once at the start, and stores it in run.json.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
