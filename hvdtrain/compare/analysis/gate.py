"""The gate of `--fail-slower`: which arms are slower than is allowed, beyond what noise explains.

Without `--against` an arm is held against the baseline of the same comparison. With it, an arm's
ratio to the baseline is held against the one in an earlier record, so that a machine that is
faster or slower today does not count. An arm is too slow if the ends of both intervals that are
nearest to each other are still further apart than is allowed. An arm that cannot be judged, because
it failed or has too few blocks, keeps the gate shut: else a crash would pass it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.speed import Measurements
from hvdtrain.compare.analysis.stats import Interval
from hvdtrain.compare.compare_options import MIN_BLOCKS
from hvdtrain.compare.record import Record

ONE = Interval(1.0, 1.0, 1.0, MIN_BLOCKS)


@dataclass(frozen=True)
class GateRow:
    """What the gate says of an arm."""

    arm: str
    is_slower: bool | None
    """None if it cannot be judged."""
    text: str


def gate_rows(record: Record, allowed: float, before: Record | None = None) -> list[GateRow]:
    """Return one row for each arm but the references.

    `allowed`: 0.05 if an arm may take 5 % longer. `before`: see the module; arms that it lacks, and
    those of another baseline, are left out.
    """
    measured = Measurements(record)
    earlier = None if before is None else Measurements(before)
    rows = []
    for key, arm in record.arms.items():
        base = record.key_of("baseline", arm.ranks)
        if arm.role != "arm":
            continue
        now, then = measured.ratio(base, key), ONE
        if earlier is not None and before is not None:
            if key not in before.arms or before.key_of("baseline", arm.ranks) != base:
                continue
            then = earlier.ratio(base, key)
        if arm.has_ended_early or min(now.blocks, then.blocks) < MIN_BLOCKS:
            why = arm.reason or f"fewer than {MIN_BLOCKS} blocks count, here or in --against"
            rows.append(GateRow(key, None, f"{key}: cannot be judged: {why}"))
            continue
        is_slower = now.high * (1 + allowed) < then.low
        text = f"{stats.figures(now)} as fast as {base}"
        if earlier is not None:
            text += f", before {stats.figures(then)}"
        verdict = "not shown to be slower"
        if is_slower:
            verdict = "slower than allowed" if allowed else "slower"
        verdict += f" ({100 * allowed:g} %)" if allowed else ""
        rows.append(GateRow(key, is_slower, f"{key}: {text}: {verdict}"))
    return rows
