"""Timed work: warm-up and blocks.

`comparison` calls it. All arms but the timed one are stopped, and the CPU load of other processes
is measured meanwhile. Imports no torch.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.record import ArmTimes, Block
from hvdtrain.compare.run.arm_pool import ArmPool
from hvdtrain.compare.run.cpu_load import LoadMeter, too_busy

SKIPPED_STEPS = 2  # untimed, in each block: caches and CPU frequency recover from other arms
BLOCK_S = 0.25  # time of the slowest arm in a block
STEPS_PER_BLOCK = (5, 200)  # least, most
# Least and most steps of a warm-up round; rounds at most; relative difference that counts as none.
WARM_STEPS, WARM_ROUNDS, WARM_ALIKE = (3, 10), 6, 0.05


class BlockTimer:
    """Times the live arms of a pool, and adds the measurements to its record."""

    def __init__(self, pool: ArmPool, options: CompareOptions) -> None:
        self._pool, self._options, self._record = pool, options, pool.record
        self._order = random.Random(options.seed)
        self._cores = os.sched_getaffinity(0)
        self.steps = options.steps or 0
        """Steps of each arm in a block; the first warm-up sets it if the options do not."""
        self.block_s = 0.0
        """About how long a block takes, by the steps of the warm-up."""
        self.block_ms: defaultdict[str, dict[int, float]] = defaultdict(dict)
        """Each arm's time in the kept blocks, by index."""

    def warm_up(self) -> float:
        """Run all arms in turn until each takes the same time twice in a row; return the seconds.

        All arms take the same number of steps, so that their final parameters are comparable.
        """
        began = time.monotonic()
        medians: dict[str, float] = {}
        settled: set[str] = set()
        steps, steps_taken = WARM_STEPS[0], 0
        for _ in range(WARM_ROUNDS):
            self._pool.show_activity(f"warming up, {steps_taken + steps} steps")
            for key in list(self._pool.live):
                times = self._pool.times(key, steps, 0)
                if times is None:
                    continue
                median = stats.block_ms([rank.step_ms for rank in times])
                if abs(median / medians.get(key, math.inf) - 1) < WARM_ALIKE:
                    settled.add(key)
                medians[key] = median
            steps_taken += steps
            if settled.issuperset(self._pool.live):
                break
            steps = _steps_in(BLOCK_S, medians, WARM_STEPS)
        for key in list(self._pool.live):
            row = self._record.arms[key]
            row.warm_up_steps, row.even = steps_taken, key in settled
            # Read now: later copies would raise the peak.
            row.peak_mib = _rounded(self._pool.call(key, "peak_mib") or [])
        if not self.steps and medians:
            self.steps = self._whole_periods(_steps_in(BLOCK_S, medians, STEPS_PER_BLOCK))
        self.block_s = sum(medians.values()) / 1000 * (self.steps + SKIPPED_STEPS)
        self._record.config.steps_per_block = self.steps
        return time.monotonic() - began

    def time_block(self, index: int, generation: int) -> None:
        """Time some steps of every arm, in random order, and add a block to the record."""
        arms: dict[str, ArmTimes] = {}
        # Load of the whole block too: the time of one arm is too short for the clock ticks.
        meter = LoadMeter(self._cores)
        for key in self._shuffled():
            arm_meter = LoadMeter(self._cores)
            ranks = self._pool.times(key, self.steps, SKIPPED_STEPS)
            own = None if ranks is None else self._pool.on_this_host(key, ranks)
            meter.add(own)
            if ranks is None:
                continue
            arm_meter.add(own)
            load = arm_meter.stop()
            arms[key] = ArmTimes(
                step_ms=[_rounded(rank.step_ms) for rank in ranks],
                input_ms=[_rounded(rank.input_ms) for rank in ranks],
                cpu_s=_rounded(rank.cpu_s for rank in ranks),
                foreign=load.foreign,
                steal=load.steal,
            )
        load = meter.stop()
        dropped = too_busy(load, self._options.max_foreign)
        block = Block(index, arms, generation, dropped is None, dropped, load.foreign, load.steal)
        self._record.blocks.append(block)
        if block.kept:
            for key, times in arms.items():
                period = self._record.period_of(key)
                self.block_ms[key][index] = stats.block_ms(times.step_ms, period)

    def interval_widths(self) -> Iterator[float]:
        """Yield how far the interval of each live arm's ratio extends, but for the baseline's and
        the ceiling's.
        """
        for key in self._pool.live:
            arm = self._pool.arms[key]
            if arm.role not in ("baseline", "ceiling"):
                base = self._record.key_of("baseline", arm.ranks)
                yield stats.reach(stats.paired(self.block_ms[base], self.block_ms[key]))

    def _whole_periods(self, steps: int) -> int:
        """Return `steps`, rounded up to whole periods of the arm with the longest."""
        longest = max(arm.period for arm in self._record.arms.values())
        return -(-steps // longest) * longest

    def _shuffled(self) -> list[str]:
        keys = list(self._pool.live)
        return self._order.sample(keys, len(keys))


def _steps_in(seconds: float, step_ms: Mapping[str, float], limits: tuple[int, int]) -> int:
    """Return how many steps take the slowest arm about `seconds`, within limits."""
    low, high = limits
    slowest = max(step_ms.values(), default=math.inf)
    return max(low, min(high, math.ceil(1000 * seconds / slowest)))


def _rounded(values: Iterable[float]) -> list[float]:
    """Round to 4 decimals, in ms 0.1 microseconds: more are noise, and would double the file."""
    return [round(float(value), 4) for value in values]
