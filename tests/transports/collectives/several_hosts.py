"""Groups whose ranks count as those of several hosts: what the hosts compute, compare and send."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from hvdtrain.transports import hosts, shm_sync
from tests.transports.collectives.operations import (
    MOVES,
    all_reduce,
    reduce_scatter_tensor,
    run_each,
)
from tests.transports.collectives.table import (
    FLOATS,
    WHOLE,
    Dist,
    case,
    rank_and_size,
    refused,
    same,
    summed_by_hosts,
    usable,
)

Hosts = Sequence[Sequence[int]]
PAIRS: Hosts = ([0, 1], [2, 3])
SINGLE: Hosts = ([0], [1], [2], [3])
LAYOUTS: Sequence[Hosts] = (PAIRS, SINGLE, ([0, 2], [1], [3]), ([0, 2], [1, 3]))


@contextlib.contextmanager
def on_hosts(dist: Dist, layout: Hosts) -> Iterator[Any]:
    """Open a group of all ranks, which share memory as if they were on these hosts."""
    own = next(i for i, ranks in enumerate(layout) if dist.get_rank() in ranks)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shm_sync, "host_identity", lambda *_: f"host {own}")
        group = dist.new_group()
    assert group.transport.hosts.ranks == list(map(list, layout))
    yield group
    dist.destroy_process_group(group)


@case(sizes=(4,), unlike_gloo="it has one order of its own")
def sums_are_in_the_order_of_the_hosts(dist: Dist) -> None:
    """To the bit, in every path: so they are the same over Gloo and over MPI."""
    rank, n = rank_and_size(dist)
    for layout in LAYOUTS:
        with on_hosts(dist, layout) as group:
            for count, dtype in itertools.product(
                (0, 1, 2, 3, 4, 495, 496, 497, 5_000, 20_001, 300_000), FLOATS
            ):
                generator = torch.Generator().manual_seed(count)
                parts = list(torch.randn(n, count, generator=generator).to(dtype))
                t = torch.empty(count, dtype=dtype)
                for _, (op, divisor) in itertools.product(
                    range(1 + (count > 20_001)), ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, n))
                ):
                    dist.all_reduce(t.copy_(parts[rank]), op, group)
                    same(t, summed_by_hosts(layout, parts, divisor))


@case(sizes=(4,), unlike_gloo="it has no int16")
def every_type_and_operation_over_hosts(dist: Dist) -> None:
    for layout in LAYOUTS[:3]:
        with on_hosts(dist, layout) as group:
            for dtype in (*FLOATS, *WHOLE, torch.int16):
                more = () if dtype.is_floating_point else ("BAND", "BOR", "BXOR")
                for op in ("SUM", "PRODUCT", "MIN", "MAX", *more):
                    for count in (3, 20_001):
                        call = {"count": count, "dtype": dtype, "op": op}
                        run_each(dist, (all_reduce,), group=group, **call)
            run_each(dist, MOVES, count=20_001, group=group)


@case(sizes=(4,), unlike_gloo="it has no hosts")
def large_tensors_in_many_pieces(dist: Dist) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hosts, "_LEAST_BYTES", 8 << 10)
        for layout in LAYOUTS:
            with on_hosts(dist, layout) as group:
                for count in (300_000, 300_001):
                    operations = (all_reduce, reduce_scatter_tensor)
                    run_each(dist, operations, count=count, turns=3, group=group)
                for dtype in (torch.uint8, torch.float64):  # the last piece has one element
                    count = 4 * 64 * 1024 + 1
                    run_each(dist, (all_reduce,), count=count, dtype=dtype, group=group)


@case(sizes=(4,), unlike_gloo="it ends the process")
def hosts_whose_calls_differ(dist: Dist) -> None:
    """Whether one host's ranks differ, or a host from the others; and whatever the sizes."""
    rank, maximum = dist.get_rank(), dist.ReduceOp.MAX
    for layout in LAYOUTS[:3]:
        with on_hosts(dist, layout) as group:
            calls: list[Callable[[], object]] = [
                lambda: dist.barrier(group),
                lambda: dist.all_reduce(torch.ones(4), group=group),
                lambda: dist.all_reduce(torch.ones(4), maximum, group),
                lambda: dist.all_reduce(torch.ones(490), group=group),
                lambda: dist.all_reduce(torch.ones(500_000), group=group),
                lambda: dist.broadcast(torch.ones(5), 0, group),
                lambda: dist.all_gather_into_tensor(torch.ones(16), torch.ones(4), group),
            ]
            others = {layout[0][0]}, set(layout[-1]), {layout[0][-1], layout[-1][0]}
            for one, other, ranks in itertools.product(calls[:2], calls, others):
                if one is other:
                    continue
                with refused(RuntimeError, "the ranks called different", "rank 0"):
                    (other if rank in ranks else one)()
            usable(dist, group)


@case(sizes=(4,), unlike_gloo="it has no hosts")
def what_crosses_between_hosts(dist: Dist) -> None:
    """Of a small tensor one message; of a large one 2 (H - 1) / H of it, halves as they are."""
    sent = list[int]()
    for layout in (PAIRS, SINGLE):
        others = len(layout) - 1
        is_first = dist.get_rank() in {ranks[0] for ranks in layout}
        with on_hosts(dist, layout) as group:
            own = group.transport.hosts._own
            channel = group.transport.hosts.channel
            start = channel.all_to_all

            def counted(*given: Any, own: int = own, start: Any = start) -> Any:
                sent.append(sum(given[3]) - given[3][own])
                return start(*given)

            channel.all_to_all = counted
            for count, dtype in ((16, FLOATS[0]), (800_000, FLOATS[0]), (800_000, FLOATS[3])):
                sent.clear()
                t = torch.ones(count, dtype=dtype)
                dist.all_reduce(t, group=group)
                message = 2048 * others * is_first
                share = t.nbytes / len(layout[0]) * 2 * others / len(layout) * (count > 16)
                assert abs(sum(sent) - message - share) <= 1024, (layout, count, dtype, sent)
                assert len(sent) == is_first or count > 16


@case(sizes=(4,), unlike_gloo="it divides by itself")
def averages_of_halves_neither_overflow_nor_vanish(dist: Dist) -> None:
    for layout in LAYOUTS:
        with on_hosts(dist, layout) as group:
            for value, count in itertools.product((60_000.0, 1.2e-7), (5, 50_000)):
                t = torch.full((count,), value, dtype=torch.float16)
                dist.all_reduce(given := t.clone(), dist.ReduceOp.AVG, group=group)
                assert given.equal(t)
