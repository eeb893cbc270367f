"""Breakdown of a step's time, from passes of its own, which have a barrier before each step.

`summary` takes the rows. The reference is the arm without communication: its compute time is that
of every arm, and what an arm's forward and backward take beyond it is exposed communication, which
backward did not hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.speed import Measurements, limits
from hvdtrain.compare.compare_options import MIN_BLOCKS
from hvdtrain.compare.record import BreakdownTimes, RankTimes, Record, finite_or_none


@dataclass(frozen=True)
class BreakdownRow:
    """The parts of one arm's step: medians over its passes, in ms.

    Compute, straggler and exposed are None if the arm without communication was not measured.
    """

    arm: str
    compute_ms: float | None
    """Forward and backward without communication, mean over ranks."""
    exposed_ms: float | None
    """Communication that backward does not hide: 0 if not distinguishable from none, and None if
    there are too few passes to tell.
    """
    exposed_raw_ms: float | None
    """The median, whatever its interval."""
    exposed_low_ms: float | None
    """The 95 % interval; None with too few passes."""
    exposed_high_ms: float | None
    input_ms: float | None
    optimizer_ms: float | None
    straggler_ms: float | None
    """What the slowest rank computes longer than the mean."""
    passes: int


def breakdown_rows(record: Record, measured: Measurements) -> list[BreakdownRow]:
    """Return one row per arm with kept blocks and a kept pass."""
    passes = [found.arms for found in record.phases if found.kept]
    rows = []
    for key, arm in measured.arms.items():
        own = [found for found in passes if key in found]
        if own and measured.times[key] and not arm.has_ended_early:
            rows.append(_row(key, arm.period, own, record.key_of("ceiling", arm.ranks)))
    return rows


def _row(
    key: str, period: int, passes: list[dict[str, BreakdownTimes]], ceiling: str
) -> BreakdownRow:
    # The arm and the ceiling from the same pass, so that both have the same machine state.
    both = [found for found in passes if ceiling in found]
    alone = [found[ceiling].compute_ms for found in both]
    exposed = [
        stats.block_ms(found[key].compute_ms, period) - stats.block_ms(computing)
        for found, computing in zip(both, alone, strict=True)
    ]
    raw = stats.interval(exposed)
    low, high = limits(raw)
    return BreakdownRow(
        arm=key,
        compute_ms=_median(_mean, alone),
        exposed_ms=_distinguishable(raw),
        exposed_raw_ms=finite_or_none(raw.median),
        exposed_low_ms=low,
        exposed_high_ms=high,
        input_ms=_median(stats.block_ms, [found[key].input_ms for found in passes]),
        optimizer_ms=_median(stats.block_ms, [found[key].optimizer_ms for found in passes]),
        straggler_ms=_median(_excess_of_slowest, alone),
        passes=len(passes),
    )


def _distinguishable(exposed: stats.Interval) -> float | None:
    """Return the exposed communication; 0 if its interval reaches zero, None if it is unknown."""
    if exposed.median > 0 and exposed.blocks < MIN_BLOCKS:
        return None
    return 0.0 if exposed.low <= 0 else finite_or_none(exposed.median)


def _median(of: Callable[[RankTimes], float], passes: list[RankTimes]) -> float | None:
    return finite_or_none(np.median([of(found) for found in passes])) if passes else None


def _mean(times: RankTimes) -> float:
    """Return the median over steps of the mean over ranks."""
    steps = _steps(times)
    return float(np.median(steps.mean(axis=0))) if steps.size else math.nan


def _excess_of_slowest(times: RankTimes) -> float:
    """Return the median over steps of the slowest rank's time less the mean over ranks."""
    steps = _steps(times)
    return float(np.median(steps.max(axis=0) - steps.mean(axis=0))) if steps.size else math.nan


def _steps(times: RankTimes) -> stats.Floats:
    length = min((len(rank) for rank in times), default=0)
    return np.asarray([rank[:length] for rank in times], dtype=float)
