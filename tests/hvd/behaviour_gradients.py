"""Gradients and compression of allreduce; see behaviour.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


def differentiable(hvd: Hvd) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Every differentiable operation, on two rows for each rank."""
    n = hvd.size()
    named: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
        "grouped_allreduce": lambda x: torch.cat(hvd.grouped_allreduce([x, 2 * x])),
        "allgather": hvd.allgather,
        "grouped_allgather": lambda x: torch.cat(hvd.grouped_allgather([x, x[1:]])),
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "alltoall": hvd.alltoall,
        "alltoall with splits": lambda x: hvd.alltoall(x, torch.ones(n, dtype=torch.int32))[0],
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5),
        "grouped_reducescatter": lambda x: torch.cat(hvd.grouped_reducescatter([x, 2 * x])),
    }
    return named


def gradients_are_those_of_finite_differences(hvd: Hvd) -> None:
    """On one rank, where every operation is the identity."""
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    for operation in differentiable(hvd).values():
        # Not linear, so that the second derivative is not zero.
        assert torch.autograd.gradcheck(lambda t, op=operation: op(t**2) ** 2, x)
        assert torch.autograd.gradgradcheck(lambda t, op=operation: op(t**2) ** 2, x)


@case(stronger="gradients need not be contiguous, nor rows all be sent", sizes=(2,))
def second_gradients_follow_from_the_first(hvd: Hvd) -> None:
    """Finite differences of the penalty |g|^2 of a gradient g: all ranks evaluate all of them."""
    n, rank = hvd.size(), hvd.rank()
    factors = {  # of a rank's gradient, over the derivative of the sum of all ranks' losses
        "allgather": 1 / n, "grouped_allgather": 1 / n, "broadcast": 1 / n,
        "reducescatter": n, "grouped_reducescatter": n,
    }  # fmt: skip
    for name, operation in differentiable(hvd).items():
        start = torch.randn(
            n, n * 2, 2, dtype=torch.double, generator=torch.Generator().manual_seed(5)
        )
        weight = torch.tensor(rank + 1.0, dtype=torch.double)

        def value(ranks: torch.Tensor, op: Any = operation, weight: Any = weight) -> torch.Tensor:
            """The sum of all ranks' losses for these inputs of all ranks."""
            own = (op(ranks[rank] ** 2) ** 2).sum() * weight
            total: torch.Tensor = hvd.allreduce(own.detach(), name="value", op=hvd.Sum)
            return total

        def gradient(ranks: torch.Tensor, op: Any = operation, weight: Any = weight) -> Any:
            x = ranks[rank].clone().requires_grad_()
            y = (op(x**2) ** 2).sum() * weight
            return x, torch.autograd.grad(y, x, create_graph=True)[0]

        x, g = gradient(start)
        numeric = differences(value, start)
        torch.testing.assert_close(g.detach() / factors.get(name, 1), numeric[rank])
        if name not in factors:  # else the backward of a mean is a mean, as in Horovod

            def penalty(ranks: torch.Tensor, gradient: Any = gradient) -> torch.Tensor:
                own = gradient(ranks)[1].detach().square().sum()
                total: torch.Tensor = hvd.allreduce(own, name="penalty", op=hvd.Sum)
                return total

            g.square().sum().backward()
            torch.testing.assert_close(x.grad, differences(penalty, start)[rank])


def differences(f: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Central differences of `f`, which all ranks call with the same arguments."""
    result, step = torch.zeros_like(at), 1e-5
    for i in range(at.numel()):
        ends = []
        for sign in (1, -1):
            moved = at.clone()
            moved.view(-1)[i] += sign * step
            ends.append(f(moved))
        result.view(-1)[i] = (ends[0] - ends[1]) / (2 * step)
    return result


@case()
def second_gradients_are_horovods(hvd: Hvd) -> None:
    """d/dx of sum(g) for g = d/dx of sum(op(x**2)**2) * (rank + 1); equal inputs on all ranks."""
    n, rank = hvd.size(), hvd.rank()
    operations = {
        "allgather": (hvd.allgather, (n + 1) / 2),
        "broadcast": (lambda x: hvd.broadcast(x, 0), (n + 1) / 2 if rank == 0 else 0.0),
    }
    for name, (operation, factor) in operations.items():
        x = torch.full((2,), 2.0, dtype=torch.double, requires_grad=True)
        upstream = torch.full((2 * n if name == "allgather" else 2,), rank + 1.0)
        y = operation(x**2) ** 2
        (g,) = torch.autograd.grad(y, x, upstream.to(y), create_graph=True)
        same(g, torch.full_like(x, 4 * 8 * factor))
        g.backward(torch.ones_like(x))  # type: ignore[no-untyped-call]
        # g = 2x m, and m is a mean over all ranks of 2 x^2 (rank + 1): one part by x, one by m.
        own = 1.0 if name == "allgather" or rank == 0 else 0.0
        same(x.grad, torch.full_like(x, own * (8 * (n + 1) + 16 * (n + 1) / n)))
