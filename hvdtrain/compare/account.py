"""An account of the work that one rank did in its first steps: what parity is proved from.

Imports no torch: the driver reads what the ranks have recorded (see `observe`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import files

Array = NDArray[np.float64]

SAMPLED = 1 << 18
"""About how many elements, over all parameters, a sample of them has at most."""


@dataclass
class StepAccount:
    """One optimizer step on one rank."""

    micro_batches: int = 0
    samples: list[str] = field(default_factory=list)
    """A hash of the content of every sample, in the order in which they were used."""
    loss: float = 0.0
    """The mean over this rank's samples."""
    gradient_norm: float | None = None
    """After `finish_backward`, before clipping, unscaled. None: it was never called."""
    used_norm: float | None = None
    """As the optimizer used it. None: the optimizer took no step."""
    gradient_bytes: int = 0
    """What the optimizer was handed."""
    gradient_dtypes: list[str] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    """Of every parameter group, as the optimizer used it."""
    parameter_norm: float | None = None
    """Before the first micro-batch. None: not recorded."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, with one hash in place of those of the samples."""
        digest = hashlib.sha256(" ".join(self.samples).encode()).hexdigest()
        return {**asdict(self), "samples": len(self.samples), "samples_sha256": digest}


@dataclass
class Samples:
    """The same elements on every arm, in float64: every so many of each parameter.

    All ranks and arms of one model have the same `layout`. Gradients are without a loss scale.
    """

    layout: list[tuple[str, int]]
    """Name of every parameter, and how many of its elements are here, in the arrays' order."""
    initial: Array
    gradient: Array | None = None
    """Of the first step, after `finish_backward`."""
    used: Array | None = None
    """Of the first step, as the optimizer used it."""
    largest: Array | None = None
    """The size of the largest that the optimizer used of every element, in all steps."""
    before_last: Array | None = None
    """Of the first step, before the last micro-batch. None without accumulation."""
    final: Array | None = None
    buffers: Array | None = None
    """Floating-point buffers at the end."""

    def segments(self) -> list[tuple[str, slice]]:
        """Name and place in the arrays of every parameter."""
        ends = np.cumsum([count for _, count in self.layout]).tolist()
        return [
            (name, slice(end - count, end))
            for (name, count), end in zip(self.layout, ends, strict=True)
        ]


@dataclass
class Account:
    """What one rank did, from its fresh state on."""

    rank: int
    world_size: int
    precision: str
    accumulate: int
    clip_norm: float
    buffers_policy: str
    parameters: dict[str, int]
    """Elements by dtype."""
    optimizer: str
    """The name of its class."""
    settings: list[dict[str, str]]
    """Hyper-parameters of every group, without learning rates and without what only says how fast
    the step is computed.
    """
    state_step: int
    """Steps that the optimizer's state counted before the first: 0 if it is fresh."""
    initial_sha256: str
    initial_buffers_sha256: str
    samples: Samples
    steps: list[StepAccount] = field(default_factory=list)
    optimizer_steps: int = 0
    final_sha256: str = ""
    final_buffers_sha256: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Everything but the arrays: for JSON, which has no infinity."""
        plain = {name: value for name, value in vars(self).items() if name != "samples"}
        found: dict[str, Any] = files.finite({**plain, "steps": [s.to_dict() for s in self.steps]})
        return found


Ranks = Sequence[Account]
"""Of one arm, in rank order."""


def steps_of(arm: Ranks, base: Ranks) -> Iterator[tuple[int, int, StepAccount, StepAccount]]:
    """Number (from 1), rank and both accounts of every step, in the order in which they were."""
    for number in range(1, min(len(a.steps) for a in (*arm, *base)) + 1):
        for a, b in zip(arm, base, strict=True):
            yield number, a.rank, a.steps[number - 1], b.steps[number - 1]
