"""Grouped and sparse allreduce; see behaviour.py."""

from __future__ import annotations

import torch

from tests.hvd.behaviour import (
    REDUCED,
    Hvd,
    case,
    data,
    everyones,
    fails,
    last,
    mean,
    mine,
    same,
    total,
)


@case()
def grouped_forms_and_types(hvd: Hvd) -> None:
    def inputs() -> list[torch.Tensor]:
        return [mine(hvd, 2), mine(hvd, 3, 1), mine(hvd)]

    expected = [total(everyones(hvd, *shape)) for shape in ((2,), (3, 1), ())]
    lists = hvd.grouped_allreduce(inputs(), name="g", op=hvd.Sum)
    assert type(lists) is list
    tuples = hvd.synchronize(hvd.grouped_allreduce_async(inputs(), name="g", op=hvd.Sum))
    assert type(tuples) is tuple
    ours = inputs()
    in_place = hvd.grouped_allreduce_(ours, name="g", op=hvd.Sum)
    assert type(in_place) is tuple
    assert all(a is b for a, b in zip(in_place, ours, strict=True))
    handle = hvd.grouped_allreduce_async_(ours2 := inputs(), name="h", op=hvd.Sum)
    assert type(handle) is int
    waited = hvd.synchronize(handle)
    assert type(waited) is tuple
    assert all(a is b for a, b in zip(waited, ours2, strict=True))
    for outputs in (lists, tuples, in_place, waited):
        for got, value in zip(outputs, expected, strict=True):
            same(got, value)


@case()
def grouped_dtypes_may_differ(hvd: Hvd) -> None:
    group = [mine(hvd, 3, dtype=dtype) for dtype in REDUCED]
    for got, dtype in zip(hvd.grouped_allreduce(group), REDUCED, strict=True):
        same(got, mean(everyones(hvd, 3, dtype=dtype)))
    for op in (hvd.Min, hvd.Max, hvd.Product):
        got = hvd.grouped_allreduce([data(1, 2), data(1, 3)], op=op)
        same(got[1], data(1, 3) ** (hvd.size() if op == hvd.Product else 1))


@case()
def grouped_factors(hvd: Hvd) -> None:
    got = hvd.grouped_allreduce(
        [mine(hvd, 2), mine(hvd, 2, dtype=torch.int64)], op=hvd.Sum, prescale_factor=2.0
    )
    same(got[0], total(everyones(hvd, 2)) * 2)
    same(got[1], total(everyones(hvd, 2, dtype=torch.int64)) * 2)


@case()
def grouped_gradient(hvd: Hvd) -> None:
    n = hvd.size()
    a, b = mine(hvd, 2).requires_grad_(), mine(hvd, 3).requires_grad_()
    x, y = hvd.grouped_allreduce([a, b], name="g", op=hvd.Sum)
    grads = [torch.full((2,), hvd.rank() + 1.0), torch.full((3,), 2.0)]
    torch.autograd.backward([x, y], grads)
    same(a.grad, torch.full((2,), n * (n + 1) / 2))
    same(b.grad, torch.full((3,), 2.0 * n))


@case()
def grouped_mismatch_reaches_all(hvd: Hvd) -> None:
    shape = 4 if last(hvd) else 3
    with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
        hvd.grouped_allreduce([mine(hvd, 2), mine(hvd, shape)], name="g")
    same(hvd.grouped_allreduce([mine(hvd, 2)], name="g")[0], mean(everyones(hvd, 2)))


def _sparse(rank: int, rows: int = 5) -> torch.Tensor:
    indices = torch.tensor([[rank, rank + 1]])
    values = data(rank, 2, 3)
    return torch.sparse_coo_tensor(indices, values, (rows, 3))


@case()
def sparse(hvd: Hvd) -> None:
    n = hvd.size()
    dense = total([_sparse(rank).to_dense() for rank in range(n)])
    for op, expected in ((hvd.Sum, dense), (hvd.Average, dense / n)):
        handle = hvd.sparse_allreduce_async(_sparse(hvd.rank()), name=f"s.{op}", op=op)
        assert callable(handle)
        got = handle()
        assert got.is_sparse
        assert got.shape == (5, 3)
        assert not got.is_coalesced()
        assert got._nnz() == 2 * n
        same(got.to_dense(), expected)


@case()
def sparse_uneven_and_none(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()

    def part(r: int) -> torch.Tensor:
        indices = torch.arange(r).reshape(1, r)  # rank 0 has no rows at all
        return torch.sparse_coo_tensor(indices, data(r, r, 2), (4, 2))

    got = hvd.sparse_allreduce_async(part(rank), name="s", op=hvd.Sum)()
    same(got.to_dense(), total([part(r).to_dense() for r in range(n)]))
