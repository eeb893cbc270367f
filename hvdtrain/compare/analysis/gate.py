"""The gate of `--fail-slower`: which arms are slower than is allowed, beyond what noise explains.

Without `--against` an arm is held against the baseline of the same comparison. With it, an arm's
ratio to the baseline is held against the one in an earlier record, so that a machine that is
faster or slower today does not count. An arm is too slow if the ends of both intervals that are
nearest to each other are still further apart than is allowed, and the ratios by that and the A/A
spread; without `--against` its verdict must be "slower", too, which counts how many arms there are.
An arm that cannot be judged, because it failed or has too few blocks, keeps the gate shut: else a
crash would pass it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.compare.analysis.stats import Ratio
from hvdtrain.compare.analysis.table import Table
from hvdtrain.compare.formatting import ratio, times_as_fast

ONE = Ratio(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class GateRow:
    """The verdict of the gate on one arm."""

    arm: str
    is_slower: bool | None
    """None if it cannot be judged."""
    text: str


def gate_rows(table: Table, allowed: float, before: Table | None = None) -> list[GateRow]:
    """Return one row for each arm but the baseline and its repeat.

    `allowed`: 0.05 if an arm may take 5 % longer. `before`: see the module; arms that it lacks, and
    those of another baseline, are left out.
    """
    base = next((row.arm for row in table.rows if row.role == "baseline"), "")
    earlier = {}
    if before is not None and any(r.arm == base and r.role == "baseline" for r in before.rows):
        earlier = {row.arm: row.ratio for row in before.rows if row.role == "arm"}
    noise = [found.noise for found in (table, before) if found is not None]
    rows = []
    for row in table.rows:
        if row.role != "arm" or (before is not None and row.arm not in earlier):
            continue
        now, then = row.ratio, earlier.get(row.arm, ONE)
        is_slower = _is_slower(now, then, allowed, noise)
        if before is None and is_slower:
            is_slower = row.verdict == "slower"
        if row.status in ("failed", "refused") or is_slower is None:
            why = row.reason or "too few blocks count, here or in --against"
            rows.append(GateRow(row.arm, None, f"{row.arm}: no verdict: {why}"))
            continue
        text = times_as_fast(now, base)
        if before is not None:
            text += f", earlier {ratio(then)}"
        verdict = "slower" if is_slower else "not measurably slower"
        verdict += f" by more than {100 * allowed:g} %" if allowed else ""
        rows.append(GateRow(row.arm, is_slower, f"{row.arm}: {text}: {verdict}"))
    return rows


def _is_slower(now: Ratio, then: Ratio, allowed: float, noise: list[float | None]) -> bool | None:
    """Return whether `now` is below `then` by more than is allowed; None if that is not known."""
    known = [spread for spread in noise if spread is not None]
    if now.value is None or then.value is None or now.high is None or then.low is None:
        return None
    if len(known) < len(noise):
        return None
    slack = (1 + allowed) * (1 + max(known))
    return now.high * (1 + allowed) < then.low and now.value * slack < then.value
