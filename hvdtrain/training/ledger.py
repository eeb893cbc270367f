"""The ledger: how batch size, steps and learning rate are computed.

Rank 0 prints it once at the start, and stores it in run.json.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """The arithmetic of a run. `leftover`: samples that an epoch drops (< 0) or repeats (> 0)."""

    micro_batch: int
    accumulate: int
    ranks: int
    samples: int
    leftover: int
    steps_per_epoch: int
    total_steps: int
    lr_before: list[float]
    lr_after: list[float]
    lr_scaling: str
    schedule: str
    warmup_steps: int

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
        uneven = "every sample once an epoch"
        if self.leftover:
            what = "dropped" if self.leftover < 0 else "repeated"
            uneven = f"{abs(self.leftover)} of {self.samples} samples {what} each epoch"
        before, after = (
            ", ".join(f"{lr:g}" for lr in lrs) for lrs in (self.lr_before, self.lr_after)
        )
        scaled = "" if before == after else f" -> {after}"
        scaling = "not scaled" if self.lr_scaling == "none" else f"{self.lr_scaling} scaling"
        warmup = f", {self.warmup_steps} steps of warm-up" if self.warmup_steps else ""
        return [
            f"batch    {self.micro_batch} samples{accumulated} x {ranks} = "
            f"{self.global_batch} a step",
            f"steps    {self.total_steps} ({self.steps_per_epoch} an epoch); {uneven}",
            f"lr       {before}{scaled} ({scaling}), {self.schedule}{warmup}",
        ]
