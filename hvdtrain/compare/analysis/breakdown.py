"""Breakdown of a step's time, from the phase passes, which have a barrier before each step.

`summary` takes the rows. The reference is the arm without communication: its compute time is that
of every arm, and what an arm's forward and backward take beyond it is exposed communication, which
backward did not hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.speed import Measured, number

Json = dict[str, Any]
Ranks = Sequence[Sequence[float]]  # [rank][step], ms


def phase_rows(record: Json, measured: Measured) -> list[Json]:
    """Return one row per arm with kept blocks and a kept pass: medians over the passes, in ms.

    `compute_ms`, `straggler_ms` and `exposed_ms` are None if the ceiling was not measured.
    """
    kept = [found for found in record.get("phases") or [] if found.get("kept", True)]
    passes = [found.get("arms") or {} for found in kept]
    rows = []
    for key, arm in measured.arms.items():
        mine = [found for found in passes if key in found]
        lost = arm.get("status") in ("failed", "refused") or not measured.times[key]
        if mine and not lost:
            rows.append(_phase_row(key, mine, measured.role("ceiling", arm["ranks"])))
    return rows


def _phase_row(key: str, passes: list[Json], ceiling: str | None) -> Json:
    # The arm and the ceiling from the same pass, so that both have the same machine state.
    pairs = [
        (found[key]["compute_ms"], found[ceiling]["compute_ms"])
        for found in passes
        if ceiling is not None and ceiling in found
    ]
    alone = [theirs for _, theirs in pairs]
    exposed = [_slowest(mine) - _slowest(theirs) for mine, theirs in pairs]
    raw = stats.interval(exposed)
    # An interval that reaches zero or below is not distinguishable from no exposed communication.
    shown = raw.median if raw.low > 0 else 0.0
    return {
        "arm": key,
        "compute_ms": _median(_mean, alone),
        "exposed_ms": number(shown) if exposed else None,
        "exposed_raw_ms": number(raw.median),
        "exposed_low_ms": number(raw.low),
        "exposed_high_ms": number(raw.high),
        "input_ms": _median(_slowest, [found[key]["input_ms"] for found in passes]),
        "optimizer_ms": _median(_slowest, [found[key]["optimizer_ms"] for found in passes]),
        "straggler_ms": _median(_straggling, alone),
        "passes": len(passes),
    }


def _median(of: Callable[[Ranks], float], passes: list[Ranks]) -> float | None:
    return number(float(np.median([of(found) for found in passes]))) if passes else None


def _slowest(times: Ranks) -> float:
    return stats.block_ms(times)


def _mean(times: Ranks) -> float:
    """Return the median over steps of the mean over ranks."""
    steps = _steps(times)
    return float(np.median(steps.mean(axis=0))) if steps.size else math.nan


def _straggling(times: Ranks) -> float:
    """Return the median over steps of the slowest rank's time less the mean over ranks."""
    steps = _steps(times)
    return float(np.median(steps.max(axis=0) - steps.mean(axis=0))) if steps.size else math.nan


def _steps(times: Ranks) -> stats.Floats:
    length = min((len(rank) for rank in times), default=0)
    return np.asarray([rank[:length] for rank in times], dtype=float)
