"""All-reduce, of every type, operation and size."""

from __future__ import annotations

import functools
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.transports.collectives.table import (
    ALL,
    FLOATS,
    SIZES,
    WHOLE,
    Dist,
    case,
    close,
    computed,
    refused,
    same,
    values,
)


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


@case(everywhere=True)
def all_reduce_around_the_borders_of_paths(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    # What a message's slot holds over MPI, and what is sent whole to all; then the paths of `shm`.
    every = [(size, torch.bfloat16, ("SUM", "MAX", "AVG")) for size in (2032, 64 << 10)]
    every += [(size, torch.float32, ("SUM", "MAX", "AVG")) for size in (2032, 64 << 10)]
    every += [(size, torch.float32, ("SUM",) * 3) for size in ((2 << 20) // n, 1 << 20, 4 << 20)]
    for num_bytes, dtype, ops in every:
        border = num_bytes // dtype.itemsize
        for count in (border - 1, border, border + 1):
            t = torch.empty(count, dtype=dtype)
            for op in ops:
                t.copy_(values(rank, count))
                dist.all_reduce(t, getattr(dist.ReduceOp, op))
                close(t, computed(dist, op, count, dtype))


@case(unlike_gloo="it adds up half by half", everywhere=True)
def halves_are_added_up_in_float32(dist: Dist) -> None:
    """1 + 2^-11 + 2^-11 is 1 in steps of float16, and 1 + 2^-10 rightly."""
    n = dist.get_world_size()
    if n < 3:
        return
    for dtype, eps in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        for count in (5, 50_000, 1_000_000):
            t = torch.empty(count, dtype=dtype)
            for _ in range(3):
                t.fill_(1.0 if dist.get_rank() == 0 else eps)
                dist.all_reduce(t)
                same(t, torch.full((count,), 1 + (n - 1) * eps, dtype=dtype))


@case(unlike_gloo="it adds up the bytes of bools, half by half, and has no int16")
def reduce_of_every_dtype(dist: Dist) -> None:
    """As all_reduce; the other ranks keep their values."""
    rank, n, root = dist.get_rank(), dist.get_world_size(), 1
    kinds: list[tuple[torch.dtype, list[float], float]] = [
        (torch.bool, [1.0] * n, 1.0),
        (torch.int16, [1000.0] * n, 1000.0 * n),
        (torch.complex64, [2.0] * n, 2.0 * n),
        (torch.float16, [1.0] + [2.0**-11] * (n - 1), 1 + (n - 1) * 2.0**-11),
        (torch.bfloat16, [1.0] + [2.0**-8] * (n - 1), 1 + (n - 1) * 2.0**-8),
    ]
    for dtype, given, total in kinds:
        for count in (5, 300_000):
            t = torch.full((count,), given[rank]).to(dtype)
            dist.reduce(t, root)
            same(t, torch.full((count,), total if rank == root else given[rank]).to(dtype))
            if dtype == torch.bool:
                assert int(t.view(torch.uint8).max()) == 1
    t = values(rank, 5)
    dist.reduce(t, root, dist.ReduceOp.AVG)
    close(t, computed(dist, "AVG", 5, torch.float32) if rank == root else values(rank, 5))
    with refused(ValueError, "BAND"):
        dist.reduce(torch.ones(5), root, dist.ReduceOp.BAND)


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


@case(shm_only=True)
def small_sums_are_by_rank_order(dist: Dist) -> None:
    """Bit by bit, on one host, and whatever rank arrives last. Two ranks have no order."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for turn in range(20):
        parts = [
            torch.randn(250, generator=torch.Generator().manual_seed(7 * turn + r))
            for r in range(n)
        ]
        if turn % n == rank:
            time.sleep(0.002)
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, n)):
            t = parts[rank].clone()
            dist.all_reduce(t, op)
            same(t, functools.reduce(torch.add, parts).div(divisor))


@case(unlike_gloo="it reduces a strided tensor as if its elements had no gaps")
def all_reduce_of_every_kind_of_small_tensor(dist: Dist) -> None:
    n = dist.get_world_size()
    base = torch.ones(40)
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    kinds = {
        "scalar": torch.tensor(1.0),
        "empty": torch.ones(0),
        "view": base[4:9],
        "strided": base[10::3],
        "transposed": torch.ones(3, 4).t(),
        "matrix": torch.ones(5, 2),
        "expanded": torch.ones(1).expand(1),
        "parameter": parameter,
        "strided parameter": torch.nn.Parameter(torch.ones(3, 4).t()),
        "complex": torch.ones(3, dtype=torch.complex64),
        "negative view": torch.tensor([-1j], dtype=torch.complex64).conj().imag,
    }
    for _ in range(3):
        for name, t in kinds.items():
            before = t.detach().clone()
            dist.all_reduce(t)
            assert torch.equal(t.detach(), before * n), name
    assert base[0] == 1
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            inside = torch.ones(3)
            dist.all_reduce(inside)
            dist.all_reduce(base)
            same(inside, torch.full((3,), float(n)))
    dist.all_reduce(inside)
    same(inside, torch.full((3,), float(n * n)))


@case(unlike_gloo="it changes tensors that autograd has saved, unnoticed")
def autograd_notices_a_small_all_reduce(dist: Dist) -> None:
    """A tensor that is saved for the backward pass must not change unnoticed."""
    weight = torch.ones(3, requires_grad=True)
    for t in (torch.ones(3), weight.detach()):
        loss: Any = (weight * t).sum()
        dist.all_reduce(t)
        with refused(RuntimeError, "modified by an inplace operation"):
            loss.backward()


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
