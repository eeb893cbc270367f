"""Gradients and compression of allreduce; see behaviour.py."""

from __future__ import annotations

import math

import torch

from tests.hvd.behaviour import (
    Hvd,
    case,
    everyones,
    mean,
    mine,
    same,
    total,
)


@case()
def compression_is_lossy_where_asked(hvd: Hvd) -> None:
    for dtype in (torch.float16, torch.float64, torch.int64):
        same(
            hvd.allreduce(mine(hvd, 5, dtype=dtype), compression=hvd.Compression.fp16, op=hvd.Sum),
            total(everyones(hvd, 5, dtype=dtype)),
        )
    tensor = torch.tensor([1.0 + 2**-12])
    same(hvd.allreduce(tensor, name="x", compression=hvd.Compression.fp16), torch.ones(1))
    same(hvd.allreduce(tensor, name="y", compression=hvd.Compression.none), tensor)


class Doubled:
    """A user's compressor; also used as an instance."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        return tensor * 2, "context"

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: str) -> torch.Tensor:
        assert ctx == "context"
        return tensor + 1


@case()
def compression_of_the_users_own(hvd: Hvd) -> None:
    expected = mean(everyones(hvd, 3)) * 2 + 1
    same(hvd.allreduce(mine(hvd, 3), compression=Doubled), expected)
    same(hvd.allreduce(mine(hvd, 3), compression=Doubled()), expected)
    same(hvd.grouped_allreduce([mine(hvd, 3)], compression=Doubled)[0], expected)


@case()
def gradient_is_the_same_allreduce(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()
    for op, factor in ((hvd.Average, (n + 1) / 2), (hvd.Sum, n * (n + 1) / 2)):
        x = mine(hvd, 3).requires_grad_()
        y = hvd.allreduce(x, name=f"x.{op}", op=op)
        assert y.requires_grad
        y.backward(torch.full((3,), rank + 1.0))
        same(x.grad, torch.full((3,), factor))
    for op, factor in (
        (hvd.Min, 1.0),
        (hvd.Max, float(n)),
        (hvd.Product, math.prod(range(1, n + 1))),
    ):
        x = mine(hvd, 3).requires_grad_()
        hvd.allreduce(x, name=f"x.{op}", op=op).backward(torch.full((3,), rank + 1.0))
        same(x.grad, torch.full((3,), float(factor)))


@case()
def gradient_with_factors_and_default_op(hvd: Hvd) -> None:
    n = hvd.size()
    x = mine(hvd, 2).requires_grad_()
    y = hvd.allreduce(x, name="x", op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    y.backward(torch.ones(2))
    same(x.grad, torch.full((2,), 6.0 * n))
    x = mine(hvd, 2).requires_grad_()
    hvd.allreduce(x).backward(torch.ones(2))
    same(x.grad, torch.ones(2))


@case(stronger="the gradient of sum() is expanded, which Horovod refuses as not contiguous")
def gradient_of_a_sum(hvd: Hvd) -> None:
    x = mine(hvd, 2).requires_grad_()
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    same(x.grad, torch.full((2,), float(hvd.size())))


@case()
def no_gradient_where_none_is_asked(hvd: Hvd) -> None:
    assert not hvd.allreduce(mine(hvd, 2)).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(mine(hvd, 2).requires_grad_()).requires_grad
    handle = hvd.allreduce_async(mine(hvd, 2).requires_grad_(), name="x")
    assert not hvd.synchronize(handle).requires_grad
