"""Answers of an arm's ranks to the comparison.

`worker` returns them; `arm_pool` and `block_timer` put them into the record. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdtrain.compare.record import RankSettings


@dataclass(frozen=True)
class RankFacts:
    """What a rank found when it had opened model and loop: the answer to the call `open`."""

    settings: RankSettings
    describe: dict[str, Any]
    samples_per_step: int
    gradient_bytes: int
    parameters: int
    lr: list[float]
    """Learning rate of every parameter group."""
    data: str
    """What the task says about its data."""


@dataclass
class StepTimes:
    """Times of consecutive steps on one rank."""

    step_ms: list[float] = field(default_factory=list)
    input_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    rest_ms: list[float] = field(default_factory=list)
    """Forward, backward, reduction and clipping. `time_breakdown` alone fills this and
    `optimizer_ms`.
    """
    cpu_s: float = 0.0
    """User and system time of all threads in these steps."""
    whole_cpu_s: float = 0.0
    """The same with the barrier and the skipped steps before them."""
