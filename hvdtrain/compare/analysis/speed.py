"""The speed table: step times and ratios to the baseline, one row per arm.

`summary` builds it from the record; `efficiency` uses `Measurements` too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.stats import Interval
from hvdtrain.compare.compare_options import MIN_BLOCKS
from hvdtrain.compare.formatting import count
from hvdtrain.compare.record import ArmRecord, ArmTimes, Record, finite_or_none


@dataclass(frozen=True)
class AgainRow:
    """The A/A pair of one world size: the baseline against its duplicate."""

    arm: str
    ranks: int
    ratio: float | None
    low: float | None
    high: float | None
    spread: float | None
    """How far from 1 the interval reaches; None with too few blocks."""
    blocks: int


@dataclass(frozen=True)
class SpeedRow:
    """The speed of one arm; None where it was not measured."""

    arm: str
    name: str
    ranks: int
    role: str
    launcher: str | None
    status: str | None
    reason: str | None
    log: str | None
    step_ms: float | None
    """Median over blocks, with its 95 % interval."""
    step_low: float | None
    step_high: float | None
    mean_ms: float | None
    """Mean and 95th percentile over all steps."""
    p95_ms: float | None
    samples_per_s: float | None
    ratio: float | None
    """How many times as fast as the baseline, with its 95 % interval."""
    low: float | None
    high: float | None
    against: str | None
    """The key of the baseline; None for a baseline."""
    verdict: str
    """That of `stats.verdict`; else "baseline" or "ceiling"."""
    data_ms: float | None
    """The part of a step before the script calls its model: it waits for data then."""
    cpu_s_per_step: float | None
    peak_mib: float | None
    blocks: int

    @property
    def cpu_ms_per_step(self) -> float | None:
        """The CPU time of all ranks, in ms."""
        return None if self.cpu_s_per_step is None else 1000 * self.cpu_s_per_step

    @property
    def has_ended_early(self) -> bool:
        """Whether the arm failed or was refused: its reason is shown, not its few blocks."""
        return self.status in ("failed", "refused")

    @property
    def is_shown(self) -> bool:
        """Whether the arm has figures to show."""
        return self.step_ms is not None and not self.has_ended_early

    @property
    def missing_reason(self) -> str:
        """Why the arm has no figures, beginning with its status."""
        text = self.status or "not measured"
        if self.blocks and self.has_ended_early:
            text += f" after {count(self.blocks, 'block')}"
        if text == "measured" and not self.blocks:
            text += ", but no block counts"
        return f"{text}: {self.reason}" if self.reason else text


class Measurements:
    """The measurements of each arm in the kept blocks of a record."""

    def __init__(self, found: Record) -> None:
        self.record, self.arms = found, found.arms
        self.all_dropped = bool(found.blocks) and not found.kept_blocks
        """Whether no block counts: reported once, not for every arm."""
        self.blocks: dict[str, dict[int, ArmTimes]] = {key: {} for key in self.arms}
        """By arm and index of the block."""
        for block in found.kept_blocks:
            for key, times in block.arms.items():
                self.blocks.setdefault(key, {})[block.index] = times
        self.times = {
            key: {
                i: ms
                for i, b in blocks.items()
                if 0 < (ms := stats.block_ms(b.step_ms, found.period_of(key))) < math.inf
            }
            for key, blocks in self.blocks.items()
        }
        """The arm's ms in each of its blocks."""
        self._start_of = {block.index: block.generation or 0 for block in found.kept_blocks}
        self._ratios: dict[tuple[str, str], Interval] = {}

    @property
    def world_sizes(self) -> list[int]:
        """The world sizes of the arms, ascending."""
        return sorted({arm.ranks for arm in self.arms.values()})

    def ratio(self, base: str, arm: str) -> Interval:
        """Return how many times as fast as `base` the arm is. NaN without common blocks."""
        if (base, arm) not in self._ratios:  # resampling takes tens of milliseconds
            both = self.times.get(base, {}), self.times.get(arm, {})
            starts = [self._start_of[block] for block in sorted(both[0].keys() & both[1].keys())]
            self._ratios[base, arm] = stats.interval(stats.paired(*both), starts)
        return self._ratios[base, arm]

    def step(self, key: str) -> Interval:
        """Return the ms of an arm's step. NaN if it was not measured."""
        times = self.times[key]
        return stats.interval(times.values(), [self._start_of[block] for block in times])

    def noise(self, ranks: int) -> float | None:
        """Return the A/A spread at this world size, or None."""
        base, again = (self.record.key_of(role, ranks) for role in ("baseline", "again"))
        return stats.spread(self.ratio(base, again))

    def median_ms(self, key: str) -> float:
        """Return the median over blocks of an arm's time. NaN if it was not measured."""
        times = list(self.times.get(key, {}).values())
        return float(np.median(times)) if times else math.nan


