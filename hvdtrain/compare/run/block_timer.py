"""Timed work: warm-up and blocks.

`comparison` calls it. All arms but the timed one are stopped, and the CPU load of other processes
is measured meanwhile. Imports no torch.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterable, Mapping

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.record import ArmTimes, Block
from hvdtrain.compare.run.arm_pool import ArmPool
from hvdtrain.system.cpu_load import LoadMeter

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
        self.steps = options.steps or 0
        """Steps of each arm in a block; the first warm-up sets it if the options do not."""

    def warm_up(self) -> float:
        """Run all arms in turn until each takes the same time twice in a row; return the seconds.

        All arms take the same number of steps, so that their final parameters are comparable.
        """
        began = time.monotonic()
        last: dict[str, float] = {}
        settled: set[str] = set()
        steps, steps_taken = WARM_STEPS[0], 0
        for _ in range(WARM_ROUNDS):
            self._pool.show_activity(f"warming up: {steps_taken + steps} steps")
            for name in list(self._pool.live):
                ranks = self._pool.call(name, "time_steps", steps, 0)
                if ranks is None:
                    continue
                mean = stats.block_ms([rank["step_ms"] for rank in ranks])
                if abs(mean / last.get(name, math.inf) - 1) < WARM_ALIKE:
                    settled.add(name)
                last[name] = mean
            steps_taken += steps
            if settled.issuperset(self._pool.live):
                break
            steps = _steps_in(last, WARM_STEPS)
        for name in list(self._pool.live):
            # Read now: later copies would raise the peak.
            peak_mib = self._pool.call(name, "peak_mib") or []
            self._record.arms[name].peak_mib = _rounded(peak_mib)
        self.steps = self.steps or _steps_in(last, STEPS_PER_BLOCK)
        self._record.config["steps_per_block"] = self.steps
        return time.monotonic() - began

    def time_block(self, index: int, generation: int) -> None:
        """Time some steps of every arm, in random order, and add a block to the record."""
        arms: dict[str, ArmTimes] = {}
        # Of the whole block: the time of one arm is too short for the clock ticks.
        meter = LoadMeter(os.sched_getaffinity(0))
        names = list(self._pool.live)
        for name in self._order.sample(names, len(names)):
            process = self._pool.live[name]
            before_s = process.cpu_s()
            ranks = self._pool.call(name, "time_steps", self.steps, SKIPPED_STEPS)
            meter.add(None if ranks is None else process.cpu_s() - before_s)
            if ranks is not None:
                arms[name] = ArmTimes(
                    step_ms=[_rounded(rank["step_ms"]) for rank in ranks],
                    input_ms=[_rounded(rank["input_ms"]) for rank in ranks],
                    cpu_s=_rounded(rank["cpu_s"] for rank in ranks),
                )
        load = meter.stop()
        block = Block(index, arms, generation, foreign=load.foreign, steal=load.steal)
        block.kept = is_quiet(block, self._options.max_foreign)
        self._record.blocks.append(block)


def is_quiet(block: Block, limit: float) -> bool:
    """Return whether others took no more than `limit`, a share of our cores."""
    return limit >= 1 or block.load <= limit


def _steps_in(step_ms: Mapping[str, float], limits: tuple[int, int]) -> int:
    """Return how many steps take the slowest arm about BLOCK_S, within limits."""
    low, high = limits
    slowest = max(step_ms.values(), default=math.inf)
    return max(low, min(high, math.ceil(1000 * BLOCK_S / slowest)))


def _rounded(values: Iterable[float]) -> list[float]:
    """Round to 4 decimals, in ms 0.1 microseconds: more are noise, and would double the file."""
    return [round(float(value), 4) for value in values]
