"""Many collectives at once, and in what order."""

from __future__ import annotations

import time

import torch

from hvdtrain.transports import work_queue
from tests.transports.collectives.table import Dist, case, close, computed, same, values


@case()
def many_in_flight(dist: Dist) -> None:
    rank = dist.get_rank()
    counts = [1 + 997 * k % 30_000 for k in range(100)] + [400_000] * 4
    for _ in range(2):
        tensors = [values(rank, count) for count in counts]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for work in reversed(works):
            work.wait()
        for t, count in zip(tensors, counts, strict=True):
            same(t, computed(dist, "SUM", count, torch.float32))


@case()
def different_collectives_in_flight(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in (5, 40_000, 500_000):
        for _ in range(2):
            a, b, c = (values(rank, count) for _ in range(3))
            gathered, scattered = torch.zeros(n * count), torch.zeros(count)
            exchanged, rooted = torch.zeros(n * count), values(rank, count)
            whole = values(rank, n * count)
            works = [
                dist.all_reduce(a, async_op=True),
                dist.broadcast(b, 1, async_op=True),
                dist.all_gather_into_tensor(gathered, c, async_op=True),
                dist.reduce_scatter_tensor(scattered, whole, async_op=True),
                dist.reduce(rooted, 0, async_op=True),
                dist.all_to_all_single(exchanged, whole, async_op=True),
                dist.barrier(async_op=True),
            ]
            last = values(rank, count)
            dist.all_reduce(last)
            for work in works:
                work.wait()
            total = computed(dist, "SUM", count, torch.float32)
            same(a, total)
            same(last, total)
            same(b, values(1, count))
            same(gathered[count:][:count], values(1, count))
            sums = computed(dist, "SUM", n * count, torch.float32)
            same(scattered, sums[rank * count :][:count])
            same(exchanged[count:][:count], values(1, n * count)[rank * count :][:count])
            if rank == 0:
                same(rooted, total)


@case()
def parts_of_one_storage_in_flight(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    base = torch.empty(1_200_000)
    parts = torch.split(base, [500_000, 699_999, 1])
    for turn in range(5):
        base.copy_(values(rank + turn, 1_200_000))
        works = [dist.all_reduce(part, async_op=True) for part in parts]
        for work in works[:: 1 if turn % 2 else -1]:
            work.wait()
        same(base, sum((values(r + turn, 1_200_000) for r in range(n)), torch.zeros(1_200_000)))


@case()
def a_tensor_that_is_being_read_is_not_moved(dist: Dist) -> None:
    """It is large enough to be moved into shared memory when it is reduced again."""
    rank, n = dist.get_rank(), dist.get_world_size()
    count = 1_000_000
    for _ in range(4):
        base = torch.empty(2 * count)
        read, reduced = torch.split(base, count)
        others = [torch.empty(n * count) for _ in range(2)]
        small = torch.empty(count // n)
        dist.all_reduce(reduced.fill_(1))
        read.copy_(values(rank, count))
        reduced.fill_(1)
        works = [dist.all_gather_into_tensor(out, read, async_op=True) for out in others]
        works += [dist.reduce_scatter_tensor(small, read[: count // n * n], async_op=True)]
        works += [dist.all_reduce(reduced, async_op=True)]
        for work in works:
            work.wait()
        for out in others:
            for r in range(n):
                same(out[r * count :][:count], values(r, count))
        same(reduced, torch.full((count,), float(n)))


@case()
def the_work_of_a_collective(dist: Dist) -> None:
    if dist.get_rank() == 1:
        time.sleep(0.2)
    t = torch.ones(3)
    work = dist.all_reduce(t, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    same(future.wait()[0], t)
    same(doubled.wait(), t * 2)
    same(work.result()[0], t)


@case(unlike_gloo="it has no queue of its own")
def an_observer_is_given_the_name_of_each_collective(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    seen: list[str] = []
    parts = [torch.zeros(3) for _ in range(n)]
    work_queue.observer = lambda queue, name, *times_and_bytes: seen.append(name)
    try:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.eye(3).to_sparse())
        dist.reduce(torch.ones(3), 0)
        dist.gather(torch.ones(3), parts if rank == 0 else None, 0)
        dist.scatter(torch.ones(3), parts if rank == 0 else None, 0)
        dist.broadcast(torch.ones(3), 0, async_op=True).wait()
        dist.barrier()
    finally:
        work_queue.observer = None
    names = "all_reduce sparse_all_reduce reduce gather scatter broadcast barrier"
    assert seen == names.split()


@case()
def coalesced_collectives(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    manager = dist.distributed_c10d._coalescing_manager
    counts = [3, 1_000, 20_000, 400_000]
    for asynchronous in (False, True):
        tensors = [values(rank, count) for count in counts]
        with manager(async_ops=asynchronous) as work:
            for t in tensors:
                dist.all_reduce(t)
        if asynchronous:
            work.wait()
        for t, count in zip(tensors, counts, strict=True):
            same(t, computed(dist, "SUM", count, torch.float32))
        outs = [torch.zeros(n * count) for count in counts]
        with manager(async_ops=asynchronous) as work:
            for out, count in zip(outs, counts, strict=True):
                dist.all_gather_into_tensor(out, values(rank, count))
        if asynchronous:
            work.wait()
        for out, count in zip(outs, counts, strict=True):
            same(out[count:][:count], values(1, count))
        outs = [torch.zeros(count) for count in counts]
        with manager(async_ops=asynchronous) as work:
            for out, count in zip(outs, counts, strict=True):
                dist.reduce_scatter_tensor(out, values(rank, n * count))
        if asynchronous:
            work.wait()
        for out, count in zip(outs, counts, strict=True):
            same(out, computed(dist, "SUM", n * count, torch.float32)[rank * count :][:count])


@case()
def functional_collectives(dist: Dist) -> None:
    import torch.distributed._functional_collectives as functional

    rank, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for count in (4, 20_000, 400_000):
        t = values(rank, count)
        total = computed(dist, "SUM", count, torch.float32)
        same(functional.all_reduce(t, "sum", world) + 0, total)
        close(functional.all_reduce(t, "avg", world) + 0, total / n)
        same(t, values(rank, count))
        same(functional.broadcast(t, 1, world) + 0, values(1, count))
        gathered = functional.all_gather_tensor(t, 0, world) + 0
        same(gathered[count:][:count], values(1, count))
        whole = values(rank, n * count)
        scattered = functional.reduce_scatter_tensor(whole, "sum", 0, world) + 0
        same(scattered, computed(dist, "SUM", n * count, torch.float32)[rank * count :][:count])
        exchanged = functional.all_to_all_single(whole, None, None, world) + 0
        same(exchanged[count:][:count], values(1, n * count)[rank * count :][:count])
        both = functional.all_reduce_coalesced([t, t * 2], "sum", world)
        same(both[1] + 0, total * 2)
    weight = torch.ones(3, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(weight, 0, world)
    # A gradient in memory of its own: torch 2.9 refuses the expanded one of `sum`, on Gloo too.
    (gathered * torch.ones(3 * n)).sum().backward()
    assert weight.grad is not None
    same(weight.grad, torch.full((3,), float(n)))
