"""Join and barrier; see behaviour.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.hvd.behaviour import (
    REDUCED,
    Hvd,
    averaged,
    case,
    data,
    everyones,
    fails,
    last,
    mine,
    same,
    total,
)
from tests.hvd.test_properties import OPS, Call, Running


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


@dataclass(frozen=True)
class Part(Call):
    """An allreduce in which only some ranks take part; the others have joined."""

    left: tuple[int, ...] = ()

    def inputs(self, rank: int) -> list[Tensor]:
        made = super().inputs(rank)
        return made if rank in self.left else [torch.zeros_like(t) for t in made]


@case()
def the_joined_give_zeros_and_count(hvd: Hvd) -> None:
    """In every reduction, of names seen before and of new ones."""
    everyone = tuple(range(hvd.size()))
    calls = [
        Part("allreduce", dtype, op, number, everyone, grouped=grouped, shape=shape)
        for dtype in REDUCED
        for op in OPS[:5]
        for number, shape in enumerate([(4,), (2, 2), (), (50_000,)])
        for grouped in (False, True)
    ]

    def reduce(name: str, left: tuple[int, ...]) -> None:
        for i, call in enumerate(calls):
            running = Running(hvd, replace(call, left=left))
            running.finish(running.start(f"{name}.{i}", asynchronous=False), waited=False)

    for _ in range(3):
        reduce("known", everyone)
    for i, order in enumerate(orders(hvd)):

        def step(k: int, left: list[int], i: int = i) -> None:
            for name in ("known", f"new.{i}.{k}"):
                reduce(name, tuple(left))

        leaving(hvd, order, step)
    reduce("known", everyone)


def not_supported(hvd: Hvd, name: str) -> None:
    n = hvd.size()

    def step(k: int, left: list[int]) -> None:
        for kind in ("Allgather", "Broadcast", "Alltoall", "Reducescatter"):
            root = {"root_rank": left[0]} if kind == "Broadcast" else {}
            with fails(hvd, f"{kind} is not supported with Join at this time."):
                getattr(hvd, kind.lower())(mine(hvd, n), name=name, **root)
        same(hvd.allreduce(mine(hvd, 2), name="x"), total([data(r, 2) for r in left]) / n)

    leaving(hvd, orders(hvd)[0], step)
    same(hvd.allgather(mine(hvd, 2), name=name), torch.cat(everyones(hvd, 2)))


@case()
def what_is_not_supported_meanwhile(hvd: Hvd) -> None:
    not_supported(hvd, "fresh")


@case(stronger="reported at once also for names seen before, on which Horovod hangs")
def names_of_other_operations_seen_before(hvd: Hvd) -> None:
    for _ in range(3):
        hvd.allgather(mine(hvd, 2), name="seen")
        hvd.broadcast(mine(hvd, 2), 0, name="seen")
    not_supported(hvd, "seen")


@case()
def mismatches_are_reported_meanwhile(hvd: Hvd) -> None:
    def step(k: int, left: list[int]) -> None:
        if len(left) > 1:
            with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
                hvd.allreduce(mine(hvd, 3 if hvd.rank() == left[-1] else 2), name="x")
        same(hvd.allreduce(mine(hvd, 2), name="x", op=hvd.Sum), total([data(r, 2) for r in left]))

    leaving(hvd, orders(hvd)[0], step)


@case(stronger="what was submitted before joining is done; Horovod hangs")
def operations_submitted_before_joining(hvd: Hvd) -> None:
    """They count as what they are, and not as zeros, which a minimum would show."""

    def submit() -> list[int]:
        small = hvd.allreduce_async(mine(hvd, 2) + 4, name="small", op=hvd.Min)
        return [small, hvd.broadcast_async(mine(hvd, 100_000), 1, name="large")]

    handles = submit() if hvd.rank() == 0 else []
    if hvd.rank():
        hvd.allreduce(torch.ones(1), name="once rank 0 has joined")
        handles = submit()
    hvd.join()
    same(hvd.synchronize(handles[0]), data(0, 2) + 4)
    same(hvd.synchronize(handles[1]), data(1, 100_000))


@case(stronger="what was submitted before joining is done; Horovod hangs")
def operations_after_a_mismatch_before_joining(hvd: Hvd) -> None:
    """The last rank submits `x` once more and joins; the others have been waiting for it."""
    hvd.allreduce(mine(hvd, 2), name="x")
    with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
        hvd.allreduce(mine(hvd, 3 if hvd.rank() == 0 else 2), name="x")
    if last(hvd):
        hvd.barrier()  # the others have submitted
    handle = hvd.allreduce_async(mine(hvd, 2), name="x")
    if not last(hvd):
        hvd.barrier()
        same(hvd.synchronize(handle), averaged(hvd, 2))
    assert hvd.join() in range(hvd.size())
    if last(hvd):
        same(hvd.synchronize(handle), averaged(hvd, 2))


@case(stronger="what was submitted before joining is done; Horovod hangs")
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
    same(hvd.synchronize(handle), averaged(hvd, 2))
