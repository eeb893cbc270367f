"""Answers of an arm's ranks to the comparison.

The probe sends them as plain values, which the functions here read; `arm_pool` and `block_timer`
put them into the record. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.compare.compare_options import EXACT_METHODS, METHOD_OPTIONS
from hvdtrain.compare.proof.work_trace import ElementSample, RankTrace, StepTrace
from hvdtrain.compare.record import RankSettings
from hvdtrain.system import provenance
from hvdtrain.training.config import TrainConfig


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
        data=found["data"],
    )


def trace_of(found: dict[str, Any], config: TrainConfig | None) -> RankTrace:
    """Return the trace that the probe has sent. It knows the optimizer's options alone; `config`
    has the others of an arm that is no command.
    """
    names = [name for name in METHOD_OPTIONS if name not in EXACT_METHODS]
    method = {} if config is None else {name: getattr(config, name) for name in names}
    return RankTrace(
        **{
            **found,
            "precision": found["precision"] if config is None else config.precision,
            "accumulate": 1 if config is None else config.accumulate,
            "clip_norm": math.inf if config is None else config.clip_norm,
            "buffers_policy": "" if config is None else config.buffers,
            "method": method,
            "initial_buffers_sha256": "",
            "elements": ElementSample(**found["elements"]),
            "steps": [StepTrace(**step) for step in found["steps"]],
        }
    )
