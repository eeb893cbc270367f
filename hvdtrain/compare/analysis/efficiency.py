"""Scaling efficiency, measured: each arm at several world sizes against one rank.

`summary` takes the rows. Weak scaling, constant batch per rank: T(1) / T(n). Strong scaling,
constant global batch: T(1) / (n T(n)).
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.compare.analysis.speed import Measurements, limits
from hvdtrain.compare.record import finite_or_none


@dataclass(frozen=True)
class EfficiencyRow:
    """The efficiency of an arm at one world size, with its 95 % interval; without one from too few
    blocks.
    """

    arm: str
    name: str
    ranks: int
    kind: str
    """weak or strong."""
    base: str
    base_kind: str
    """same arm: the arm itself on one rank; single: one process without a backend."""
    efficiency: float | None
    low: float | None
    high: float | None
    blocks: int


def efficiency_rows(scaling: str | None, measured: Measurements) -> list[EfficiencyRow]:
    """Return each arm's efficiency against itself at one rank and against the `single` process.

    `scaling`: "weak" or "strong". Empty with None, for a single world size.
    """
    rows = []
    for key, arm in measured.arms.items():
        if scaling is None or arm.ranks == 1 or arm.role == "again":
            continue
        share = 1 / arm.ranks if scaling == "strong" else 1.0
        for base, base_kind in _bases(measured, arm.name):
            ratio = measured.ratio(base, key)
            if ratio.blocks:
                low, high = (end if end is None else end * share for end in limits(ratio))
                row = EfficiencyRow(
                    arm=key,
                    name=arm.name,
                    ranks=arm.ranks,
                    kind=scaling,
                    base=base,
                    base_kind=base_kind,
                    efficiency=finite_or_none(ratio.median * share),
                    low=low,
                    high=high,
                    blocks=ratio.blocks,
                )
                rows.append(row)
    return rows


def _bases(measured: Measurements, name: str) -> list[tuple[str, str]]:
    """Return (key, kind) of the one-rank arms that an arm is compared with."""
    kinds = {name: "same arm", "single": "single"}
    one_rank = {key: arm.name for key, arm in measured.arms.items() if arm.ranks == 1}
    return sorted(
        ((key, kinds[other]) for key, other in one_rank.items() if other in kinds),
        key=lambda base: base[1],
    )
