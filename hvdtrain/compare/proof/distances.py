"""Distances between the numbers of an arm and of the baseline, and the tolerances for them.

`equal_work` and `parity` use them. Parameters whose gradient is pure rounding noise are left
out where only tolerances must be met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compare.proof.work_trace import ArmTraces, Array, RankTrace, StepTrace

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Limits:
    """Tolerances for the rounding differences of two arms, and whether any are allowed."""

    gradient: float
    """For the gradient of one step, relative to its norm."""
    final: float
    """For the final parameters, relative to how far training moved them."""
    noise: float
    """A gradient below this fraction of the RMS over all elements is pure rounding noise."""
    reason: str
    """Why the limits have these values, or why nothing may differ."""
    bitwise: bool = False
    """Whether nothing may differ, not even by rounding."""


@dataclass(frozen=True)
class ArmPair:
    """The traces of an arm and of the baseline, on as many ranks, and the limits."""

    arm: ArmTraces
    base: ArmTraces
    limits: Limits

    @property
    def ranks(self) -> list[tuple[RankTrace, RankTrace]]:
        """The arm's trace and the baseline's, of every rank."""
        return list(zip(self.arm, self.base, strict=True))

    @property
    def steps(self) -> list[tuple[int, int, StepTrace, StepTrace]]:
        """The number of each step, from 1, the rank, and what both recorded of it."""
        return [
            (index + 1, a.rank, a.steps[index], b.steps[index])
            for index in range(min(len(t.steps) for t in (*self.arm, *self.base)))
            for a, b in self.ranks
        ]

    @property
    def is_bitwise_equal(self) -> bool:
        """Whether the final parameters are bitwise equal, and the buffers of rank 0. DDP overwrites
        those of the others with rank 0's before each forward pass; Horovod leaves each its own.
        """
        if self.arm[0].final_buffers_sha256 != self.base[0].final_buffers_sha256:
            return False
        return all(a.final_sha256 == b.final_sha256 for a, b in self.ranks)

    def distance(self, name: str) -> float:
        """Return the largest distance, over ranks, of an array of the ElementSample."""
        return max(
            distance(getattr(a.elements, name), getattr(b.elements, name)) for a, b in self.ranks
        )

    def final_distance(self) -> tuple[float, float]:
        """Return the largest distance of the final parameters, relative to how far training moved
        them, and the fraction of elements that is left out as rounding noise (see `_noise`).

        Relative to the parameters themselves, the initial values, which all arms share, would hide
        any difference of a few steps.
        """
        kept, base = ~self._noise, self.base[0].elements
        moved = (base.final - base.initial)[kept]
        finals = [(a.elements.final[kept], b.elements.final[kept]) for a, b in self.ranks]
        return max(distance(a, b, moved) for a, b in finals), float(np.mean(~kept))

    def buffer_distance(self, rank: int = 0) -> float:
        """Return the distance of the buffers, less what noisy parameters explain: BatchNorm's
        running mean follows a bias. Its running variance does not, and shows another policy.
        """
        # Twice: the parameters may have been further apart before the last step.
        slack = 2 * self._final_differences()[self._noise].max(initial=0)
        base = self.base[rank].elements
        a, b = self.arm[rank].elements.buffers, base.buffers
        if slack and a.shape == b.shape:
            a = np.where((base.means > 0) & (np.abs(a - b) <= slack), b, a)
        return distance(a, b)

    def largest_distance(self) -> float:
        """Return the largest of all distances that `limits.final` bounds."""
        apart = (distance(a.gradient_norm, b.gradient_norm) for *_, a, b in self.steps)
        return max(self.final_distance()[0], self.buffer_distance(), *apart)

    @cached_property
    def _noise(self) -> Mask:
        """Return the elements that differ only because their gradient is pure rounding noise.

        The true gradient of a bias before BatchNorm, or of the bias of attention's keys, is zero.
        Adam and its variants take full-size steps on the rounding error, which the order of a sum
        decides.
        """
        limits, elements = self.limits, self.base[0].elements
        size, moved = elements.largest, np.abs(elements.final - elements.initial)
        least = limits.noise * rms(size[np.isfinite(size) & (size > 0)])
        noise: Mask = (size > 0) & (size < least)
        # Noise explains at most twice the largest movement of any element, and no more than the
        # baseline moves noisy elements: SGD hardly moves them. (Times 100, because a noisy element
        # may have returned to its start.)
        furthest = min(2 * moved.max(initial=0), 100 * moved[noise].max(initial=0))
        apart = self._final_differences()
        noise &= (apart > limits.final * rms(moved)) & (apart <= furthest)
        return noise

    def _final_differences(self) -> Array:
        """Return the largest difference, over ranks, of every element of the final parameters."""
        with np.errstate(invalid="ignore"):
            apart = [np.abs(a.elements.final - b.elements.final) for a, b in self.ranks]
        return np.asarray(np.max(apart, axis=0))


def distance(a: Array | float, b: Array | float, scale: Array | None = None) -> float:
    """Return the norm of a - b relative to the norm of `scale`, or of b.

    Zero if they are equal, NaNs included; infinite if shapes differ or the ratio is not finite.
    """
    if np.shape(a) != np.shape(b):
        return math.inf
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    norm = np.linalg.norm(b if scale is None else scale)
    with np.errstate(invalid="ignore", over="ignore"):
        result = float(np.linalg.norm(a - b) / norm) if norm else math.inf
    return result if math.isfinite(result) else math.inf


def rms(values: Array) -> float:
    """Return the root of the mean square."""
    return float(np.linalg.norm(values)) / math.sqrt(max(1, values.size))
