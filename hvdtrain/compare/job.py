"""What goes between the comparison and the ranks of an arm. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """What the ranks of an arm shall train, and how."""

    backend: str
    loop: str
    """A key of LOOPS."""
    config: Mapping[str, Any]
    """Options of TrainConfig."""
    affinity: tuple[tuple[int, ...], ...]
    """The cores of each rank."""


@dataclass
class Window:
    """Some steps of one rank, one after another."""

    step_ms: list[float] = field(default_factory=list)
    input_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    rest_ms: list[float] = field(default_factory=list)
    """Forward, backward, reduction, clipping. This and the one above are for `phases` alone."""
    cpu_s: float = 0.0
    """User and system time of all threads, in these steps."""
    whole_cpu_s: float = 0.0
    """And in those before them that did not count."""
