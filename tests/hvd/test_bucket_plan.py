"""The division of parameters into buckets, which every rank computes from the agreed plan."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from hvdtrain.hvd.engine.operation import AVERAGE
from hvdtrain.hvd.gradients.plan import DENSE, FROZEN, SPARSE, BucketPlan, lay_out

KIB = 1024


def plan_of(
    sizes: dict[str, int],
    bucket_bytes: int,
    kinds: dict[str, str] | None = None,
    dtypes: dict[str, str] | None = None,
    groups: int | list[list[str]] = 0,
    in_place: bool = False,
    gpus: dict[str, int] | None = None,
) -> BucketPlan:
    """A plan of float32 vectors, in the order in which their gradients become ready."""
    names = list(sizes)
    return BucketPlan(
        names,
        {name: [numel] for name, numel in sizes.items()},
        dict.fromkeys(names, "float32") | (dtypes or {}),
        dict.fromkeys(names, DENSE) | (kinds or {}),
        {},
        gpus or {},
        [AVERAGE, None, bucket_bytes, groups, in_place],
    )


@pytest.mark.parametrize("seed", range(20))
def test_each_dense_parameter_is_in_one_bucket_and_none_waits_for_a_later_one(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {f"p{i}": rng.choice([1, 7, 300, 5000, 70000]) for i in range(rng.randint(1, 40))}
    kinds = {name: rng.choice([DENSE, DENSE, DENSE, SPARSE, FROZEN]) for name in sizes}
    dtypes = {name: rng.choice(["float32", "float32", "float64"]) for name in sizes}
    groups = rng.choice([0, 0, 3])
    on = {name: rng.choice([None, 0, 1]) for name in sizes} if seed % 2 else {}
    gpus = {name: gpu for name, gpu in on.items() if gpu is not None}
    in_place = rng.random() < 0.5
    layouts = lay_out(plan_of(sizes, 64 * KIB, kinds, dtypes, groups, in_place, gpus))
    sent = [name for layout in layouts for name in layout.names]
    assert sorted(sent) == sorted(name for name, kind in kinds.items() if kind == DENSE)
    for layout in layouts:
        assert layout.numel == sum(sizes[name] for name in layout.names) + layout.flag
        assert {dtypes[name] for name in layout.names} <= {str(layout.dtype).removeprefix("torch.")}
        gpu = layout.gpu if layout.device == "GPU" else None
        assert {gpus.get(name) for name in layout.names} <= {gpu}
    assert sum(layout.flag for layout in layouts) == 1
    assert not any(layout.flag for layout in layouts if layout.device == "GPU")
    if not groups:  # a group is sent in the place of its last parameter, of whatever dtype
        order = list(sizes)
        full = [layout for layout in layouts if layout.names and _is_full(layout.numel)]
        last = [max(order.index(name) for name in layout.names) for layout in full]
        assert last == sorted(last)


def _is_full(numel: int) -> bool:
    """Whether the bucket was closed by its size: others are sent at the end of the step."""
    return numel * 4 >= 64 * KIB


def test_a_group_is_sent_together_in_the_place_of_its_last_parameter() -> None:
    sizes = {f"p{i}": 20000 for i in range(5)}
    layouts = lay_out(plan_of(sizes, 64 * KIB, groups=[["p0", "p3"]]))
    assert [sorted(layout.names) for layout in layouts if layout.names] == [
        ["p1"],
        ["p2"],
        ["p0", "p3"],
        ["p4"],
    ]


@pytest.mark.parametrize("groups", [0, 100])
def test_ten_times_the_parameters_cost_ten_times_as_much(groups: int) -> None:
    """In calls: all ranks wait for it in the first step."""

    def calls(num_params: int) -> int:
        plan = plan_of({f"p{i}": 10 for i in range(num_params)}, 64 * KIB, groups=groups)
        found = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            lay_out(plan)
        finally:
            sys.setprofile(None)
        return found

    assert calls(10_000) < 12 * calls(1000)
