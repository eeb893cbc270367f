"""Allgather in all its forms; see behaviour.py."""

from __future__ import annotations

import torch

from tests.hvd.behaviour import (
    TYPES,
    Hvd,
    case,
    data,
    everyones,
    fails,
    last,
    mine,
    same,
)


@case()
def in_rank_order(hvd: Hvd) -> None:
    tensor, expected = mine(hvd, 2, 3), torch.cat(everyones(hvd, 2, 3))
    same(hvd.allgather(tensor, name="x"), expected)
    same(tensor, mine(hvd, 2, 3))
    same(hvd.allgather(mine(hvd, 2, 3)), expected)
    same(hvd.synchronize(hvd.allgather_async(mine(hvd, 2, 3), "y")), expected)
    same(hvd.allgather(mine(hvd, 2, 3), "z", hvd.global_process_set), expected)


@case()
def rows_may_differ(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()
    each = range(n)
    up, down = [r + 1 for r in each], [3 * (n - r) for r in each]
    for rows in (up, down, list(each), [4 * (r == 1) for r in each]):
        got = hvd.allgather(mine(hvd, rows[rank], 2), name="x")
        same(got, torch.cat([data(r, rows[r], 2) for r in each]))


@case()
def scalars_are_refused(hvd: Hvd) -> None:
    handle = hvd.allgather_async(torch.tensor(1.0), name="x")
    with fails(hvd, "Process-set rank zero tried to ALLGATHER a rank-zero tensor."):
        hvd.synchronize(handle)


@case()
def mismatches(hvd: Hvd) -> None:
    text = (
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank {}, "
        "but another rank sent a tensor of rank {}."
    )
    with fails(hvd, text, 1, 2):
        hvd.allgather(mine(hvd, *((2, 3) if last(hvd) else (2,))), name="x")
    text = (
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to {}, "
        "but another rank sent a tensor with dimension 1 equal to {}."
    )
    with fails(hvd, text, 3, 4):
        hvd.allgather(mine(hvd, 2, 4 if last(hvd) else 3), name="x")
    with fails(hvd, TYPES, "float32", "int32"):
        hvd.allgather(mine(hvd, 2, dtype=torch.int32 if last(hvd) else torch.float32), name="x")


@case()
def gradient_is_averaged(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()
    x = mine(hvd, rank + 1, 2).requires_grad_()
    y = hvd.allgather(x, name="x")
    # each rank's gradient of the rows of rank r is (r + 1) (own rank + 1)
    owners = torch.cat([torch.full((r + 1, 2), r + 1.0) for r in range(n)])
    y.backward(owners * (rank + 1))
    same(x.grad, torch.full((rank + 1, 2), (rank + 1.0) * (n + 1) / 2))


@case()
def grouped(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()

    def group(r: int) -> list[torch.Tensor]:
        return [data(r, r + 1), data(r, 2, 2, dtype=torch.int64), data(r, 1, dtype=torch.uint8)]

    expected = [torch.cat(parts) for parts in zip(*map(group, range(n)), strict=True)]
    direct = hvd.grouped_allgather(group(rank), name="g")
    handle = hvd.grouped_allgather_async(group(rank), "h")
    assert type(handle) is int
    for outputs in (direct, hvd.synchronize(handle), hvd.grouped_allgather(group(rank))):
        assert type(outputs) is tuple
        for got, value in zip(outputs, expected, strict=True):
            same(got, value)


@case()
def grouped_gradient(hvd: Hvd) -> None:
    rank = hvd.rank()
    a, b = mine(hvd, rank + 1).requires_grad_(), mine(hvd, 2, 2).requires_grad_()
    x, y = hvd.grouped_allgather([a, b], name="g")
    torch.autograd.backward([x, y], [torch.ones_like(x), torch.full_like(y, rank + 1.0)])
    same(a.grad, torch.ones(rank + 1))
    same(b.grad, torch.full((2, 2), (hvd.size() + 1) / 2))
