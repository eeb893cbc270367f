"""The table of cases: what every collective of torch.distributed does, whatever the transport.

A case is a function of torch.distributed that every rank calls, with its expectations as asserts;
test_collectives.py runs them. It holds on Gloo, too, unless it says how hvdtrain's own transports
are `unlike_gloo`, or that it is about `shm` alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

Dist = Any
F = TypeVar("F", bound=Callable[[Dist], object])


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    function: Callable[[Dist], object]
    unlike_gloo: str  # why Gloo does it otherwise, or not at all
    shm_only: bool
    sizes: Sequence[int]

    @property
    def name(self) -> str:
        return self.function.__name__

    def holds_on(self, transport: str, n: int) -> bool:
        if self.unlike_gloo and transport == "gloo" or self.shm_only and transport != "shm":
            return False
        return n in self.sizes


TABLE: list[Case] = []


def case(
    *, unlike_gloo: str = "", shm_only: bool = False, sizes: Sequence[int] = (2, 3)
) -> Callable[[F], F]:
    """Make a function a row of the table."""

    def add(function: F) -> F:
        TABLE.append(Case(function, unlike_gloo, shm_only, sizes))
        return function

    return add


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int8, torch.int32, torch.int64)
ALL = (*FLOATS, *WHOLE)

# Elements of float32: for one cache line, for what all add up themselves, for one stage, for what
# is moved into shared memory when it is seen again, and for several stages.
SIZES = (1, 7, 1_000, 20_000, 300_000, 2_250_001)


def values(rank: int, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank contributes: 1 to 4, so that every type holds the sum and the product exactly."""
    count = int(np.prod(shape))
    numbers = (torch.arange(count) * (rank + 3) // 2 + rank) % 4 + 1
    return numbers.reshape(shape if isinstance(shape, Sequence) else (shape,)).to(dtype)


def computed(dist: Dist, op: str, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `op` makes of all ranks' values, by NumPy."""
    parts = [values(r, shape, torch.int64).numpy() for r in range(dist.get_world_size())]
    of = {
        "SUM": np.add,
        "AVG": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }[op]
    total = torch.from_numpy(np.asarray(functools.reduce(of, parts)))
    if op == "AVG":
        return (total.to(torch.float64) / len(parts)).to(dtype)
    return total.to(dtype)


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.shape == b.shape, (a.shape, b.shape)
    if not torch.equal(a, b):
        at = int((a != b).flatten().nonzero()[0])
        raise AssertionError(f"at {at}: {a.flatten()[at]} and not {b.flatten()[at]}")


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=0)


@contextlib.contextmanager
def refused(kind: type[Exception], *said: str) -> Iterator[None]:
    with pytest.raises(kind) as raised:
        yield
    missing = [text for text in said if text not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


def usable(dist: Dist, group: Any = None) -> None:
    """Whether a group still does what it should, in all sizes."""
    n = dist.get_world_size(group)
    for count in (3, 20_000, 300_000):
        t = torch.full((count,), 2.0)
        dist.all_reduce(t, group=group)
        same(t, torch.full((count,), 2.0 * n))


# All-reduce


@case()
def all_reduce_of_every_type_and_operation(dist: Dist) -> None:
    for dtype in ALL:
        ops = ["SUM", "PRODUCT", "MIN", "MAX", *(("BAND", "BOR", "BXOR") * (dtype in WHOLE))]
        for op in ops:
            for count in (5, 20_001):
                t = values(dist.get_rank(), count, dtype)
                dist.all_reduce(t, getattr(dist.ReduceOp, op))
                same(t, computed(dist, op, count, dtype))


@case(unlike_gloo="it has no int16")
def all_reduce_of_int16(dist: Dist) -> None:
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        t = values(dist.get_rank(), 20_001, torch.int16)
        dist.all_reduce(t, getattr(dist.ReduceOp, op))
        same(t, computed(dist, op, 20_001, torch.int16))


@case(unlike_gloo="it adds up the bytes of bools: true and true are 2 in memory")
def all_reduce_of_bools(dist: Dist) -> None:
    def said(rank: int) -> Tensor:
        return (torch.arange(70_001) // (rank + 1)) % 2 == 0

    every = torch.stack([said(r) for r in range(dist.get_world_size())])
    some, all_of = every.any(0), every.all(0)
    odd = every.sum(0) % 2 == 1
    expected = {"SUM": some, "PRODUCT": all_of, "MIN": all_of, "MAX": some}
    expected |= {"BAND": all_of, "BOR": some, "BXOR": odd}
    for op, result in expected.items():
        for count in (5, 70_001):
            t = said(dist.get_rank())[:count].clone()
            dist.all_reduce(t, getattr(dist.ReduceOp, op))
            same(t, result[:count])
            assert int(t.view(torch.uint8).max()) <= 1


@case()
def all_reduce_of_complex_numbers(dist: Dist) -> None:
    for dtype in (torch.complex64, torch.complex128):
        for count in (5, 20_001):
            t = values(dist.get_rank(), count, dtype) * (1 + 2j)
            dist.all_reduce(t)
            same(t, computed(dist, "SUM", count, dtype) * (1 + 2j))


@case()
def all_reduce_by_average(dist: Dist) -> None:
    for dtype in FLOATS:
        for count in (5, 20_001, 300_000):
            for _ in range(3):
                t = values(dist.get_rank(), count, dtype)
                dist.all_reduce(t, dist.ReduceOp.AVG)
                close(t, computed(dist, "AVG", count, dtype))
    t = values(dist.get_rank(), 5, torch.complex64)
    dist.all_reduce(t, dist.ReduceOp.AVG)
    torch.testing.assert_close(t, computed(dist, "AVG", 5, torch.float32).to(torch.complex64))


@case()
def all_reduce_of_every_size_again_and_again(dist: Dist) -> None:
    for count in SIZES:
        t = torch.empty(count)
        for turn in range(4):
            t.copy_(values(dist.get_rank() + turn, count))
            dist.all_reduce(t)
            n = dist.get_world_size()
            same(t, sum((values(r + turn, count) for r in range(n)), torch.zeros(count)))


@case()
def all_reduce_around_the_borders_of_paths(dist: Dist) -> None:
    for num_bytes in (64 << 10, 1 << 20, 4 << 20):
        for count in (num_bytes // 4 - 1, num_bytes // 4, num_bytes // 4 + 1):
            t = torch.empty(count)
            for _ in range(3):
                t.copy_(values(dist.get_rank(), count))
                dist.all_reduce(t)
                same(t, computed(dist, "SUM", count, torch.float32))


@case(unlike_gloo="it adds up half by half")
def halves_are_added_up_in_float32(dist: Dist) -> None:
    """1 + 2^-11 + 2^-11 is 1 in steps of float16, and 1 + 2^-10 rightly."""
    if dist.get_world_size() < 3:
        return
    for dtype, eps in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        for count in (5, 50_000, 1_000_000):
            t = torch.empty(count, dtype=dtype)
            for _ in range(3):
                t.fill_(1.0 if dist.get_rank() == 0 else eps)
                dist.all_reduce(t)
                same(t, torch.full((count,), 1 + 2 * eps, dtype=dtype))


@case()
def all_ranks_get_the_same_bits(dist: Dist) -> None:
    for count in (1_000, 300_000):
        generator = torch.Generator().manual_seed(dist.get_rank())
        t = torch.randn(count, generator=generator)
        for _ in range(3):
            dist.all_reduce(t, dist.ReduceOp.AVG)
            t += dist.get_rank()
        t -= dist.get_rank()
        dist.all_reduce(t, dist.ReduceOp.AVG)
        everyone = [torch.empty(count) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, t)
        for theirs in everyone:
            same(theirs, t)


@case()
def nan_and_infinity(dist: Dist) -> None:
    for count in (100, 300_000):
        t = torch.empty(count)
        for _ in range(3):
            t.fill_(1.0)
            if dist.get_rank() == 1:
                t[3], t[4] = float("nan"), float("inf")
            dist.all_reduce(t)
            assert t[3].isnan()
            assert t[4].isinf()
            assert t[5:].eq(dist.get_world_size()).all()


@case()
def all_reduce_of_a_sparse_tensor(dist: Dist) -> None:
    t = torch.sparse_coo_tensor(
        torch.tensor([[dist.get_rank()]]), torch.tensor([2.0]), (5,), check_invariants=True
    )
    dist.all_reduce(t)
    n = dist.get_world_size()
    same(t.to_dense(), torch.tensor([2.0] * n + [0.0] * (5 - n)))


@case()
def all_reduce_coalesced(dist: Dist) -> None:
    rank, shapes = dist.get_rank(), [(3,), (4, 5), (1,), (100, 100), (400, 1000)]
    for _ in range(3):
        tensors = [values(rank, shape) for shape in shapes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce_coalesced(tensors)
        for t, shape in zip(tensors, shapes, strict=True):
            same(t, computed(dist, "SUM", shape, torch.float32))


# What moves


@case()
def broadcast(dist: Dist) -> None:
    for root in range(dist.get_world_size()):
        for count in SIZES:
            t = values(dist.get_rank(), count)
            dist.broadcast(t, root)
            same(t, values(root, count))
        for dtype in (*ALL, torch.bool, torch.int16, torch.complex64, torch.float8_e5m2):
            if dtype in (torch.int16, torch.float8_e5m2) and dist.get_backend() == "gloo":
                continue
            t = values(dist.get_rank(), 9, torch.int64).to(dtype)
            dist.broadcast(t, root)
            assert t.dtype == dtype
            same(t.to(torch.complex64), values(root, 9).to(dtype).to(torch.complex64))


@case()
def all_gather(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in ALL:
        for count in (1, 1_001, 20_001):
            parts = [torch.zeros(count, dtype=dtype) for _ in range(n)]
            dist.all_gather(parts, values(rank, count, dtype))
            for r, part in enumerate(parts):
                same(part, values(r, count, dtype))
    parts = [torch.zeros(1_100_001) for _ in range(n)]
    dist.all_gather(parts, values(rank, 1_100_001))
    for r, part in enumerate(parts):
        same(part, values(r, 1_100_001))


@case()
def all_gather_into_tensor(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in SIZES:
        out, t = torch.zeros(n * count), values(rank, count)
        for _ in range(3):
            dist.all_gather_into_tensor(out, t)
            for r in range(n):
                same(out[r * count : (r + 1) * count], values(r, count))
    rows = torch.zeros(n * 4, 3)
    dist.all_gather_into_tensor(rows, values(rank, (4, 3)))
    same(rows[4:8], values(1, (4, 3)))
    out = torch.zeros(n * 3, dtype=torch.complex64)
    dist.all_gather_into_tensor(out, values(rank, 3, torch.complex64))
    same(out[3:6], values(1, 3, torch.complex64))


@case()
def all_gather_into_a_tensor_that_the_input_is_part_of(dist: Dist) -> None:
    """As FSDP does it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in (7, 20_000, 1_500_000):
        out = torch.zeros(n * count)
        mine = out[rank * count : (rank + 1) * count]
        mine.copy_(values(rank, count))
        dist.all_gather_into_tensor(out, mine)
        for r in range(n):
            same(out[r * count : (r + 1) * count], values(r, count))


@case(unlike_gloo="it has none")
def all_gather_coalesced(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    lists = [[torch.zeros(4), torch.zeros(2, 3)] for _ in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(lists, [values(rank, 4), values(rank, (2, 3))])
    for r, (a, b) in enumerate(lists):
        same(a, values(r, 4))
        same(b, values(r, (2, 3)))


@case()
def reduce_scatter_tensor(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
        for count in SIZES if op == "SUM" else (5, 300_000):
            t, out = torch.empty(n * count), torch.zeros(count)
            for _ in range(3 if op == "SUM" else 1):
                t.copy_(values(rank, n * count))
                dist.reduce_scatter_tensor(out, t, getattr(dist.ReduceOp, op))
                expected = computed(dist, op, n * count, torch.float32)
                close(out, expected[rank * count : (rank + 1) * count])
                same(t, values(rank, n * count))
    for dtype in ALL:
        out = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter_tensor(out, values(rank, n * 5, dtype))
        same(out, computed(dist, "SUM", n * 5, dtype)[rank * 5 : rank * 5 + 5])


@case()
def reduce_scatter_of_a_tensor_seen_before(dist: Dist) -> None:
    """So that it lies in shared memory where there is any; its input stays as it was."""
    rank, n = dist.get_rank(), dist.get_world_size()
    count = 400_000
    t = torch.empty(n * count)
    for _ in range(3):
        t.copy_(values(rank, n * count))
        dist.all_reduce(t)
        t.copy_(values(rank, n * count))
        out = torch.zeros(count)
        dist.reduce_scatter_tensor(out, t)
        same(out, computed(dist, "SUM", n * count, torch.float32)[rank * count :][:count])
        same(t, values(rank, n * count))


@case()
def reduce_scatter(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in (1, 1_000, 20_000, 300_000):
        out = torch.zeros(count)
        parts = list(torch.split(values(rank, n * count), count))
        dist.reduce_scatter(out, parts)
        same(out, computed(dist, "SUM", n * count, torch.float32)[rank * count :][:count])


@case()
def all_to_all_single(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in SIZES:
        out = torch.zeros(n * count)
        dist.all_to_all_single(out, values(rank, n * count))
        for r in range(n):
            same(out[r * count :][:count], values(r, n * count)[rank * count :][:count])
    rows = torch.zeros(2 * n, 3, dtype=torch.int64)
    dist.all_to_all_single(rows, values(rank, (2 * n, 3), torch.int64))
    same(rows[2:4], values(1, (2 * n, 3), torch.int64)[2 * rank :][:2])


@case()
def all_to_all_single_uneven(dist: Dist) -> None:
    """Rank r sends (r + 1) * (k + 1) - 1 rows to rank k: none from 0 to 0."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for width in (1, 3, 400, 400_000):
        sent = [(rank + 1) * (k + 1) - 1 for k in range(n)]
        received = [(r + 1) * (rank + 1) - 1 for r in range(n)]
        data = torch.cat([torch.full((m, width), 10.0 * rank + k) for k, m in enumerate(sent)])
        out = torch.zeros(sum(received), width)
        dist.all_to_all_single(out, data, received, sent)
        theirs = [torch.full((m, width), 10.0 * r + rank) for r, m in enumerate(received)]
        same(out, torch.cat(theirs))


@case()
def all_to_all_single_of_nothing_for_some(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    sent = [0] * n
    received = [0] * n
    if rank == 0:
        sent[1] = 5
    if rank == 1:
        received[0] = 5
    out = torch.zeros(sum(received))
    dist.all_to_all_single(out, values(rank, sum(sent)), received, sent)
    if rank == 1:
        same(out, values(0, 5))


@case(unlike_gloo="it has none")
def all_to_all(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for scale in (1, 30_000, 500_000):
        for dtype in (torch.float32, torch.uint8):
            sent = [torch.full((scale * (rank + k),), rank + 5 * k, dtype=dtype) for k in range(n)]
            got = [torch.zeros(scale * (rank + r), dtype=dtype) for r in range(n)]
            dist.all_to_all(got, sent)
            for r, t in enumerate(got):
                same(t, torch.full((scale * (rank + r),), r + 5 * rank, dtype=dtype))


@case()
def gather(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for root in range(n):
        for count in (1, 20_000, 300_000):
            parts = [torch.zeros(count) for _ in range(n)] if rank == root else None
            dist.gather(values(rank, count), parts, root)
            for r, part in enumerate(parts or []):
                same(part, values(r, count))


@case()
def scatter(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for root in range(n):
        for count in (1, 20_000, 300_000):
            t = torch.zeros(count)
            parts = [values(r + 1, count) for r in range(n)] if rank == root else None
            dist.scatter(t, parts, root)
            same(t, values(rank + 1, count))


@case()
def reduce(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for root in range(n):
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            for count in (1, 300_000):
                t = values(rank, count)
                dist.reduce(t, root, getattr(dist.ReduceOp, op))
                if rank == root:
                    same(t, computed(dist, op, count, torch.float32))


@case()
def barrier(dist: Dist) -> None:
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    dist.barrier()
    assert time.monotonic() - begin > 0.25
    work = dist.barrier(async_op=True)
    work.wait()


# From one to one


@case()
def send_and_receive(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in (1, 20_000, 300_000):
        if rank == 0:
            for k in range(1, n):
                dist.send(values(k, count), k)
        else:
            t = torch.zeros(count)
            dist.recv(t, 0)
            same(t, values(rank, count))
    if rank == 0:
        for _ in range(1, n):
            t = torch.zeros(3)
            source = dist.recv(t)
            same(t, values(source, 3))
    else:
        dist.send(values(rank, 3), 0)


@case()
def send_and_receive_by_tag(dist: Dist) -> None:
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(values(tag, 50), 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    if rank == 1:
        for tag in (3, 1, 2):
            t = torch.zeros(50)
            dist.irecv(t, 0, tag=tag).wait()
            same(t, values(tag, 50))


@case()
def a_ring_in_one_batch(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in (10, 300_000):
        t = torch.zeros(count)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, values(rank, count), (rank + 1) % n),
                dist.P2POp(dist.irecv, t, (rank - 1) % n),
            ]
        )
        for work in works:
            work.wait()
        same(t, values((rank - 1) % n, count))


@case()
def a_tensor_that_is_being_sent_is_not_moved(dist: Dist) -> None:
    rank = dist.get_rank()
    if rank > 1:
        for _ in range(8):
            dist.all_reduce(torch.ones(1_000_000))
        return
    for turn in range(4):
        base = torch.empty(2_000_000)
        half, other = torch.split(base, 1_000_000)
        for _ in range(2):
            half.copy_(values(rank, 1_000_000))
            work = dist.isend(half, 1, tag=turn) if rank == 0 else dist.irecv(half, 0, tag=turn)
            other.fill_(1)
            dist.all_reduce(other)
            work.wait()
            same(half, values(0, 1_000_000))
            same(other, torch.full((1_000_000,), float(dist.get_world_size())))


# Objects


@case()
def objects(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * 1000 * rank, "tensor": values(rank, 5)}
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, mine)
    for r, theirs in enumerate(everyone):
        assert theirs["rank"] == r
        assert theirs["text"] == "x" * 1000 * r
        same(theirs["tensor"], values(r, 5))
    for root in range(n):
        collected: list[Any] | None = [None] * n if rank == root else None
        dist.gather_object(mine["rank"], collected, root)
        assert rank != root or collected == list(range(n))
        told = [f"from {rank}", None if rank != root else 7]
        dist.broadcast_object_list(told, root)
        assert told == [f"from {root}", 7]
        part: list[Any] = [None]
        dist.scatter_object_list(part, [f"to {r}" for r in range(n)], root)
        assert part == [f"to {rank}"]
    if rank == 0:
        dist.send_object_list([1, "two"], 1)
    if rank == 1:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, 0)
        assert got == [1, "two"]


# Many at once


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
    functional.all_gather_tensor_autograd(weight, 0, world).sum().backward()
    assert weight.grad is not None
    same(weight.grad, torch.full((3,), float(n)))


# Tensors of all kinds


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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        group = dist.new_group()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    tensors = [torch.empty(300_000) for _ in range(40)]
    for _ in range(3):
        for t in tensors:
            dist.all_reduce(t.fill_(1), group=group)
            assert t.eq(dist.get_world_size()).all()
    assert sum(t.untyped_storage().is_shared() for t in tensors) == 200 // 8
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


# Groups


@case()
def groups(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    pair, last, everyone = (dist.new_group(ranks) for ranks in ([0, 1], [n - 1], range(n)))
    for count in (3, 20_000, 400_000):
        for _ in range(3):
            if rank < 2:
                t = torch.full((count,), rank + 1.0)
                dist.all_reduce(t, group=pair)
                same(t, torch.full((count,), 3.0))
                t = torch.full((count,), float(rank))
                dist.broadcast(t, 1, group=pair)
                same(t, torch.ones(count))
            if rank == n - 1:
                t = torch.ones(count)
                dist.all_reduce(t, group=last)
                dist.broadcast(t, rank, group=last)
                dist.barrier(group=last)
                same(t, torch.ones(count))
                out = torch.zeros(count)
                dist.all_gather_into_tensor(out, t, group=last)
                dist.reduce_scatter_tensor(out, t, group=last)
                dist.all_to_all_single(out, t, group=last)
                same(out, t)
            usable(dist, everyone)
    if rank < 2:
        parts = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(parts, torch.full((2,), float(rank)), group=pair)
        same(parts[1], torch.ones(2))
        dist.destroy_process_group(pair)
    if rank == n - 1:
        dist.destroy_process_group(last)
    usable(dist, everyone)
    dist.destroy_process_group(everyone)
    usable(dist)


@case(sizes=(3,))
def a_group_numbers_its_ranks_itself(dist: Dist) -> None:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    if rank == 0:
        assert pair is dist.GroupMember.NON_GROUP_MEMBER
        return
    assert dist.get_rank(pair) == rank - 1
    out = torch.zeros(4)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)), group=pair)
    same(out, torch.tensor([1.0, 1, 2, 2]))
    t = torch.tensor([float(rank)])
    dist.broadcast(t, 2, group=pair)
    assert t == 2
    t = torch.tensor([float(rank)])
    dist.reduce(t, 1, group=pair)
    assert rank == 2 or t == 3
    if rank == 1:
        dist.send(torch.tensor([8.0]), 2, group=pair)
    else:
        dist.recv(t, 1, group=pair)
        assert t == 8
    dist.destroy_process_group(pair)


@case()
def groups_of_the_same_ranks_at_once(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    several = [dist.new_group() for _ in range(3)]
    order = several if rank % 2 == 0 else several[::-1]
    for count in (50, 400_000):
        base = torch.empty(3 * count)
        parts = dict(zip(several, torch.split(base, count), strict=True))
        for turn in range(4):
            base.fill_(turn + 1)
            works = [dist.all_reduce(parts[group], group=group, async_op=True) for group in order]
            for work in works:
                work.wait()
            same(base, torch.full((3 * count,), (turn + 1.0) * n))
    for group in several:
        dist.destroy_process_group(group)


@case()
def one_tensor_in_two_groups(dist: Dist) -> None:
    n = dist.get_world_size()
    other = dist.new_group()
    t = torch.empty(400_000)
    for turn in range(4):
        t.fill_(1)
        dist.all_reduce(t)
        dist.all_reduce(t, group=other)
        same(t, torch.full((400_000,), float(n * n)))
        if turn == 2:
            dist.destroy_process_group(other)
            other = dist.new_group()
    dist.destroy_process_group(other)
    t.fill_(1)
    dist.all_reduce(t)
    same(t, torch.full((400_000,), float(n)))


@case()
def a_mesh(dist: Dist) -> None:
    n = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("rows", "columns"))
    usable(dist, mesh.get_group("rows"))
    usable(dist, mesh.get_group("columns"))
    dist.destroy_process_group(mesh.get_group("columns"))


@case()
def the_name_of_the_transport(dist: Dist) -> None:
    group = dist.new_group(timeout=timedelta(seconds=10))
    assert dist.get_backend(group) == dist.get_backend()
    assert dist.get_backend() in ("gloo", "shm", "mpi4py")
    dist.destroy_process_group(group)


# Errors

WRONG_SUMS = "it gives wrong sums, or SIGABRT"


@case(unlike_gloo=WRONG_SUMS)
def different_collectives(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    others: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(torch.ones(4), 0),
        "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.ones(4 * n), torch.ones(4)),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * n)),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(n), torch.ones(n)),
        "reduce": lambda: dist.reduce(torch.ones(4), 0),
        "gather": lambda: dist.gather(torch.ones(4), None, 0),
        "scatter": lambda: dist.scatter(torch.ones(4), None, 0),
    }
    for name, other in others.items():
        with refused(RuntimeError, "all_reduce(float32[4]", f"{name}(", "rank 0: ", "rank 1"):
            if rank == 0:
                dist.all_reduce(torch.ones(4))
            else:
                other()
        usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def different_tensors(dist: Dist) -> None:
    first = dist.get_rank() == 0
    for scale in (1, 40_000, 500_000):
        for _ in range(3):
            with refused(RuntimeError, f"[{4 * scale}]", f"[{5 * scale}]", "all_reduce(float32"):
                dist.all_reduce(torch.ones((4 if first else 5) * scale))
            with refused(RuntimeError, f"float32[{4 * scale}]", f"int32[{4 * scale}]"):
                dist.all_reduce(
                    torch.ones(4 * scale, dtype=torch.float32 if first else torch.int32)
                )
            with refused(RuntimeError, f"float32[{4 * scale}]", f"[2, {2 * scale}]"):
                dist.all_reduce(torch.ones(4 * scale).view(-1 if first else (2, -1)))
            usable(dist)
    n = dist.get_world_size()
    count = 4 if first else 5
    with refused(RuntimeError, "all_gather(float32[4])", "all_gather(float32[5])"):
        dist.all_gather([torch.ones(count) for _ in range(n)], torch.ones(count))
    with refused(RuntimeError, "broadcast(float32[4]", "broadcast(float32[5]"):
        dist.broadcast(torch.ones(count), 0)
    with refused(RuntimeError, "reduce_scatter(float32[4]", "reduce_scatter(float32[5]"):
        dist.reduce_scatter_tensor(torch.ones(count), torch.ones(n * count))
    with refused(RuntimeError, "reduce(float32[4]", "reduce(float32[5]"):
        dist.reduce(torch.ones(count), 0)
    usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def different_operations_and_roots(dist: Dist) -> None:
    first = dist.get_rank() == 0
    op = dist.ReduceOp
    for count in (4, 400_000):
        t = torch.ones(count)
        for _ in range(3):
            with refused(RuntimeError, ", sum)", ", max)", "rank 0"):
                dist.all_reduce(t, op.SUM if first else op.MAX)
            with refused(RuntimeError, ", sum)", ", sum/n)"):
                dist.all_reduce(t, op.SUM if first else op.AVG)
            with refused(RuntimeError, "from 0", "from 1"):
                dist.broadcast(t, 0 if first else 1)
            same(t, torch.ones(count))
            usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def a_difference_deep_in_a_list(dist: Dist) -> None:
    first = dist.get_rank() == 0
    shapes = [4, 4, 4, 6, 2] if first else [4, 4, 4, 2, 6]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with refused(RuntimeError, "different collectives"):
            dist.all_reduce_coalesced([torch.ones(shape) for shape in shapes])
    usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def a_difference_among_many_in_flight(dist: Dist) -> None:
    first, n = dist.get_rank() == 0, dist.get_world_size()
    tensors = [torch.ones(7 if k == 5 and first else 8) for k in range(10)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for k, (work, t) in enumerate(zip(works, tensors, strict=True)):
        if k == 5:
            with refused(RuntimeError, "[7]", "[8]"):
                work.wait()
            assert work.is_completed()
            assert not work.is_success()
            with refused(RuntimeError, "[7]", "[8]"):
                work.get_future().wait()
        else:
            work.wait()
            same(t, torch.full((8,), float(n)))
    usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def splits_that_do_not_agree(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    sent, received = [2] * n, [2] * n
    if rank == 0:
        sent[1] = 3
    with refused(RuntimeError, "rank 0", "12 bytes", "rank 1", "8"):
        dist.all_to_all_single(torch.ones(2 * n), torch.ones(sum(sent)), received, sent)
    usable(dist)


@case(unlike_gloo="it raises RuntimeErrors, or hangs")
def what_a_call_refuses(dist: Dist) -> None:
    n = dist.get_world_size()
    op = dist.ReduceOp
    with refused(ValueError, "5"):
        dist.reduce_scatter_tensor(torch.ones(5), torch.ones(5 * n + 1))
    with refused(ValueError, "float64"):
        dist.reduce_scatter_tensor(torch.ones(5), torch.ones(5 * n, dtype=torch.float64))
    with refused(ValueError, "5"):
        dist.reduce_scatter(torch.ones(5), [torch.ones(5 * n)] + [torch.ones(0)] * (n - 1))
    with refused(ValueError):
        dist.reduce_scatter(torch.ones(5), [torch.ones(5)] * (n + 1))
    with refused(ValueError, "[5]"):
        dist.all_gather_into_tensor(torch.ones(5 * n - 1), torch.ones(5))
    with refused(ValueError, "float64"):
        dist.all_gather_into_tensor(torch.ones(5 * n, dtype=torch.float64), torch.ones(5))
    with refused(ValueError, "[5]"):
        dist.all_gather([torch.ones(5)] * (n - 1), torch.ones(5))
    with refused(ValueError, "[4]"):
        dist.all_gather([torch.ones(4)] * n, torch.ones(5))
    with refused(ValueError, str(n)):
        dist.all_to_all([torch.ones(1)] * (n - 1), [torch.ones(1)] * n)
    with refused(ValueError, f"{n + 1} rows"):
        dist.all_to_all_single(torch.ones(n + 1), torch.ones(n + 1))
    with refused(ValueError, "splits"):
        dist.all_to_all_single(torch.ones(n), torch.ones(n), [1] * n, [2] * n)
    with refused(ValueError, "splits"):
        dist.all_to_all_single(torch.ones(n), torch.ones(n), [1] * n, [1] * (n - 1) + [0, 1])
    with refused(ValueError, "float64"):
        dist.all_to_all_single(torch.ones(n), torch.ones(n, dtype=torch.float64))
    with refused(ValueError, "AVG"):
        dist.all_reduce(torch.ones(5, dtype=torch.int32), op.AVG)
    with refused(ValueError, "BAND"):
        dist.all_reduce(torch.ones(5), op.BAND)
    with refused(ValueError, "float8"):
        dist.all_reduce(torch.ones(5).to(torch.float8_e5m2))
    with refused(ValueError, "meta"):
        dist.all_reduce(torch.ones(5, device="meta"))
    usable(dist)
