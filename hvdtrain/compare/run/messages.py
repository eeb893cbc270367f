"""Messages between the comparison and the ranks of an arm.

`arm_pool` sends an OpenRequest, and `worker` returns RankFacts and StepTimes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.compare.record import RankSettings


@dataclass(frozen=True)
class OpenRequest:
    """What the ranks of an arm train, and how: the argument of the call `open`."""

    backend: str
    loop: str
    """A key of `worker.LOOPS`."""
    config: Mapping[str, Any]
    """Options of TrainConfig."""
    affinity: tuple[tuple[int, ...], ...]
    """The cores of each rank."""


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
    """Forward, backward, reduction and clipping. Only `phases` fills this and `optimizer_ms`."""
    cpu_s: float = 0.0
    """User and system time of all threads in these steps."""
    whole_cpu_s: float = 0.0
    """The same with the barrier and the skipped steps before them."""
