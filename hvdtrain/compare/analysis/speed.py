"""The speed table: step times, ratios to the baseline and percent of ideal, one row per arm.

`summary` builds it from the record; `scaling` and `where` use `Measured` too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.stats import Interval
from hvdtrain.compare.compare_options import MIN_BLOCKS
from hvdtrain.compare.record import base_of

Json = dict[str, Any]
Times = Mapping[int, float]  # block index -> ms


class Measured:
    """The measurements of each arm in the kept blocks of a record. Missing data is empty or NaN."""

    def __init__(self, record: Json) -> None:
        self.arms: dict[str, Json] = record.get("arms") or {}
        self.baseline: str | None = record.get("baseline")
        self.anchors: dict[str, Json] = record.get("anchors") or {}
        # By arm, then by index of the block. A block without "kept" counts.
        self.windows: dict[str, dict[int, Json]] = {key: {} for key in self.arms}
        for block in record.get("blocks") or []:
            if block.get("kept", True):
                for key, window in (block.get("arms") or {}).items():
                    self.windows.setdefault(key, {})[block["index"]] = window
        kept = [block.get("kept", True) for block in record.get("blocks") or []]
        self.all_dropped = bool(kept) and not any(kept)
        """Whether no block counts: reported once, not for every arm."""
        self._against: dict[tuple[str, str], Interval] = {}
        self.times = {key: _block_times(found) for key, found in self.windows.items()}

    def base_of(self, key: str) -> str | None:
        """Return the key of the arm that an arm is compared with; see `record.base_of`."""
        return base_of(self.arms, key)

    def role(self, role: str, ranks: int) -> str | None:
        """Return the key of the arm with this role at this world size, or None."""
        for key, arm in self.arms.items():
            if arm.get("role") == role and arm.get("ranks") == ranks:
                return key
        return None

    def against(self, base: str | None, arm: str | None) -> Interval:
        """Return how many times as fast as `base` the arm is. NaN without common blocks."""
        if base is None or arm is None:
            return stats.NOTHING
        if (base, arm) not in self._against:  # resampling takes tens of milliseconds
            ratios = stats.paired(self.times.get(base, {}), self.times.get(arm, {}))
            self._against[base, arm] = stats.interval(ratios)
        return self._against[base, arm]

    def noise(self, ranks: int) -> float | None:
        """Return the A/A spread at this world size, or None."""
        return stats.spread(self.against(self.role("baseline", ranks), self.role("again", ranks)))

    def memcpy_ms(self, ranks: int) -> float:
        """Return the ms of one copy of the gradients by all ranks at once. NaN if not measured."""
        found = (self.anchors.get(str(ranks)) or {}).get("memcpy_ms") or []
        return float(np.median(found)) if found else math.nan


def _block_times(windows: Mapping[int, Json]) -> dict[int, float]:
    times = {
        index: stats.block_ms(window.get("step_ms") or []) for index, window in windows.items()
    }
    return {index: ms for index, ms in times.items() if 0 < ms < math.inf}


def world_sizes(measured: Measured) -> list[int]:
    """Return the world sizes of the arms, ascending."""
    return sorted({arm["ranks"] for arm in measured.arms.values() if arm.get("ranks")})


def again_rows(measured: Measured) -> list[Json]:
    """Return one row per world size on its A/A pair."""
    rows = []
    for ranks in world_sizes(measured):
        key = measured.role("again", ranks)
        ratio = measured.against(measured.role("baseline", ranks), key)
        if key is not None and ratio.blocks:
            rows.append(
                {
                    "arm": key,
                    "ranks": ranks,
                    **_ratio(ratio),
                    "spread": number(stats.spread(ratio)),
                    "blocks": ratio.blocks,
                }
            )
    return rows


def ideal_rows(measured: Measured) -> list[Json]:
    """Return the ideal step of each world size: no communication, and one copy of the gradients."""
    rows = []
    for ranks in world_sizes(measured):
        key = measured.role("ceiling", ranks)
        times = list(measured.times.get(key, {}).values()) if key else []
        alone = float(np.median(times)) if times else math.nan
        copy = measured.memcpy_ms(ranks) if ranks > 1 else 0.0
        rows.append(
            {
                "ranks": ranks,
                "no_communication_ms": number(alone),
                "memcpy_ms": number(copy),
                "ideal_ms": number(alone + copy),
            }
        )
    return rows


def speed_rows(measured: Measured) -> list[Json]:
    """Return one row per arm, failed arms included."""
    noise = {ranks: measured.noise(ranks) for ranks in world_sizes(measured)}
    return [_speed_row(measured, key, arm, noise) for key, arm in measured.arms.items()]


def _speed_row(measured: Measured, key: str, arm: Json, noise: Mapping[int, float | None]) -> Json:
    ranks = arm["ranks"]
    step = stats.interval(measured.times[key].values())
    base = measured.base_of(key)
    ratio = measured.against(base, key) if key != base else stats.NOTHING
    # The ceiling does less work by design: it gets no verdict on speed.
    own = {base: "baseline", measured.role("ceiling", ranks): "ceiling"}
    said = own.get(key) or stats.verdict(ratio, noise[ranks])
    return {
        "arm": key,
        **{name: arm.get(name) for name in _COPIED},
        "step_ms": number(step.median),
        "step_low": _limits(step)[0],
        "step_high": _limits(step)[1],
        **_all_steps(measured.windows[key].values()),
        "samples_per_s": _per_second(arm.get("samples_per_step"), step.median),
        **(_ratio(ratio) if key != base else {"ratio": 1.0, "low": None, "high": None}),
        "against": base if key != base else None,
        "verdict": said,
        **_of_ideal(measured, key, ranks),
        "cpu_s_per_step": _cpu_per_step(measured.windows[key].values()),
        "peak_mib": max(arm.get("peak_mib") or [], default=None),
        "blocks": step.blocks,
    }


_COPIED = ("name", "ranks", "role", "level", "settings", "launcher", "status", "reason", "log")


def sentences(measured: Measured) -> list[str]:
    """Return one sentence per arm: its speed against its baseline, or why it failed."""
    said = []
    noise = {ranks: measured.noise(ranks) for ranks in world_sizes(measured)}
    for key, arm in measured.arms.items():
        base = measured.base_of(key)
        lost = arm.get("status") in ("failed", "refused")
        if not lost and (base is None or arm.get("role") in ("baseline", "ceiling")):
            continue
        if lost:
            said.append(f"{key} {arm['status']}: {arm.get('reason') or 'no reason is known'}")
        elif base is not None and not measured.all_dropped:
            ratio = measured.against(base, key)
            if arm.get("role") == "again" and stats.excludes_1(ratio):
                said.append(stats.warning(key, base, ratio))
            else:
                said.append(stats.sentence(key, base, ratio, noise[arm["ranks"]]))
    return said


def _all_steps(windows: Iterable[Json]) -> Json:
    steps = [stats.slowest(window.get("step_ms") or []) for window in windows]
    every = np.concatenate(steps) if steps else np.empty(0)
    if not every.size:
        return {"mean_ms": None, "p95_ms": None}
    return {"mean_ms": number(every.mean()), "p95_ms": number(np.percentile(every, 95))}


def _cpu_per_step(windows: Iterable[Json]) -> float | None:
    """Return the CPU seconds of all ranks per step, over all kept blocks."""
    seconds = steps = 0.0
    for window in windows:
        if window.get("cpu_s"):
            seconds += sum(window["cpu_s"])
            steps += len(stats.slowest(window.get("step_ms") or []))
    return number(seconds / steps) if steps else None


def _of_ideal(measured: Measured, key: str, ranks: int) -> Json:
    """Return the ideal step in percent of the arm's, paired by block. Over 100: noted, not cut."""
    ceiling = measured.role("ceiling", ranks)
    copy = measured.memcpy_ms(ranks) if ranks > 1 else 0.0
    if ceiling is None or key == ceiling:
        return {"percent_of_ideal": None, "ideal_note": None}
    # Per block, as for ratios: the ceiling and the arm share the machine's state in a block.
    ideal = {block: ms + copy for block, ms in measured.times.get(ceiling, {}).items()}
    shares = stats.paired(ideal, measured.times[key])
    if not shares.size:
        return {"percent_of_ideal": None, "ideal_note": None}
    percent = 100 * float(np.median(shares))
    note = None
    if percent > 100:
        note = "over 100: noise, or the anchors were measured under other conditions than the arm"
    return {"percent_of_ideal": number(percent), "ideal_note": note}


def _ratio(ratio: Interval) -> Json:
    low, high = _limits(ratio)
    return {"ratio": number(ratio.median), "low": low, "high": high}


def _limits(found: Interval) -> tuple[float | None, float | None]:
    """Return the limits of an interval; None with fewer than MIN_BLOCKS blocks."""
    if found.blocks < MIN_BLOCKS:
        return None, None
    return number(found.low), number(found.high)


def _per_second(samples: int | None, step_ms: float) -> float | None:
    return number(1000 * samples / step_ms) if samples and step_ms else None


def number(value: float | None) -> float | None:
    """Return a float that JSON can represent, or None."""
    return float(value) if value is not None and math.isfinite(value) else None
