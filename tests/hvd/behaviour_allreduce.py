"""What only allreduce has: its old argument, half precision, compression, sparse tensors; see
behaviour.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.hvd.behaviour import (
    Hvd,
    added,
    averaged,
    case,
    data,
    mine,
    raises,
    same,
    summed,
    total,
)
from tests.hvd.optimizer_table import Recorder


@case()
def average_argument_is_deprecated(hvd: Hvd) -> None:
    def run(name: str, **how: Any) -> Any:
        is_grouped = "grouped" in name
        got = getattr(hvd, name)([mine(hvd, 3)] if is_grouped else mine(hvd, 3), **how)
        got = hvd.synchronize(got) if "async" in name else got
        return got[0] if is_grouped else got

    for parts in itertools.product(("", "grouped_"), ("", "_", "_async", "_async_")):
        name = "allreduce".join(parts)
        for average, expected in ((True, averaged(hvd, 3)), (False, summed(hvd, 3))):
            with pytest.warns(DeprecationWarning, match="`average` has been replaced with `op`"):
                same(run(name, average=average), expected)
        with raises(ValueError, "The op parameter supersedes average. Please provide only one of"):
            run(name, average=False, op=hvd.Sum)


@case()
def half_is_scaled_in_single_precision(hvd: Hvd) -> None:
    """The prescaled value fits in half; the plain sum would not."""
    tensor = torch.full((3,), 40000.0, dtype=torch.float16)
    got = hvd.allreduce(tensor, name="x", op=hvd.Sum, prescale_factor=1 / 16, postscale_factor=4)
    same(got, torch.full((3,), 40000.0 / 16 * hvd.size() * 4, dtype=torch.float16))


@case()
def compression_is_lossy_where_asked(hvd: Hvd) -> None:
    for dtype in (torch.float16, torch.float64, torch.int64):
        same(
            hvd.allreduce(mine(hvd, 5, dtype=dtype), compression=hvd.Compression.fp16, op=hvd.Sum),
            summed(hvd, 5, dtype=dtype),
        )
    tensor = torch.tensor([1.0 + 2**-12])
    same(hvd.allreduce(tensor, name="x", compression=hvd.Compression.fp16), torch.ones(1))
    same(hvd.allreduce(tensor, name="y", compression=hvd.Compression.none), tensor)


@case()
def compression_of_the_users_own(hvd: Hvd) -> None:
    expected = averaged(hvd, 2, 3).double()
    for compressor in (Recorder, Recorder()):
        same(hvd.allreduce(mine(hvd, 2, 3), compression=compressor), expected)
        same(hvd.grouped_allreduce([mine(hvd, 2, 3)], compression=compressor)[0], expected)


@case()
def sparse(hvd: Hvd) -> None:
    """Rank 0 has no rows at all."""
    n, rank = hvd.size(), hvd.rank()

    def part(r: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.arange(r)[None], data(r, r, 2), (4, 2))

    with added(hvd, n - 1) as last:
        for op in (hvd.Sum, hvd.Average):
            for members, of in ((range(n), hvd.global_process_set), ([n - 1], last)):
                if rank not in members:
                    continue
                handle = hvd.sparse_allreduce_async(part(rank), f"s.{op}", op, process_set=of)
                assert callable(handle)
                got = handle()
                assert got.is_sparse
                assert got._nnz() < 2 or not got.is_coalesced()
                assert got._nnz() == sum(members)
                whole = total([part(r).to_dense() for r in members])
                same(got.to_dense(), whole / len(members) if op == hvd.Average else whole)


@case(different="an AttributeError of numpy or of float in the real one", sizes=(2,))
def no_tensor(hvd: Hvd) -> None:
    for value in (1.0, np.ones(3), [torch.ones(1)]):
        text = f"needs a torch tensor, not {type(value).__name__}"
        for call in (hvd.allreduce, hvd.allreduce_async, hvd.allgather, hvd.alltoall):
            with raises(TypeError, text):
                call(value)
        for call in (hvd.broadcast, hvd.broadcast_async_):
            with raises(TypeError, text):
                call(value, root_rank=0)


@case(sizes=(2,))
def a_name_that_reads_like_none(hvd: Hvd) -> None:
    for _ in range(4):
        handle = hvd.allreduce_async(mine(hvd, 3), name="None", op=hvd.Sum)
        same(hvd.allreduce(mine(hvd, 3), op=hvd.Sum), summed(hvd, 3))
        same(hvd.synchronize(handle), summed(hvd, 3))


@case(stronger="uint64")
def unsigned_numbers_from_2_to_63(hvd: Hvd) -> None:
    """They are not negative: in a small tensor, which travels with its request, and in a large."""
    n = hvd.size()
    top = [2**63 + 4096 * r for r in range(n)]
    own = torch.tensor([top[hvd.rank()], hvd.rank() + 1], dtype=torch.uint64)
    for repeats, (options, expected) in itertools.product(
        (1, 20_000),
        (
            ({"op": hvd.Min}, [top[0], 1]),
            ({"op": hvd.Max}, [top[-1], n]),
            ({"op": hvd.Sum}, [sum(top) % 2**64, n * (n + 1) // 2]),
            ({}, [2**63 + 2048 * (n - 1), (n + 1) // 2]),
            ({"op": hvd.Max, "postscale_factor": 0.5}, [top[-1] // 2, n // 2]),
        ),
    ):
        found = hvd.allreduce(own.repeat(repeats), **options)
        assert torch.equal(found, torch.tensor(expected, dtype=torch.uint64).repeat(repeats)), (
            repeats,
            options,
        )


@case(stronger="Horovod has no bfloat16", sizes=(3,))
def bfloat16_is_rounded_once(hvd: Hvd) -> None:
    """The coordinator reduces small tensors, a transport large ones: with the same bits. In float32
    these sums are exact, in any order; of two ranks no sum is rounded twice.
    """
    n, numel = hvd.size(), 60_000

    def of(rank: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(rank)
        whole = torch.randint(0, 256, (numel,), generator=dice)
        return (whole * 2.0 ** -torch.randint(0, 9, (numel,), generator=dice)).bfloat16()

    exact = sum((of(rank).float() for rank in range(n)), torch.zeros(numel))
    for op, factor, product in (
        (hvd.Sum, 1.0, 1.0),
        (hvd.Average, 1.0, 1 / n),
        (hvd.Sum, 0.25, 0.25),
        (hvd.Sum, 0.3, 0.3),
    ):
        large = hvd.allreduce(of(hvd.rank()), name="large", op=op, postscale_factor=factor)
        small = [
            hvd.allreduce(t, name=f"small.{i}", op=op, postscale_factor=factor)
            for i, t in enumerate(torch.split(of(hvd.rank()), 6_000))
        ]
        expected = (exact * torch.tensor(product)).bfloat16()
        assert torch.equal(large, expected), (op, factor)
        assert torch.equal(torch.cat(small), expected), (op, factor)
    scattered = hvd.reducescatter(of(hvd.rank()), name="scattered", op=hvd.Sum)
    assert torch.equal(scattered, torch.tensor_split(exact.bfloat16(), n)[hvd.rank()])


def average_of_large_halves(hvd: Hvd) -> list[float]:
    """Of a small tensor, which the coordinator combines, and of a large one."""
    tensors = (torch.full((numel,), 60000.0, dtype=torch.float16) for numel in (2, 50_000))
    return [hvd.allreduce(t, name=f"x{t.numel()}").max().item() for t in tensors]


@case(stronger="half is summed in single precision, in which the average fits")
def half_does_not_overflow_in_an_average(hvd: Hvd) -> None:
    assert average_of_large_halves(hvd) == [60000.0] * 2


@case(real="half is summed in half precision")
def half_overflows_in_an_average(hvd: Hvd) -> None:
    assert average_of_large_halves(hvd) == [torch.inf] * 2
