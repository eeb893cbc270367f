"""Traces of the work that each rank did in its first steps: the evidence for the parity check.

The probe records them inside the ranks, and `parity` compares them in the driver. Imports no
torch, because the driver unpickles the traces without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class StepTrace:
    """The trace of one optimizer step on one rank; gradients as the optimizer got them."""

    micro_batches: int = 0
    samples: list[str] = field(default_factory=list)
    """A hash of the content of every sample, in the order of use. Empty: they were not seen."""
    parameter_norm: float = 0.0
    """Norm of the parameters after the step."""
    gradient_norm: float = 0.0
    gradient_bytes: int = 0
    gradient_dtypes: list[str] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    """Learning rate of every parameter group."""


@dataclass
class ElementSample:
    """A sample of the elements of every parameter, taken at a fixed stride, in float64.

    All ranks and arms of one model have as many elements of each, so that their arrays compare
    element by element.
    """

    layout: list[tuple[str, int]]
    """Name of every parameter and the number of its sampled elements, in the arrays' order."""
    initial: Array
    gradient: Array
    """Gradient of the first step."""
    largest: Array
    """Largest absolute gradient of every element, over all steps."""
    final: Array
    """Parameters after the last step."""
    buffers: Array
    """Floating-point buffers after the last step."""
    means: Array
    """1 for the elements of `buffers` that are BatchNorm's running means, else 0."""
    local: Array
    """This rank's own gradient of the first step, before any averaging. NaN: it was not seen."""

    def segments(self) -> dict[str, slice]:
        """Return the slice of the arrays that each parameter has."""
        ends = np.cumsum([count for _, count in self.layout]).tolist()
        pairs = zip(self.layout, ends, strict=True)
        return {name: slice(end - count, end) for (name, count), end in pairs}


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
    local_norm: float = 0.0
    """Norm of all of `elements.local`; 0 if that was not seen."""


ArmTraces = Sequence[RankTrace]
"""The traces of one arm, in rank order."""


def trace_of(found: dict[str, Any]) -> RankTrace:
    """Return the trace that the probe has sent, as plain values."""
    steps = [StepTrace(**step) for step in found["steps"]]
    return RankTrace(**{**found, "elements": ElementSample(**found["elements"]), "steps": steps})
