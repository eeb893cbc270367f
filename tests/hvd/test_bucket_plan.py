"""The division of parameters into buckets, which every rank computes from the agreed plan."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hvdtrain.hvd.engine.operation import AVERAGE
from hvdtrain.hvd.gradients.plan import BucketPlan, PlannedGradient, lay_out


def buckets(groups: Any = 0, gpus: Any = None, count: int = 5) -> list[list[str]]:
    """The names in each bucket, of vectors in the order in which their gradients are ready."""
    names = [f"p{i}" for i in range(count)]
    gradients = {n: PlannedGradient([20_000], "float32", (gpus or {}).get(n)) for n in names}
    plan = BucketPlan(gradients, [AVERAGE, None, 64 * 1024, groups, False], {})
    return [sorted(layout.names) for layout in lay_out(plan) if layout.names]


def test_a_group_is_sent_together_in_the_place_of_its_last_parameter() -> None:
    assert buckets([["p0", "p3"]]) == [["p1"], ["p2"], ["p0", "p3"], ["p4"]]


def test_parameters_of_a_bucket_are_on_one_device() -> None:
    expected = [["p0"], ["p1", "p2"], ["p3"], ["p4"]]
    assert sorted(buckets([["p1", "p2"], ["p0", "p3"]], {"p3": 0, "p4": 1})) == expected


@pytest.mark.parametrize("groups", [0, 100])
def test_ten_times_the_parameters_cost_ten_times_as_much(groups: int) -> None:
    """In calls: all ranks wait for it in the first step."""

    def calls(num_params: int) -> int:
        found = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            buckets(groups, count=num_params)
        finally:
            sys.setprofile(None)
        return found

    assert calls(10_000) < 12 * calls(1000)
