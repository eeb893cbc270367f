"""Answers of an arm's ranks to the comparison.

`worker` returns them, and the probe the same as plain values, which `facts_of` and the other
functions read; `arm_pool` and `block_timer` put them into the record. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hvdtrain import provenance
from hvdtrain.compare.proof.work_trace import ElementSample, RankTrace, StepTrace
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


def facts_of(found: dict[str, Any]) -> RankFacts:
    """Return the facts that the probe has sent."""
    names = ("threads", "interop_threads", "affinity")
    variables = provenance.variables(found["variables"])
    return RankFacts(
        settings=RankSettings(**{n: found[n] for n in names}, variables=variables),
        describe=found["describe"],
        samples_per_step=found["samples"],
        gradient_bytes=found["gradient_bytes"],
        parameters=found["parameters"],
        lr=found["lr"],
        data="what the scripts load",
    )


def trace_of(found: dict[str, Any]) -> RankTrace:
    """Return the trace that the probe has sent: of options it knows those of the optimizer only."""
    return RankTrace(
        **{
            **found,
            "accumulate": 1,
            "clip_norm": math.inf,
            "buffers_policy": "broadcast",
            "initial_buffers_sha256": "",
            "elements": ElementSample(**found["elements"]),
            "steps": [StepTrace(**step) for step in found["steps"]],
        }
    )
