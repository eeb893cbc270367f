"""Tensors of all kinds, and the storages that are moved into shared memory."""

from __future__ import annotations

import numpy as np
import torch

from tests.transports.collectives.operations import (
    LAYOUTS,
    MOVES,
    Call,
    all_reduce,
    channels_last,
    complete,
    given,
    images,
    operations,
    run_each,
)
from tests.transports.collectives.table import (
    Dist,
    add_up,
    case,
    rank_and_size,
    same,
    usable,
    values,
)


@case(unlike_gloo="it refuses tensors that are not dense, or takes the memory between them")
def tensors_that_are_not_contiguous(dist: Dist) -> None:
    for layout in LAYOUTS:
        run_each(dist, layout=layout, count=24, turns=2)
        run_each(dist, layout=layout, count=24_000)
        run_each(dist, (all_reduce,), layout=layout, count=480_000, turns=3)
    layout = channels_last if dist.get_rank() == 1 else images
    run_each(dist, (all_reduce,), layout=layout, count=12_000)


@case(unlike_gloo="it wants equal shapes")
def lists_of_other_shapes(dist: Dist) -> None:
    """Of the root: with as many elements, and strides of their own."""
    rank, n = rank_and_size(dist)
    t, parts = values(rank, 6), [torch.zeros(3, 2).t() for _ in range(n)]
    given = parts if rank == 1 else []
    dist.gather(t, given, 1)
    for r, part in enumerate(given):
        same(part.reshape(-1), values(r, 6))
    dist.scatter(t.zero_(), given, 1)
    same(t, values(rank, 6))


@case(unlike_gloo="it has no all_to_all")
def another_default_device(dist: Dist) -> None:
    """`torch.set_default_device` in the thread that calls concerns the caller's tensors only.

    torch 2.13 suspends it inside most functions of torch.distributed, but not in a group's methods.
    """

    n, options = dist.get_world_size(), dist.distributed_c10d.AllToAllOptions()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False  # it is run in this thread
    t, exchanged = values(dist.get_rank(), 5), [torch.zeros(5) for _ in range(n)]
    with torch.device("meta"):
        group = dist.new_group()
        for count in (3, 20_000, 300_000):
            run_each(dist, count=count, group=group)
            run_each(dist, (all_reduce,), count=count, dtype=torch.bfloat16, op="AVG", group=group)
        group.alltoall(exchanged, [t] * n, options).wait()
    for r in range(n):
        same(exchanged[r], values(r, 5))
    usable(dist, group)
    dist.destroy_process_group(group)


@case()
def tensors_without_elements(dist: Dist) -> None:
    # Gloo refuses lists of them.
    which = (*MOVES[:4], all_reduce) if dist.get_backend() == "gloo" else operations(dist)
    run_each(dist, which, count=0)
    dist.all_reduce(torch.zeros(3, 0), async_op=True).wait()
    dist.reduce_scatter_tensor(torch.zeros(0), torch.zeros(0))
    usable(dist)


@case(unlike_gloo="it has no all_to_all")
def results_that_take_the_place_of_what_is_sent(dist: Dist) -> None:
    """In tensors of both lists."""
    rank, n = rank_and_size(dist)
    for count in (2, 1_500_000):
        tensors = [torch.full((count,), 10.0 * rank + r) for r in range(n)]
        dist.all_to_all(tensors[::-1], tensors)
        for r, t in enumerate(tensors[::-1]):
            assert t.eq(10 * r + rank).all()


@case()
def parameters_and_scalars(dist: Dist) -> None:
    n = dist.get_world_size()
    for shape in ((), (3,), (300_000,)):
        p = torch.nn.Parameter(torch.ones(shape))
        for _ in range(3):
            p.data.fill_(1)
            dist.all_reduce(p)
            same(p.detach(), torch.full(shape, float(n)))
            dist.broadcast(p, 0, async_op=True).wait()
        assert p.requires_grad
        assert p.grad_fn is None
        parts = [torch.zeros(shape) for _ in range(n)]
        dist.all_gather(parts, p.data)
        same(parts[1], p.detach())


@case()
def tensors_of_inference_mode(dist: Dist) -> None:
    with torch.inference_mode():
        for count in (3, 20_000, 300_000):
            for is_async in (False, True):
                run_each(dist, count=count, turns=2, is_async=is_async)
        inside = torch.ones(3)
    dist.all_reduce(inside)
    same(inside.clone(), torch.full((3,), float(dist.get_world_size())))


@case()
def arrays_and_views_stay_aliases(dist: Dist) -> None:
    """Of a tensor that may be moved into shared memory, if they are made before or after that."""
    n = dist.get_world_size()
    owned, borrowed = torch.empty(500_000), np.empty(500_000, np.float32)
    pairs = [
        (owned, owned.numpy()),
        (torch.from_numpy(borrowed), borrowed),
        (torch.frombuffer(borrowed.data, dtype=torch.float32), borrowed),
    ]
    late = torch.ones(500_000)
    dist.all_reduce(late)
    for t, array in [*pairs, (late, late.numpy())]:
        view, row, detached = t.view(-1), t.view(1000, 500)[500], t.detach()
        for _ in range(4):
            array[:] = 1
            dist.all_reduce(t)
            assert (array == n).all()
            for other in (view, row, detached):
                assert other.eq(n).all()
            array[7] = 9
            assert view[7] == 9


@case()
def shared_tensors_that_come_and_go(dist: Dist) -> None:
    """The memory of one that has gone is soon another's."""
    for number in range(60):
        count, turns = 262_144 + 1_000 * (number % 7), 1 + number % 3
        run_each(dist, (all_reduce,), count=count, turns=turns)


@case()
def shared_on_one_rank_only(dist: Dist) -> None:
    """One rank has seen it before, the others have not. It is elsewhere in each one's storage."""
    rank = dist.get_rank()
    begin, kept = 1 + 3 * rank, torch.full((1_000_000,), -1.0)
    for _ in range(3):
        base = kept if rank == 0 else kept.clone()
        part = base[begin:][:600_000]
        complete(all_reduce(Call(dist, 600_000, turns=5, layout=given(part))))
        assert base.eq(-1).sum() == 400_000


@case()
def a_storage_that_is_resized(dist: Dist) -> None:
    """As FSDP does with the parameters that it has gathered. A large tensor is moved into shared
    memory when it is seen again.
    """
    large, small = torch.empty(400_000), torch.empty(1_000)
    for _ in range(4):
        add_up(dist, large)
        add_up(dist, small)
        storage = large.untyped_storage()
        if not storage.is_shared():
            storage.resize_(0)
            storage.resize_(large.nbytes)
    assert large.untyped_storage().is_shared() == (dist.get_backend() != "gloo")
    assert not small.untyped_storage().is_shared()
