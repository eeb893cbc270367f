"""Traces of the work that each rank did in its first steps: the evidence for the parity check.

The probe records them inside the ranks, and `parity` compares them in the driver. Imports no
torch, because the driver unpickles the traces without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system import files

Array = NDArray[np.float64]

MAX_SAMPLED = 1 << 18
"""Upper limit for the number of sampled elements, over all parameters; at least one of each."""


@dataclass
class StepTrace:
    """The trace of one optimizer step on one rank."""

    micro_batches: int = 0
    samples: list[str] = field(default_factory=list)
    """A hash of the content of every sample, in the order of use."""
    parameter_norm: float = 0.0
    """Norm of the parameters at `optimizer.step`, before it changes them."""
    gradient_norm: float = 0.0
    """Norm of the gradients at `optimizer.step`."""
    gradient_bytes: int = 0
    """Size of the gradients at `optimizer.step`."""
    gradient_dtypes: list[str] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    """Learning rate of every parameter group at `optimizer.step`."""
    local_norm: float | None = None
    """Norm of this rank's own gradient, before any averaging. Only that of step 1 is recorded."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, with the number of samples and one hash in place of their hashes."""
        digest = hashlib.sha256(" ".join(self.samples).encode()).hexdigest()
        return {**asdict(self), "samples": len(self.samples), "samples_sha256": digest}


@dataclass
class ElementSample:
    """A sample of the elements of every parameter, taken at a fixed stride, in float64.

    All ranks and arms of one model have the same `layout`, so that their arrays compare element by
    element.
    """

    layout: list[tuple[str, int]]
    """Name of every parameter and the number of its sampled elements, in the arrays' order."""
    initial: Array
    gradient: Array
    """Gradient of the first step at `optimizer.step`."""
    largest: Array
    """Largest absolute gradient of every element at `optimizer.step`, over all steps."""
    before_last: Array | None
    """`local` before the last micro-batch. None without accumulation."""
    final: Array
    """Parameters after the last step."""
    buffers: Array
    """Floating-point buffers after the last step."""
    means: Array
    """1 for the elements of `buffers` that are BatchNorm's running means, else 0."""
    local: Array | None = None
    """This rank's own gradient of the first step, before any averaging. None: it was not seen."""

    def segments(self) -> list[tuple[str, slice]]:
        """Return the name of every parameter and its slice of the arrays."""
        ends = np.cumsum([count for _, count in self.layout]).tolist()
        return [
            (name, slice(end - count, end))
            for (name, count), end in zip(self.layout, ends, strict=True)
        ]


@dataclass
class RankTrace:
    """The work trace of one rank, from its initial state on."""

    rank: int
    world_size: int
    precision: str
    parameters: dict[str, int]
    """Number of elements by dtype."""
    optimizer: str
    """The name of the optimizer's class."""
    settings: list[dict[str, str]]
    """Hyper-parameters of every group, without learning rates and without the options that only
    change how a step is computed, such as `foreach`.
    """
    state_step: int
    """Step count in the optimizer's state before the first step: 0 if the state is fresh."""
    initial_sha256: str
    elements: ElementSample
    steps: list[StepTrace] = field(default_factory=list)
    final_sha256: str = ""
    final_buffers_sha256: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but the arrays, for JSON: non-finite numbers become text."""
        plain = {name: value for name, value in vars(self).items() if name != "elements"}
        found: dict[str, Any] = files.finite({**plain, "steps": [s.to_dict() for s in self.steps]})
        return found


ArmTraces = Sequence[RankTrace]
"""The traces of one arm, in rank order."""


def with_names_of(traces: Mapping[str, ArmTraces], baseline: str) -> dict[str, ArmTraces]:
    """Return the traces of scripts, which may name the parameters of one model differently, with
    the baseline's names where the sizes are the same.
    """
    layout = next((trace.elements.layout for trace in traces.get(baseline, ())), [])
    sizes = [size for _, size in layout]
    return {
        key: [
            replace(trace, elements=replace(trace.elements, layout=layout))
            if [size for _, size in trace.elements.layout] == sizes
            else trace
            for trace in arm
        ]
        for key, arm in traces.items()
    }


def paired_steps(
    arm: ArmTraces, base: ArmTraces
) -> Iterator[tuple[int, int, StepTrace, StepTrace]]:
    """Yield (step number from 1, rank, the arm's step, the baseline's step), by step and rank."""
    for number in range(1, min(len(a.steps) for a in (*arm, *base)) + 1):
        for a, b in zip(arm, base, strict=True):
            yield number, a.rank, a.steps[number - 1], b.steps[number - 1]


def trace_of(found: dict[str, Any]) -> RankTrace:
    """Return the trace that the probe has sent, as plain values."""
    elements = ElementSample(**{"before_last": None, **found["elements"]})
    steps = [StepTrace(**step) for step in found["steps"]]
    return RankTrace(**{**found, "elements": elements, "steps": steps})
