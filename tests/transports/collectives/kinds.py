"""Tensors of all kinds, and the storages that are moved into shared memory."""

from __future__ import annotations

import os
import resource
from typing import Any

import numpy as np
import torch

from tests.transports.collectives.table import Dist, case, computed, same, usable, values


@case(unlike_gloo="it refuses tensors that are not dense")
def tensors_that_are_not_contiguous(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for rows in (4, 300, 700):
        base = torch.full((rows, 2 * rows), -1.0)
        t = base[:, ::2]
        for _ in range(3):
            t.copy_(values(rank, (rows, rows)))
            dist.all_reduce(t)
            same(t.contiguous(), computed(dist, "SUM", (rows, rows), torch.float32))
        assert base[:, 1::2].eq(-1).all()
        t.copy_(values(rank, (rows, rows)))
        dist.broadcast(t, 1)
        same(t.contiguous(), values(1, (rows, rows)))
        out = torch.zeros(rows, 2 * n * rows)[:, ::2].t()
        dist.all_gather_into_tensor(out, t.t())
        same(out[rows : 2 * rows].contiguous(), values(1, (rows, rows)).t().contiguous())
        part = torch.zeros(rows, 2 * rows)[:, ::2]
        dist.reduce_scatter_tensor(part, torch.ones(2 * rows, n * rows).t()[:, ::2])
        same(part.contiguous(), torch.full((rows, rows), float(n)))
        got = [torch.zeros(rows, 2 * rows)[:, ::2] for _ in range(n)]
        dist.all_gather(got, t)
        same(got[0].contiguous(), values(1, (rows, rows)))
        dist.all_to_all(got, [values(rank + k, (rows, rows)).t() for k in range(n)])
        same(got[1].contiguous(), values(1 + rank, (rows, rows)).t().contiguous())


@case(unlike_gloo="it takes the elements of strided tensors from the memory between them")
def operations_with_a_root_on_tensors_that_are_not_contiguous(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for rows in (3, 300):
        shape = (rows, rows)
        for root in range(n):
            base = torch.full((rows, 2 * rows), -1.0)
            t = base[:, ::2]
            t.copy_(values(rank, shape))
            dist.reduce(t, root)
            expected = computed(dist, "SUM", shape, torch.float32)
            same(t.contiguous(), expected if rank == root else values(rank, shape))
            t.copy_(values(rank, shape))
            parts = [torch.full((rows, 2 * rows), -1.0) for _ in range(n)]
            views = [part[:, ::2] for part in parts]
            dist.gather(t, views if rank == root else None, root)
            for r, view in enumerate(views if rank == root else []):
                same(view.contiguous(), values(r, shape))
            for r, view in enumerate(views):
                view.copy_(values(r, shape))
            dist.scatter(t, views if rank == root else None, root)
            same(t.contiguous(), values(rank, shape))
            for memory in (base, *parts):
                assert memory[:, 1::2].eq(-1).all()


@case(unlike_gloo="it refuses strided tensors, and sends the memory of negative views")
def messages_of_tensors_that_are_not_their_memory(dist: Dist) -> None:
    rank = dist.get_rank()
    base = torch.full((30, 40), -1.0)
    negative = torch.tensor([2 - 3j]).conj().imag
    if rank == 0:
        dist.send(values(0, (20, 30)).t(), 1)
        dist.isend(values(1, (30, 20)), 1).wait()
        dist.send(negative, 1)
        dist.send(torch.tensor([5.0]), 1)
    if rank == 1:
        dist.recv(base[:, ::2], 0)
        same(base[:, ::2].contiguous(), values(0, (20, 30)).t().contiguous())
        with torch.inference_mode():
            inside = torch.zeros(20, 30).t()
        assert dist.recv(inside) == 0
        same(inside.clone(memory_format=torch.contiguous_format), values(1, (30, 20)))
        t = torch.zeros(1)
        dist.recv(t, 0)
        same(t, torch.tensor([3.0]))
        dist.recv(negative, 0)
        assert negative.item() == 5
    assert base[:, 1::2].eq(-1).all()


@case(unlike_gloo="it refuses dtypes that it cannot add up")
def gather_and_scatter_of_every_dtype(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.float8_e5m2, torch.complex64):
        t = values(rank, 5, dtype)
        parts = [torch.zeros(5, dtype=dtype) for _ in range(n)]
        dist.gather(t, parts if rank == 0 else None, 0)
        if rank == 0:
            for r, part in enumerate(parts):
                assert part.tolist() == values(r, 5, dtype).tolist()
        dist.scatter(t, [values(r + 1, 5, dtype) for r in range(n)] if rank == 1 else None, 1)
        assert t.tolist() == values(rank + 1, 5, dtype).tolist()


@case(unlike_gloo="it has no all_to_all")
def another_default_device(dist: Dist) -> None:
    """`torch.set_default_device` in the thread that calls concerns the caller's tensors only.

    torch 2.13 suspends it inside most functions of torch.distributed, but not in a group's methods.
    """

    def blocking(options: Any) -> Any:
        if hasattr(options, "asyncOp"):
            options.asyncOp = False
        return options

    rank, n = dist.get_rank(), dist.get_world_size()
    group: Any = None
    for count in (3, 20_000, 300_000):
        t, whole = values(rank, count), values(rank, n * count)
        half, part = values(rank, count, torch.bfloat16), torch.zeros(count)
        gathered, exchanged, parts = ([torch.zeros(count) for _ in range(n)] for _ in range(3))
        out = torch.zeros(n * count)
        with torch.device("meta"):
            group = group or dist.new_group()
            for _ in range(2):
                dist.all_reduce(t, group=group)
                dist.all_reduce(half, dist.ReduceOp.AVG, group=group)
            dist.broadcast(t, 0, group=group)
            dist.barrier(group=group)
            dist.all_gather(gathered, t, group=group)
            dist.all_gather_into_tensor(out, t, group=group)
            dist.reduce_scatter_tensor(part, whole, group=group)
            group.allgather(
                [gathered], [t], blocking(dist.distributed_c10d.AllgatherOptions())
            ).wait()
            options = blocking(dist.distributed_c10d.AllToAllOptions())
            group.alltoall_base(out, whole, [], [], options).wait()
            group.alltoall(exchanged, gathered, options).wait()
            dist.reduce(t, 0, group=group)
            dist.gather(part, parts if rank == 0 else None, 0, group=group)
            dist.scatter(part, parts if rank == 0 else None, 0, group=group)
        same(part, computed(dist, "SUM", n * count, torch.float32)[rank * count :][:count])
        same(out[count:][:count], values(1, n * count)[rank * count :][:count])
        for theirs in exchanged:
            same(theirs, gathered[0])  # all ranks have gathered rank 0's, which was broadcast
    usable(dist, group)
    dist.destroy_process_group(group)


@case()
def channels_last(dist: Dist) -> None:
    shape = (2, 3, 40, 50)
    for scale in (1, 30):
        whole = (shape[0] * scale, *shape[1:])
        t = values(dist.get_rank(), whole).to(memory_format=torch.channels_last)
        for _ in range(3):
            t.copy_(values(dist.get_rank(), whole))
            dist.all_reduce(t)
            assert t.is_contiguous(memory_format=torch.channels_last)
            same(t.contiguous(), computed(dist, "SUM", whole, torch.float32))


@case(unlike_gloo="it goes by the order in memory")
def channels_last_on_one_rank_only(dist: Dist) -> None:
    shape = (2, 3, 40, 50)
    t = values(dist.get_rank(), shape)
    if dist.get_rank() == 1:
        t = t.to(memory_format=torch.channels_last)
    dist.all_reduce(t)
    same(t.contiguous(), computed(dist, "SUM", shape, torch.float32))


@case()
def tensors_without_elements(dist: Dist) -> None:
    n = dist.get_world_size()
    dist.all_reduce(torch.zeros(0))
    dist.all_reduce(torch.zeros(3, 0), async_op=True).wait()
    dist.broadcast(torch.zeros(0, 2), 1)
    dist.all_gather([torch.zeros(0) for _ in range(n)], torch.zeros(0))
    dist.all_gather_into_tensor(torch.zeros(0), torch.zeros(0))
    dist.reduce_scatter_tensor(torch.zeros(0), torch.zeros(0))
    dist.all_to_all_single(torch.zeros(0), torch.zeros(0))
    dist.all_to_all_single(torch.zeros(0, 4), torch.zeros(0, 4), [0] * n, [0] * n)
    usable(dist)


@case(unlike_gloo="it refuses lists of them")
def lists_of_tensors_without_elements(dist: Dist) -> None:
    n = dist.get_world_size()
    dist.reduce_scatter(torch.zeros(0), [torch.zeros(0) for _ in range(n)])
    dist.all_to_all([torch.zeros(0) for _ in range(n)], [torch.zeros(0) for _ in range(n)])
    usable(dist)


@case()
def a_tensor_without_dimensions(dist: Dist) -> None:
    n = dist.get_world_size()
    t = torch.tensor(2.0)
    dist.all_reduce(t)
    same(t, torch.tensor(2.0 * n))
    dist.broadcast(t, 0)
    parts = [torch.tensor(0.0) for _ in range(n)]
    dist.all_gather(parts, torch.tensor(float(dist.get_rank())))
    assert [float(part) for part in parts] == list(range(n))


@case()
def parameters(dist: Dist) -> None:
    n = dist.get_world_size()
    for count in (3, 300_000):
        p = torch.nn.Parameter(torch.ones(count))
        for _ in range(3):
            p.data.fill_(1)
            dist.all_reduce(p)
            same(p.detach(), torch.full((count,), float(n)))
            dist.broadcast(p, 0, async_op=True).wait()
        assert p.requires_grad
        assert p.grad_fn is None
        outs = [torch.nn.Parameter(torch.zeros(count)) for _ in range(n)]
        dist.all_gather([out.data for out in outs], p.data)
        same(outs[1].detach(), p.detach())


@case()
def tensors_of_inference_mode(dist: Dist) -> None:
    n = dist.get_world_size()
    for count in (3, 20_000, 300_000):
        with torch.inference_mode():
            t = torch.empty(count)
            for asynchronous in (False, True) * 2:
                t.fill_(1)
                work = dist.all_reduce(t, async_op=asynchronous)
                if asynchronous:
                    work.wait()
                same(t, torch.full((count,), float(n)))
            dist.broadcast(t, 0)
            parts = [torch.zeros(count) for _ in range(n)]
            dist.all_gather(parts, t)
            same(parts[1], t)
    usable(dist)


@case()
def an_array_stays_an_alias(dist: Dist) -> None:
    n = dist.get_world_size()
    for kind in ("from_numpy", "numpy", "buffer"):
        if kind == "numpy":
            t = torch.empty(500_000)
            array = t.numpy()
        elif kind == "from_numpy":
            array = np.empty(500_000, np.float32)
            t = torch.from_numpy(array)
        else:
            array = np.empty(500_000, np.float32)
            t = torch.frombuffer(array.data, dtype=torch.float32)
        for _ in range(4):
            array[:] = 1
            dist.all_reduce(t)
            assert (array == n).all()
            array[7] = 9
            assert t[7] == 9


@case()
def an_array_made_after_the_first_collective_stays_an_alias(dist: Dist) -> None:
    n = dist.get_world_size()
    t = torch.ones(500_000)
    dist.all_reduce(t)
    array = t.numpy()
    for _ in range(3):
        array[:] = 1
        dist.all_reduce(t)
        assert (array == n).all()


@case()
def all_views_follow(dist: Dist) -> None:
    n = dist.get_world_size()
    t = torch.empty(1000, 1000)
    view, row, detached = t.view(-1), t[500], t.detach()
    for _ in range(4):
        t.fill_(1)
        dist.all_reduce(t)
        for other in (view, row, detached):
            assert other.eq(n).all()
        view[0] = 5
        assert t[0, 0] == 5


@case(shm_only=True)
def a_large_tensor_is_moved_when_it_is_seen_again(dist: Dist) -> None:
    large, small = torch.ones(300_000), torch.ones(1_000)
    for _ in range(2):
        dist.all_reduce(large)
        dist.all_reduce(small)
    assert large.untyped_storage().is_shared()
    assert not small.untyped_storage().is_shared()


@case(shm_only=True)
def many_shared_tensors_take_few_descriptors(dist: Dist) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tensors = [torch.empty(300_000) for _ in range(30)]
    for _ in range(3):
        for t in tensors:
            dist.all_reduce(t.fill_(1))
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * len(tensors)
    del tensors
    group = dist.new_group()
    tensors = [torch.empty(300_000) for _ in range(40)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        for _ in range(3):
            for t in tensors:
                dist.all_reduce(t.fill_(1), group=group)
                assert t.eq(dist.get_world_size()).all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Of all groups together, so the buffers of the first part may still count.
    assert 0 < sum(t.untyped_storage().is_shared() for t in tensors) <= 200 // 8
    dist.destroy_process_group(group)


@case()
def shared_tensors_that_come_and_go(dist: Dist) -> None:
    """The memory of one that has gone is soon another's."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for turn in range(60):
        count = 262_144 + 1_000 * (turn % 7)
        t = torch.empty(count)
        for again in range(1 + turn % 3):
            t.copy_(values(rank + turn + again, count))
            dist.all_reduce(t)
            expected = (values(r + turn + again, count) for r in range(n))
            same(t, sum(expected, torch.zeros(count)))


@case()
def shared_on_one_rank_only(dist: Dist) -> None:
    """One rank has seen it before, the others have not."""
    rank, n = dist.get_rank(), dist.get_world_size()
    kept = torch.empty(600_000)
    for turn in range(6):
        t = kept if rank == 0 else torch.empty(600_000)
        t.copy_(values(rank + turn, 600_000))
        dist.all_reduce(t)
        same(t, sum((values(r + turn, 600_000) for r in range(n)), torch.zeros(600_000)))


@case()
def tensors_at_different_places_of_their_storages(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    base = torch.empty(1_000_000)
    for turn in range(5):
        t = base[1 + 3 * rank : 600_001 + 3 * rank]
        base.fill_(-1)
        t.copy_(values(rank + turn, 600_000))
        dist.all_reduce(t)
        same(t, sum((values(r + turn, 600_000) for r in range(n)), torch.zeros(600_000)))
        assert base[: 1 + 3 * rank].eq(-1).all()
        assert base[600_001 + 3 * rank :].eq(-1).all()


@case()
def a_storage_that_is_resized(dist: Dist) -> None:
    """As FSDP does with the parameters that it has gathered."""
    n = dist.get_world_size()
    t = torch.empty(400_000)
    for _ in range(4):
        t.fill_(1)
        dist.all_reduce(t)
        same(t, torch.full((400_000,), float(n)))
        if not t.untyped_storage().is_shared():
            t.untyped_storage().resize_(0)
            t.untyped_storage().resize_(4 * 400_000)
