"""Many collectives at once, and in what order."""

from __future__ import annotations

import functools
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.transports.collectives.operations import (
    Call,
    all_gather_into_tensor,
    all_reduce,
    complete,
    given,
    operations,
    reduce_scatter_tensor,
    send,
)
from tests.transports.collectives.table import Dist, case, rank_and_size, refused, same


@case()
def many_in_flight(dist: Dist) -> None:
    """Of tensors of their own, and of parts of one storage; then of all kinds, and one that blocks
    behind them.
    """
    counts = [1 + 997 * k % 30_000 for k in range(100)] + [400_000] * 4
    calls = [Call(dist, count, turns=2, is_async=True) for count in counts]
    for t in torch.split(torch.empty(1_200_000), [500_000, 699_999, 1]):
        calls.append(Call(dist, len(t), turns=5, is_async=True, layout=given(t)))
    complete(*map(all_reduce, calls))
    for count in (5, 40_000, 500_000):
        call = functools.partial(Call, dist, count, turns=2)
        started = [operation(call(is_async=True)) for operation in operations(dist)]
        complete(*started, all_reduce(call()))


@case()
def a_tensor_that_is_being_read_is_not_moved(dist: Dist) -> None:
    """It is large enough to be moved into shared memory when it is reduced again."""
    n, count = dist.get_world_size(), 1_000_000
    part = count // n

    def call(size: int, *tensors: torch.Tensor) -> Call:
        return Call(dist, size, is_async=True, layout=given(*tensors))

    for _ in range(4):
        read, sent, reduced = torch.split(torch.empty(3 * count), count)
        dist.all_reduce(reduced.fill_(1))
        complete(
            *(all_gather_into_tensor(call(count, torch.empty(n * count), read)) for _ in range(2)),
            reduce_scatter_tensor(call(part, torch.empty(part), read[: part * n])),
            send(call(count, sent)),
            all_reduce(call(count, reduced)),
        )


@case(unlike_gloo="its group ends with a wait that has timed out")
def the_work_of_a_collective(dist: Dist) -> None:
    """Rank 1 comes once the others have seen that they wait for it."""
    is_last, group, t = dist.get_rank() == 1, dist.new_group(), torch.ones(3)
    if is_last:
        dist.barrier()
    work = dist.all_reduce(t, group=group, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    if not is_last:
        assert not work.is_completed()
        with refused(RuntimeError):
            work.wait(timedelta(milliseconds=50))
        dist.barrier()
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    same(t, torch.full_like(t, dist.get_world_size()))
    same(work.result()[0], t)
    same(future.wait()[0], t)
    same(doubled.wait(), t * 2)


@case()
def barrier(dist: Dist) -> None:
    """No rank leaves it before all have come."""
    rank, n = rank_and_size(dist)
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group()
    for turn in range(20):
        for is_async in (False, True):
            name = f"{group.group_name}/{turn}/{is_async}"
            store.set(f"{name}/{rank}", "")
            store.wait([f"{name}/{rank}"])  # `set` does not wait for the server
            work = dist.barrier(group=group, async_op=is_async)
            if work is not None:
                work.wait()
            assert store.check([f"{name}/{r}" for r in range(n)])
    dist.destroy_process_group(group)


@case(unlike_gloo="it polls")
def waiting_takes_no_cpu_time(dist: Dist) -> None:
    """Rank 0 comes once it has seen all threads of the others asleep at twenty looks."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(3))):
        dist.barrier()
        deadline, looks = time.monotonic() + 10, 0
        while dist.get_rank() == 0 and looks < 20:
            assert time.monotonic() < deadline, "another rank computes all the time"
            time.sleep(0.005)
            looks += all(is_asleep(pid) for pid in pids[1:])
        call()


def is_asleep(pid: int) -> bool:
    """Return whether no thread of a process runs, or could."""
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(text.rpartition(")")[2].split()[0] == "S" for text in stats)
