"""What the operations compute and move, of every type, operation and size."""

from __future__ import annotations

import functools
import itertools
import time
import warnings

import torch

from tests.transports.collectives.operations import (
    MOVES,
    REDUCTIONS,
    Call,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    broadcast,
    complete,
    given,
    reduce_scatter_tensor,
    run_each,
)
from tests.transports.collectives.table import (
    FLOATS,
    LARGE,
    SIZES,
    WHOLE,
    Dist,
    case,
    computed,
    rank_and_size,
    refused,
    same,
    summed_by_hosts,
    values,
)

WITHOUT_LISTS = (all_reduce, broadcast, all_gather_into_tensor, reduce_scatter_tensor)


@case(everywhere=True)
def every_size_again_and_again(dist: Dist) -> None:
    for count in SIZES:
        run_each(dist, count=count, turns=3)
    run_each(dist, WITHOUT_LISTS, count=LARGE, turns=3)


@case()
def every_type_and_operation(dist: Dist) -> None:
    whole = WHOLE if dist.get_backend() == "gloo" else (*WHOLE, torch.int16)
    for dtype in (*FLOATS, *whole):
        more = ("BAND", "BOR", "BXOR") if dtype in whole else ("AVG",)
        for op in ("SUM", "PRODUCT", "MIN", "MAX", *more):
            run_each(dist, (all_reduce,), dtype=dtype, op=op, count=20_001)
            run_each(dist, REDUCTIONS, dtype=dtype, op=op)
        run_each(dist, (broadcast, all_gather), dtype=dtype, count=1_001)


@case(unlike_gloo="it has no int16 and no float8, and cannot gather complex numbers")
def types_that_gloo_has_not(dist: Dist) -> None:
    for dtype in (torch.int16, torch.float8_e5m2, torch.complex64, torch.bool):
        run_each(dist, MOVES, dtype=dtype, count=9)
    for op in ("SUM", "AVG"):
        for dtype in (torch.complex64, torch.complex128):
            t = values(dist.get_rank(), 20_001, dtype) * (1 + 2j)
            dist.all_reduce(t, getattr(dist.ReduceOp, op))
            expected = computed(dist.get_world_size(), 20_001, dtype, op) * (1 + 2j)
            torch.testing.assert_close(t, expected)


