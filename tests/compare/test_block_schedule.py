"""When a comparison restarts its processes and ends: rules on a clock that is moved by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.record import ArmTimes, Block
from hvdtrain.compare.run import block_schedule
from hvdtrain.compare.run.arms import choose
from hvdtrain.compare.run.block_schedule import BlockSchedule
from hvdtrain.compare.run.comparison import Comparison


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(block_schedule, "time", found)
    return found


def restarts(plan: BlockSchedule, clock: Clock, blocks: int, block_s: float) -> list[int]:
    """The blocks before which the processes are started anew."""
    found = []
    for index in range(blocks):
        if plan.restart_is_due(index):
            found.append(index)
            clock.now_s += 10
            plan.restarted(index, 10)
        clock.now_s += block_s
    return found


def test_a_number_of_blocks_is_spread_over_the_starts(clock: Clock) -> None:
    plan = BlockSchedule(CompareOptions(blocks=32))
    plan.plan_restarts(start_s=10)
    assert restarts(plan, clock, 32, 1) == [8, 16, 24]
    assert plan.generation == 3
    few = BlockSchedule(CompareOptions(blocks=23))
    few.plan_restarts(start_s=10)
    assert restarts(few, clock, 23, 1) == [], "an interval of two starts says nothing"


def test_restarts_take_at_most_half_of_the_time(clock: Clock) -> None:
    plan = BlockSchedule(CompareOptions(budget_s=100))
    plan.plan_restarts(start_s=20)
    assert len(restarts(plan, clock, 100, 1)) == 2
    late = BlockSchedule(CompareOptions(budget_s=100))
    late.plan_restarts(start_s=26)
    assert restarts(late, clock, 100, 1) == []


@pytest.mark.parametrize(
    ("blocks", "kept", "reaches", "after_s", "why"),
    [
        (5, 5, [0.5], 150, None),  # too few for an interval
        (6, 6, [0.5], 150, "the time"),
        (9, 5, [0.5], 150, "the time"),  # though too few of those that count
        (9, 9, [0.01], 0, None),  # too few to settle
        (10, 10, [0.01, 0.02], 0, "the width of the intervals"),
        (10, 10, [0.01, 0.03], 0, None),
    ],
)
def test_when_it_ends(
    clock: Clock, blocks: int, kept: int, reaches: list[float], after_s: float, why: str | None
) -> None:
    plan = BlockSchedule(CompareOptions(budget_s=100))
    clock.now_s += after_s
    assert plan.why_to_stop(blocks, kept, reaches) == why


@pytest.mark.parametrize(("kept", "why"), [(9, None), (12, "the width of the intervals")])
def test_a_comparison_counts_the_blocks_that_it_keeps(
    clock: Clock, kept: int, why: str | None, tmp_path: Path
) -> None:
    arms, _ = choose(CompareOptions(arms=("ddp/gloo", "ddp/shm")))
    comparison = Comparison(CompareOptions(budget_s=100), arms, cast("Any", None), tmp_path)
    comparison._pool.live = {arm.name: cast("Any", None) for arm in arms}
    times = {arm.name: ArmTimes([[1.0]], [], []) for arm in arms}
    comparison.record.blocks = [Block(i, times, kept=i < kept) for i in range(12)]
    assert comparison._why_to_stop() == why
    comparison._pool.live.pop("ddp/shm")
    assert comparison._why_to_stop() == "the loss of the other arms"


def test_no_start_whose_blocks_do_not_fit(clock: Clock) -> None:
    """Slow blocks: two thirds of the time are over when the first start has the eight it needs."""
    plan = BlockSchedule(CompareOptions(budget_s=120))
    plan.plan_restarts(start_s=10)
    assert restarts(plan, clock, 20, 10) == []
    quick = BlockSchedule(CompareOptions(budget_s=120))
    quick.plan_restarts(start_s=10)
    assert restarts(quick, clock, 100, 1) != []


def test_neither_narrow_intervals_nor_the_time_end_it_before_what_was_planned(clock: Clock) -> None:
    plan = BlockSchedule(CompareOptions(budget_s=100))
    plan.plan_restarts(start_s=10)
    assert plan.why_to_stop(20, 20, [0.0]) is None
    plan = BlockSchedule(CompareOptions(blocks=12))
    clock.now_s += 1000
    assert plan.why_to_stop(11, 11, [0.0]) is None
    assert plan.why_to_stop(12, 3, [0.5]) == "the number of blocks asked for"
