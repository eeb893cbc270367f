"""When a comparison restarts its processes and ends: rules on a clock that is moved by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.run import block_schedule
from hvdtrain.compare.run.block_schedule import BlockSchedule
from tests.environments import rows


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


@pytest.mark.parametrize(
    ("option", "value", "start_s", "block_s", "blocks"),
    rows("""
    blocks | 32 | 10 | 1 | 8 16 24
    # An interval of two starts says nothing.
    blocks | 23 | 10 | 1 | -
    # At most half of the time.
    budget_s | 100 | 20 | 1 | 20 45
    budget_s | 100 | 26 | 1 | -
    # Slow blocks: two thirds of the time are over when the first start has the eight it needs.
    budget_s | 120 | 10 | 10 | -
    """),
)
def test_when_it_starts_anew(
    clock: Clock, option: str, value: str, start_s: str, block_s: str, blocks: str
) -> None:
    given: dict[str, Any] = {option: int(value)}
    options = CompareOptions(**given)
    plan = BlockSchedule(options)
    plan.plan_restarts(int(start_s))
    found = []
    for index in range(options.blocks or 100):
        if plan.restart_is_due(index):
            found.append(str(index))
            clock.now_s += 10
            plan.restarted(index, 10)
        clock.now_s += int(block_s)
    assert " ".join(found or "-") == blocks
    assert plan.generation == len(found)


@pytest.mark.parametrize(
    ("blocks", "kept", "reaches", "after_s", "why"),
    rows("""
    # Too few for an interval.
    5 | 5 | 0.5 | 150 | None
    6 | 6 | 0.5 | 150 | the time
    # Though too few of those that count.
    9 | 5 | 0.5 | 150 | the time
    # Too few to settle.
    9 | 9 | 0.01 | 0 | None
    10 | 10 | 0.01 0.02 | 0 | the width of the intervals
    10 | 10 | 0.01 0.03 | 0 | None
    """),
)
def test_when_it_ends(
    clock: Clock, blocks: str, kept: str, reaches: str, after_s: str, why: str
) -> None:
    plan = BlockSchedule(CompareOptions(budget_s=100))
    assert plan.time_left() == "at most 1 min 40 s left"
    clock.now_s += int(after_s)
    assert str(plan.why_to_stop(int(blocks), int(kept), map(float, reaches.split()))) == why


def test_neither_narrow_intervals_nor_the_time_end_it_before_what_was_planned(clock: Clock) -> None:
    plan = BlockSchedule(CompareOptions(budget_s=100))
    plan.plan_restarts(start_s=10)
    assert plan.why_to_stop(20, 20, [0.0]) is None
    plan = BlockSchedule(CompareOptions(blocks=12))
    clock.now_s += 1000
    assert plan.why_to_stop(11, 11, [0.0]) is None
    assert plan.why_to_stop(12, 3, [0.5]) == "the number of blocks asked for"