def again_rows(measured: Measurements) -> list[AgainRow]:
    """Return one row per world size on its A/A pair."""
    rows = []
    for ranks in measured.world_sizes:
        base, key = (measured.record.key_of(role, ranks) for role in ("baseline", "again"))
        ratio = measured.ratio(base, key)
        if ratio.blocks:
            median, spread = finite_or_none(ratio.median), finite_or_none(stats.spread(ratio))
            rows.append(AgainRow(key, ranks, median, *limits(ratio), spread, ratio.blocks))
    return rows


def speed_rows(measured: Measurements) -> list[SpeedRow]:
    """Return one row per arm, failed arms included."""
    noise = {ranks: measured.noise(ranks) for ranks in measured.world_sizes}
    return [_speed_row(measured, key, noise[arm.ranks]) for key, arm in measured.arms.items()]


def _speed_row(measured: Measurements, key: str, noise: float | None) -> SpeedRow:
    arm = measured.arms[key]
    step = measured.step(key)
    base = measured.record.key_of("baseline", arm.ranks)
    ratio = measured.ratio(base, key) if key != base else Interval(1.0, 1.0, 1.0, 0)
    # The arm without communication does less work by design: it gets no verdict on speed.
    special = "baseline" if key == base else "ceiling" if arm.role == "ceiling" else None
    step_limits, ratio_limits = limits(step), limits(ratio)
    samples = arm.samples_per_step
    blocks = measured.blocks[key].values()
    slowest = [stats.slowest(block.step_ms) for block in blocks]
    steps = np.concatenate(slowest) if slowest else np.empty(0)
    return SpeedRow(
        arm=key,
        name=arm.name,
        ranks=arm.ranks,
        role=arm.role,
        launcher=arm.launcher,
        status=arm.status,
        reason=arm.reason,
        log=arm.log,
        step_ms=finite_or_none(step.median),
        step_low=step_limits[0],
        step_high=step_limits[1],
        mean_ms=finite_or_none(steps.mean()) if steps.size else None,
        p95_ms=finite_or_none(np.percentile(steps, 95)) if steps.size else None,
        # By the mean: what only some steps pay, such as an average of local SGD, is paid.
        samples_per_s=finite_or_none(1000 * samples / steps.mean())
        if samples and steps.size
        else None,
        ratio=finite_or_none(ratio.median),
        low=ratio_limits[0],
        high=ratio_limits[1],
        against=base if base not in (key, "") else None,
        verdict=special or stats.verdict(ratio, noise),
        data_ms=_data_ms(blocks),
        cpu_s_per_step=_cpu_per_step(blocks),
        peak_mib=max(arm.peak_mib, default=None),
        blocks=step.blocks,
    )


def sentences(measured: Measurements) -> list[str]:
    """Return one sentence per arm: its speed against its baseline, or why it failed. There is none
    on arms that do other work: `parity` says so.
    """
    unequal = {row.arm for row in measured.record.parity if row.verdict == "unequal"}
    return [
        text
        for key, arm in measured.arms.items()
        if not (key in unequal and arm.status == "refused")
        and (text := _sentence(measured, key, arm))
    ]


def _sentence(measured: Measurements, key: str, arm: ArmRecord) -> str:
    if arm.has_ended_early:
        return f"{key} {arm.status}: {arm.reason or 'no reason is known'}"
    base = measured.record.key_of("baseline", arm.ranks)
    if not base or arm.role in ("baseline", "ceiling") or measured.all_dropped:
        return ""
    ratio = measured.ratio(base, key)
    if arm.role == "again" and stats.excludes_1(ratio):
        return stats.warning(key, base, ratio)
    return stats.sentence(key, base, ratio, measured.noise(arm.ranks))


def _data_ms(blocks: Iterable[ArmTimes]) -> float | None:
    """Return the ms before the model is called: the median over blocks of the slowest rank's."""
    found = [ms for block in blocks if not math.isnan(ms := stats.block_ms(block.input_ms))]
    return finite_or_none(np.median(found)) if found else None


def _cpu_per_step(blocks: Iterable[ArmTimes]) -> float | None:
    """Return the CPU seconds of all ranks per step, over all kept blocks."""
    timed = [block for block in blocks if block.cpu_s]
    steps = sum(len(stats.slowest(block.step_ms)) for block in timed)
    return finite_or_none(sum(sum(block.cpu_s) for block in timed) / steps) if steps else None


def limits(found: Interval) -> tuple[float | None, float | None]:
    """Return the limits of an interval; None with fewer than MIN_BLOCKS blocks."""
    if found.blocks < MIN_BLOCKS:
        return None, None
    return finite_or_none(found.low), finite_or_none(found.high)
