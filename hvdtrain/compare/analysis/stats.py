"""Statistics: paired ratios of block times, their intervals, and verdicts.

`table` and `gate` use them, and the stop rule through `table`: one rule for all. The time of an arm
in a block is its mean step, so that what only some steps pay is paid. The estimate is
baseline time / arm time, both of the same block, so that a slow phase of the machine affects both.

What is independent is the start of the processes: one start of a program can be faster than the
next by some percent for its whole life, because its memory layout is random (Kalibera and Jones
2013, Rigorous Benchmarking in Reasonable Time), and more blocks do not show that. So with several
starts each counts once, by the median over its blocks, and the interval is Student's, of the
logarithms. With one start the unit is the block, and the interval that of the median by order
statistics, which outliers do not move: it holds the ratio of these processes, not of the next ones.

An arm is called faster or slower if its ratio differs from 1 with p <= 0.05 among all arms of the
comparison (Holm's correction), and is further from 1 than the interval of the baseline against its
duplicate (A/A) reaches. How often intervals hold the truth, and verdicts are right, is simulated in
tests/compare/test_stats.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Ratio:
    """How many times as fast an arm is, with its 95 % interval; None where too little is known."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """The probability of such a difference from 1, or a larger one, of arms that are alike."""
    blocks: int = 0

    @property
    def reach(self) -> float:
        """How far the interval extends from the ratio on its longer side, as a factor less 1."""
        if self.value is None or self.low is None or self.high is None:
            return math.inf
        return max(self.high / self.value, self.value / self.low) - 1

    @property
    def spread(self) -> float | None:
        """How far the interval of an A/A pair extends from 1, as a factor: 0.25 for a limit of
        1.25, or of 0.8. None if it is not known.
        """
        if self.low is None or self.high is None:
            return None
        return max(self.high, 1 / self.low) - 1


def block_ms(step_ms: Sequence[Sequence[float]]) -> float:
    """Return an arm's time in a block, from [rank][step]: the mean step of the slowest rank. NaN
    without steps.
    """
    means = [float(np.mean(rank)) if len(rank) else math.nan for rank in step_ms]
    return max(means) if means and all(map(math.isfinite, means)) else math.nan


def ratio(
    base: Mapping[int, float], arm: Mapping[int, float], start_of: Mapping[int, int]
) -> Ratio:
    """Return how many times as fast as `base` an arm is. Both: ms by block.

    `start_of`: the start of the processes that each block belongs to.
    """
    by_start: dict[int, list[float]] = {}
    for block in sorted(base.keys() & arm.keys()):
        if 0 < base[block] < math.inf and 0 < arm[block] < math.inf:
            logarithm = math.log(base[block] / arm[block])
            by_start.setdefault(start_of.get(block, 0), []).append(logarithm)
    blocks = list(chain.from_iterable(by_start.values()))
    if not blocks:
        return Ratio()
    medians = [float(np.median(values)) for values in by_start.values()]
    if len(medians) > 1 and np.ptp(medians):
        found = stats.ttest_1samp(medians, 0.0)
    else:
        found = stats.quantile_test(blocks, q=0.0, p=0.5)
    # Order statistics have no limit where the blocks are too few, as fewer than 6 are.
    low, high = map(_exp, found.confidence_interval(LEVEL))
    p = None if low is None or high is None else float(found.pvalue)
    return Ratio(_exp(float(np.mean(medians))), low, high, p, len(blocks))


def significant(found: Mapping[str, Ratio]) -> set[str]:
    """Return the arms whose ratio differs from 1, by Holm's step-down procedure."""
    known = sorted((one.p, name) for name, one in found.items() if one.p is not None)
    steps = enumerate(known)
    passed = takewhile(lambda step: step[1][0] <= (1 - LEVEL) / (len(known) - step[0]), steps)
    return {name for _, (_, name) in passed}


def _exp(value: float) -> float | None:
    """Return the ratio of a logarithm; None if there is none."""
    return math.exp(value) if math.isfinite(value) else None


def verdict(found: Ratio, is_significant: bool, noise: float | None) -> str:
    """Return "faster", "slower", "same" (no significant difference) or "unknown".

    `noise` is the A/A spread.
    """
    if found.value is None or found.p is None or noise is None:
        return "unknown"
    if not is_significant or max(found.value, 1 / found.value) - 1 <= noise:
        return "same"
    return "faster" if found.value > 1 else "slower"


def median(values: Iterable[float]) -> float | None:
    """Return the median of the finite values; None without any."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.median(finite)) if finite else None
