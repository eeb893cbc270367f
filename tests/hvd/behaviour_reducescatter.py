"""Reducescatter in all its forms; see behaviour.py."""

from __future__ import annotations

import torch

from tests.hvd.behaviour import (
    TYPES,
    Hvd,
    case,
    everyones,
    fails,
    last,
    mine,
    raises,
    same,
    total,
)


def part(hvd: Hvd, whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows: the first ranks have one more where they do not divide."""
    n, rank = hvd.size(), hvd.rank()
    rows = [len(whole) // n + (r < len(whole) % n) for r in range(n)]
    mine_of_it: torch.Tensor = torch.split(whole, rows)[rank]
    return mine_of_it


@case()
def positions_of_the_arguments(hvd: Hvd) -> None:
    tensors = everyones(hvd, 4)
    tensor, everyone = mine(hvd, 4), hvd.global_process_set
    expected = part(hvd, total(tensors)) * 6
    fp16 = hvd.Compression.fp16
    same(hvd.reducescatter(tensor, "x", fp16, hvd.Sum, everyone, 2.0, 3.0), expected)
    handle = hvd.reducescatter_async(tensor, "x", hvd.Sum, everyone, 2.0, 3.0)
    same(hvd.synchronize(handle), expected)
    got = hvd.grouped_reducescatter([tensor], "x", fp16, hvd.Sum, everyone, 2.0, 3.0)
    same(got[0], expected)
    handle = hvd.grouped_reducescatter_async([tensor], "x", hvd.Sum, everyone, 2.0, 3.0)
    same(hvd.synchronize(handle)[0], expected)


@case()
def factors_cut_whole_numbers(hvd: Hvd) -> None:
    n = hvd.size()
    tensor = torch.tensor([-3, 3, 5] * n)
    got = hvd.reducescatter(tensor, name="x", op=hvd.Sum, prescale_factor=0.5)
    same(got, part(hvd, torch.tensor([-1 * n, n, 2 * n] * n)))
    first = tensor if hvd.rank() == 0 else torch.zeros_like(tensor)
    got = hvd.reducescatter(first, name="y")
    same(got, part(hvd, (tensor.double() / n).long()))


@case()
def grouped(hvd: Hvd) -> None:
    shapes = ((5,), (2, 3), (1, 1))
    dtypes = (torch.float32, torch.int64, torch.float64)
    kinds = list(zip(shapes, dtypes, strict=True))
    group = [mine(hvd, *shape, dtype=dtype) for shape, dtype in kinds]
    direct = hvd.grouped_reducescatter(group, name="g", op=hvd.Sum)
    assert type(direct) is list
    handle = hvd.grouped_reducescatter_async(group, name="g", op=hvd.Sum)
    assert type(handle) is int
    waited = hvd.synchronize(handle)
    assert type(waited) is tuple
    for outputs in (direct, waited):
        for got, (shape, dtype) in zip(outputs, kinds, strict=True):
            same(got, part(hvd, total(everyones(hvd, *shape, dtype=dtype))))


@case()
def only_sums_and_averages(hvd: Hvd) -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with fails(hvd, "Reducescatter currently only supports AVERAGE and SUM."):
            hvd.reducescatter(mine(hvd, 4), name="x", op=op)
        with fails(hvd, "Reducescatter currently only supports AVERAGE and SUM."):
            hvd.grouped_reducescatter([mine(hvd, 4)], name="x", op=op)


@case()
def scalars_are_refused(hvd: Hvd) -> None:
    with raises(ValueError, "Reducescatter does not support scalar inputs"):
        hvd.reducescatter(torch.tensor(1.0), name="x")


@case()
def mismatches(hvd: Hvd) -> None:
    text = (
        "Mismatched REDUCESCATTER tensor shapes: One rank sent a tensor of shape {}, "
        "but another rank sent a tensor of shape {}."
    )
    with fails(hvd, text, [2], [3]):
        hvd.reducescatter(mine(hvd, 3 if last(hvd) else 2), name="x")
    with fails(hvd, TYPES, "float32", "int32"):
        hvd.reducescatter(mine(hvd, 2, dtype=torch.int32 if last(hvd) else torch.float32), name="x")
    text = "Mismatched prescale and/or postscale factors: One rank sent factors ({}"
    with fails(hvd, text, 2, 4):
        hvd.reducescatter(mine(hvd, 2), name="x", prescale_factor=4.0 if last(hvd) else 2.0)


@case()
def gradient_is_gathered(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()
    owners = torch.cat([torch.full((2,), r + 1.0) for r in range(n)])
    for op, factor in ((hvd.Average, 1), (hvd.Sum, n)):
        x = mine(hvd, 2 * n).requires_grad_()
        y = hvd.reducescatter(x, name="x", op=op)
        y.backward(torch.full((2,), rank + 1.0))
        same(x.grad, owners * factor)


@case()
def gradient_with_factors_and_uneven_rows(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()
    x = mine(hvd, n + 1).requires_grad_()
    y = hvd.reducescatter(x, name="x", op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    y.backward(torch.full_like(y, rank + 1.0))
    owners = [1.0, 1.0] + [r + 1.0 for r in range(1, n)]
    same(x.grad, torch.tensor(owners) * 6 * n)


@case()
def grouped_gradient(hvd: Hvd) -> None:
    n = hvd.size()
    a, b = mine(hvd, n).requires_grad_(), mine(hvd, n, 2).requires_grad_()
    x, y = hvd.grouped_reducescatter([a, b], name="g", op=hvd.Sum)
    torch.autograd.backward([x, y], [torch.ones_like(x), 2 * torch.ones_like(y)])
    same(a.grad, torch.full((n,), float(n)))
    same(b.grad, torch.full((n, 2), 2.0 * n))
