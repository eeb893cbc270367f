"""Join and barrier; see behaviour.py."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tests.hvd.behaviour import Hvd, case, data, everyones, fails, mean, mine, same, total

JOINED = "is not supported with Join at this time."


def leaving(hvd: Hvd, order: list[int], step: Callable[[int, list[int]], object]) -> None:
    """The ranks join in this order; before the k-th one joins, the others do step(k, who is left).

    The order is certain: step k needs all who are left, and rank order[k] to have joined before.
    """
    place = order.index(hvd.rank())
    for k in range(place):
        step(k, order[k + 1 :])
    got = hvd.join()
    assert type(got) is int
    assert got == order[-1], (got, order)


def orders(hvd: Hvd) -> list[list[int]]:
    ranks = list(range(hvd.size()))
    return [ranks, ranks[::-1], [*ranks[1:], 0]]


@case()
def all_at_once(hvd: Hvd) -> None:
    got = hvd.join()
    assert 0 <= got < hvd.size()
    assert hvd.allgather(torch.tensor([got]), name="x").unique().numel() == 1


@case(uneven=True)
def the_joined_give_zeros_and_count(hvd: Hvd) -> None:
    n = hvd.size()
    for order in orders(hvd):

        def step(k: int, left: list[int]) -> None:
            inputs = [data(r, 4) for r in left]
            same(hvd.allreduce(mine(hvd, 4), name=f"sum{k}", op=hvd.Sum), total(inputs))
            same(hvd.allreduce(mine(hvd, 4), name=f"mean{k}"), total(inputs) / n)

        leaving(hvd, order, step)


@case(uneven=True)
def names_seen_before_and_new_ones(hvd: Hvd) -> None:
    for name in ("known", "known", "other"):
        hvd.allreduce(mine(hvd, 3), name=name, op=hvd.Sum)

    def step(k: int, left: list[int]) -> None:
        expected = total([data(r, 3) for r in left])
        for name in ("known", "new", "known", "other"):
            same(hvd.allreduce(mine(hvd, 3), name=name, op=hvd.Sum), expected)

    leaving(hvd, orders(hvd)[0], step)
    for name in ("known", "new", "other"):
        same(hvd.allreduce(mine(hvd, 3), name=name), mean(everyones(hvd, 3)))


@case(uneven=True)
def every_dtype_shape_and_form(hvd: Hvd) -> None:
    def step(k: int, left: list[int]) -> None:
        for dtype in (torch.float16, torch.float64, torch.int32, torch.int64):
            expected = total([data(r, 2, 2, dtype=dtype) for r in left])
            got = hvd.allreduce_(mine(hvd, 2, 2, dtype=dtype), name=f"{dtype}", op=hvd.Sum)
            same(got, expected)
        same(hvd.allreduce(mine(hvd), name="s", op=hvd.Sum), total([data(r) for r in left]))
        got = hvd.grouped_allreduce([mine(hvd, 2), mine(hvd, 3)], name="g", op=hvd.Sum)
        same(got[0], total([data(r, 2) for r in left]))
        same(got[1], total([data(r, 3) for r in left]))

    leaving(hvd, orders(hvd)[1], step)


@case(uneven=True)
def zeros_spoil_minimum_and_product(hvd: Hvd) -> None:
    def step(k: int, left: list[int]) -> None:
        for op in (hvd.Min, hvd.Product):
            got = hvd.allreduce(torch.full((2,), 4.0), name=f"x{op}", op=op)
            assert got.tolist() == [0.0, 0.0]

    leaving(hvd, orders(hvd)[0], step)


@case(uneven=True)
def what_is_not_supported_meanwhile(hvd: Hvd) -> None:
    n = hvd.size()

    def step(k: int, left: list[int]) -> None:
        with fails(hvd, f"Allgather {JOINED}"):
            hvd.allgather(mine(hvd, 2), name=f"fresh{k}")
        with fails(hvd, f"Broadcast {JOINED}"):
            hvd.broadcast(mine(hvd, 2), left[0], name=f"fresh{k}")
        with fails(hvd, f"Alltoall {JOINED}"):
            hvd.alltoall(mine(hvd, n), name=f"fresh{k}")
        with fails(hvd, f"Reducescatter {JOINED}"):
            hvd.reducescatter(mine(hvd, n), name=f"fresh{k}")
        same(hvd.allreduce(mine(hvd, 2), name="x"), total([data(r, 2) for r in left]) / n)

    leaving(hvd, orders(hvd)[0], step)
    same(hvd.allgather(mine(hvd, 2), name="fresh"), torch.cat(everyones(hvd, 2)))


@case(stronger="reported at once also for names seen before, on which Horovod hangs", uneven=True)
def names_of_other_operations_seen_before(hvd: Hvd) -> None:
    hvd.allgather(mine(hvd, 2), name="x")
    hvd.broadcast(mine(hvd, 2), 0, name="x")

    def step(k: int, left: list[int]) -> None:
        with fails(hvd, f"Allgather {JOINED}"):
            hvd.allgather(mine(hvd, 2), name="x")
        with fails(hvd, f"Broadcast {JOINED}"):
            hvd.broadcast(mine(hvd, 2), 0, name="x")

    leaving(hvd, orders(hvd)[1], step)


@case(uneven=True)
def mismatches_are_reported_meanwhile(hvd: Hvd) -> None:
    def step(k: int, left: list[int]) -> None:
        if len(left) > 1:
            with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
                hvd.allreduce(mine(hvd, 3 if hvd.rank() == left[-1] else 2), name="x")
        same(hvd.allreduce(mine(hvd, 2), name="x", op=hvd.Sum), total([data(r, 2) for r in left]))

    leaving(hvd, orders(hvd)[0], step)


@case(stronger="what was submitted before joining is done; Horovod hangs")
def operations_submitted_before_joining(hvd: Hvd) -> None:
    handle = hvd.allreduce_async(mine(hvd, 2), name="x")
    hvd.join()
    same(hvd.synchronize(handle), mean(everyones(hvd, 2)))


@case(stronger="what was submitted before joining is done; Horovod hangs", uneven=True)
def operations_after_a_mismatch_before_joining(hvd: Hvd) -> None:
    """The last rank submits `x` once more and joins; the others have been waiting for it."""
    last = hvd.size() - 1
    hvd.allreduce(mine(hvd, 2), name="x")
    with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
        hvd.allreduce(mine(hvd, 3 if hvd.rank() == 0 else 2), name="x")
    if hvd.rank() == last:
        hvd.barrier()  # the others have submitted
    handle = hvd.allreduce_async(mine(hvd, 2), name="x")
    if hvd.rank() != last:
        hvd.barrier()
        same(hvd.synchronize(handle), mean(everyones(hvd, 2)))
    assert hvd.join() in range(hvd.size())
    if hvd.rank() == last:
        same(hvd.synchronize(handle), mean(everyones(hvd, 2)))


@case(stronger="what was submitted before joining is done; Horovod hangs", uneven=True)
def large_operations_when_all_join(hvd: Hvd) -> None:
    """The second waits for the first, and may be sent when nobody has joined any more."""
    for first in range(hvd.size()):
        handles = []
        if hvd.rank() == first:
            time.sleep(0.1)  # the others have joined
            ones = torch.ones(2_000_000)
            handles = [hvd.allreduce_async(ones, name=f"{i}", op=hvd.Sum) for i in range(3)]
        hvd.join()
        for handle in handles:
            same(hvd.synchronize(handle), torch.ones(2_000_000))


@case()
def barrier_waits_for_all(hvd: Hvd) -> None:
    for late in range(hvd.size()):
        hvd.barrier()
        if hvd.rank() == late:
            time.sleep(0.1)
        came = time.monotonic()  # one clock for the host
        assert hvd.barrier() is None
        left = time.monotonic()
        assert left >= max(hvd.allgather_object(came, name=f"came{late}"))


@case()
def barrier_does_not_order(hvd: Hvd) -> None:
    """One has an operation pending that the others submit only after the barrier."""
    first = hvd.rank() == 0
    handle = hvd.allreduce_async(mine(hvd, 2), name="x") if first else None
    hvd.barrier(hvd.global_process_set)
    if handle is not None:
        assert hvd.poll(handle) is False
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(mine(hvd, 2), name="x")
    same(hvd.synchronize(handle), mean(everyones(hvd, 2)))