@case(unlike_gloo="it adds up the bytes of bools: true and true are 2 in memory")
def bools(dist: Dist) -> None:
    rank, n = rank_and_size(dist)
    mine = [(torch.arange(70_001) // (r + 1)) % 2 == 0 for r in range(n)]
    every = torch.stack(mine)
    expected = dict.fromkeys(("SUM", "MAX", "BOR"), every.any(0))
    expected |= dict.fromkeys(("PRODUCT", "MIN", "BAND"), every.all(0))
    expected["BXOR"] = every.sum(0) % 2 == 1
    for op, result in expected.items():
        for count in (5, 70_001):
            t = mine[rank][:count].clone()
            dist.all_reduce(t, getattr(dist.ReduceOp, op))
            same(t, result[:count])
            assert int(t.view(torch.uint8).max()) <= 1


@case(everywhere=True)
def around_the_borders_of_paths(dist: Dist) -> None:
    """What a message's slot holds over MPI, and what is sent whole to all; the paths of `shm`."""
    n = dist.get_world_size()
    for num_bytes in (2032, 64 << 10):
        for dtype in (torch.float16, torch.bfloat16, torch.int32):
            border = num_bytes // dtype.itemsize
            for count in (border - 1, border, border + 1):
                run_each(dist, (*MOVES[:4], *REDUCTIONS), dtype=dtype, count=count)
                if dtype.is_floating_point:
                    run_each(dist, (all_reduce,), dtype=dtype, count=count, op="AVG")
    for num_bytes in ((2 << 20) // n, 1 << 20, 4 << 20):
        for count in (num_bytes // 4 - 1, num_bytes // 4, num_bytes // 4 + 1):
            run_each(dist, (all_reduce,), count=count, turns=3)


@case(unlike_gloo="it adds up half by half", sizes=(3,))
def halves_are_added_up_in_float32(dist: Dist) -> None:
    """1 + 2^-11 + 2^-11 is 1 in steps of float16, and 1 + 2^-10 rightly. Those of a host are."""
    rank, n = rank_and_size(dist)
    hosts = dist.group.WORLD.transport.hosts.ranks
    for dtype, eps in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        for count in (5, 50_000, 1_000_000):
            t, mine = torch.empty(count, dtype=dtype), 1.0 if rank == 0 else eps
            parts = [torch.full((count,), eps if r else 1.0, dtype=dtype) for r in range(n)]
            total = summed_by_hosts(hosts, parts)
            for _ in range(3):
                dist.all_reduce(t.fill_(mine))
                same(t, total)


@case()
def all_ranks_get_the_same_bits(dist: Dist) -> None:
    """Whatever rank arrives last, also of NaN and infinity; by rank order, where a sum is small and
    on one host. Two ranks have no order.
    """
    rank, n = rank_and_size(dist)
    kept = [torch.empty(count) for count in (250, 300_000)]
    on_one_host = dist.get_backend() == "shm" and len(dist.group.WORLD.transport.hosts.ranks) == 1
    for turn in range(20):
        parts = torch.stack(
            [
                torch.randn(300_000, generator=torch.Generator().manual_seed(7 * turn + r))
                for r in range(n)
            ]
        )
        parts[1, 3], parts[1, 4] = float("nan"), float("inf")
        if turn % n == rank:
            time.sleep(0.002)
        for t, (op, divisor) in itertools.product(
            kept, ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, n))
        ):
            mine = parts[:, : len(t)]
            dist.all_reduce(t.copy_(mine[rank]), op)
            expected = functools.reduce(torch.add, mine).div(divisor)
            limit = 0 if on_one_host and len(t) == 250 else 1e-5
            torch.testing.assert_close(t, expected, rtol=limit, atol=limit, equal_nan=True)
            everyone = [torch.empty_like(t) for _ in range(n)]
            dist.all_gather(everyone, t)
            for theirs in everyone:
                same(theirs.view(torch.int32), t.view(torch.int32))


@case()
def a_sparse_tensor(dist: Dist) -> None:
    rows = 2 * torch.eye(5)
    t = rows[dist.get_rank()].to_sparse()
    dist.all_reduce(t)
    same(t.to_dense(), rows[: dist.get_world_size()].sum(0))


@case()
def coalesced(dist: Dist) -> None:
    rank, n = rank_and_size(dist)
    manager = dist.distributed_c10d._coalescing_manager
    if dist.get_backend() != "gloo":  # which has none
        lists = [[torch.zeros(4), torch.zeros(6)] for _ in range(n)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_gather_coalesced(lists, [values(rank, 4), values(rank, 6)])
        for r, pair in enumerate(lists):
            for t in pair:
                same(t, values(r, len(t)))
    for is_async in (False, True):
        for operation in (all_reduce, all_gather_into_tensor, reduce_scatter_tensor):
            started = [operation(Call(dist, count)) for count in (3, 1_000, 20_000, 400_000)]
            with manager(async_ops=is_async) as work:
                for one in started:
                    next(one)
            if is_async:
                work.wait()
            complete(*started)


@case()
def functional_collectives(dist: Dist) -> None:
    import torch.distributed._functional_collectives as functional

    n, world = dist.get_world_size(), dist.group.WORLD
    for count in (4, 400_000):
        call = Call(dist, count)
        t, whole = call.values(call.rank), call.values(call.rank, n)
        for result, expected in (
            (functional.all_reduce(t, "sum", world), call.total()),
            (t, call.values(call.rank)),
            (functional.broadcast(t, 1, world), call.values(1)),
            (functional.all_gather_tensor(t, 0, world)[count:][:count], call.values(1)),
            (functional.reduce_scatter_tensor(whole, "sum", 0, world), call.mine(call.total(n))),
            (
                functional.all_to_all_single(whole, None, None, world)[count:][:count],
                call.mine(call.values(1, n)),
            ),
        ):
            same(result + 0, expected)
    weight = torch.ones(3, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(weight, 0, world)
    # A gradient in memory of its own: torch 2.9 refuses the expanded one of `sum`, on Gloo too.
    (gathered * torch.ones(3 * n)).sum().backward()
    assert weight.grad is not None
    same(weight.grad, torch.full((3,), float(n)))


@case()
def all_gather_into_a_tensor_that_the_input_is_part_of(dist: Dist) -> None:
    """As FSDP does it."""
    for count in (7, 20_000, 1_500_000):
        out = torch.zeros(dist.get_world_size(), count)
        layout = given(out.view(-1), out[dist.get_rank()])
        complete(all_gather_into_tensor(Call(dist, count, layout=layout)))


@case()
def reduce_scatter_of_a_tensor_in_shared_memory(dist: Dist) -> None:
    """Where all_reduce has moved it."""
    n, count = dist.get_world_size(), 400_000
    t = torch.empty(n * count)
    complete(all_reduce(Call(dist, n * count, turns=2, layout=given(t))))
    layout = given(torch.empty(count), t)
    complete(reduce_scatter_tensor(Call(dist, count, turns=3, layout=layout)))


@case(unlike_gloo="it changes tensors that autograd has saved, unnoticed")
def autograd_notices_a_small_all_reduce(dist: Dist) -> None:
    """A tensor that is saved for the backward pass must not change unnoticed."""
    weight = torch.ones(3, requires_grad=True)
    for t in (torch.ones(3), weight.detach()):
        loss = (weight * t).sum()
        dist.all_reduce(t)
        with refused(RuntimeError, "modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]
