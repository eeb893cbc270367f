"""Alltoall; see behaviour.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.hvd.behaviour import TYPES, Hvd, case, data, fails, last, mine, raises, same


def swapped(
    hvd: Hvd, sent: Callable[[int, int], int], *tail: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """What this rank sends, its splits, and what it gets, where rank r sends sent(r, s) to s."""
    n, me = hvd.size(), hvd.rank()

    def rows(source: int, target: int) -> int:
        return int(sent(source, target))

    parts = []
    for source in range(n):
        splits = [rows(source, target) for target in range(n)]
        parts.append(torch.split(data(source, sum(splits), *tail, dtype=dtype), splits)[me])
    splits = [rows(me, target) for target in range(n)]
    return data(me, sum(splits), *tail, dtype=dtype), splits, torch.cat(parts)


@case()
def even_without_splits(hvd: Hvd) -> None:
    for rows in (1, 2):
        tensor, _, expected = swapped(hvd, lambda r, s, rows=rows: rows, 3)  # type: ignore[misc]
        got = hvd.alltoall(tensor, name="x")
        same(got, expected)
        same(hvd.alltoall(tensor), expected)
        output, received = hvd.synchronize(hvd.alltoall_async(tensor, name="x"))
        same(output, expected)
        assert received.tolist() == [rows] * hvd.size()


@case()
def splits_of_a_list_or_a_tensor(hvd: Hvd) -> None:
    n, me = hvd.size(), hvd.rank()

    def rows(source: int, target: int) -> int:
        return source + 2 * target

    tensor, splits, expected = swapped(hvd, rows, 2)
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        result = hvd.alltoall(tensor, given, name="x")
        assert type(result) is tuple
        output, received = result
        same(output, expected)
        assert received.dtype == torch.int32
        assert received.tolist() == [rows(source, me) for source in range(n)]
        result = hvd.synchronize(hvd.alltoall_async(tensor, given, "y", hvd.global_process_set))
        assert type(result) is tuple
        same(result[0], expected)
        assert result[1].tolist() == [rows(source, me) for source in range(n)]


@case()
def a_remainder_is_not_sent(hvd: Hvd) -> None:
    n, me = hvd.size(), hvd.rank()
    tensor = mine(hvd, n + 2, 2)
    output, received = hvd.alltoall(tensor, [1] * n, name="x")
    same(output, torch.stack([data(r, n + 2, 2)[me] for r in range(n)]))
    assert received.tolist() == [1] * n


@case()
def splits_that_do_not_fit(hvd: Hvd) -> None:
    n = hvd.size()
    with raises(ValueError, "first dimension of tensor is not an even multiple of the number"):
        hvd.alltoall(torch.ones(2 * n + 1), name="x")
    for splits, text in (
        (torch.ones(n, 1, dtype=torch.int32), "alltoall expects a 1D splits tensor"),
        (torch.ones(n), "alltoall expects splits to contain 32-bit integer elements."),
        (torch.ones(n, dtype=torch.int64), "alltoall expects splits to contain 32-bit integer"),
        ([1] * (n + 1), "Number of entries in splits does not equal number of workers."),
        ([3] * n, "Sum of splits entries is greater than the first dimension of tensor."),
    ):
        with raises(ValueError, text):
            hvd.alltoall(torch.ones(2 * n), splits, name="x")


@case()
def mismatches(hvd: Hvd) -> None:
    n = hvd.size()
    text = (
        "Mismatched ALLTOALL tensor shapes: One rank sent a tensor with dimension 1 equal to {}, "
        "but another rank sent a tensor with dimension 1 equal to {}."
    )
    with fails(hvd, text, 3, 4):
        hvd.alltoall(mine(hvd, n, 4 if last(hvd) else 3), name="x")
    with fails(hvd, TYPES, "float32", "int32"):
        hvd.alltoall(mine(hvd, n, dtype=torch.int32 if last(hvd) else torch.float32), name="x")


@case(different="the real one crashes")
def scalars_are_refused(hvd: Hvd) -> None:
    handle = hvd.alltoall_async(torch.tensor(1.0), [0] * hvd.size(), name="x")
    with fails(hvd, "Process-set rank zero tried to ALLTOALL a rank-zero tensor."):
        hvd.synchronize(handle)


@case()
def gradient_goes_back(hvd: Hvd) -> None:
    n, me = hvd.size(), hvd.rank()
    tensor, splits, _ = swapped(hvd, lambda r, s: r + s + 1, 2)
    x = tensor.requires_grad_()
    y, _ = hvd.alltoall(x, splits, name="x")
    y.backward(torch.full_like(y, me + 1.0))
    expected = torch.cat([torch.full((me + s + 1, 2), s + 1.0) for s in range(n)])
    same(x.grad, expected)
    x = mine(hvd, n).requires_grad_()
    y = hvd.alltoall(x, name="y")
    y.backward(torch.full_like(y, me + 1.0))
    same(x.grad, torch.arange(n) + 1.0)
