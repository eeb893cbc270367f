"""Adasum; see behaviour.py."""

from __future__ import annotations

import torch

from tests.hvd.behaviour import (
    Hvd,
    case,
    data,
    fails,
    last,
    mine,
    raises,
    same,
)

ADASUM = ("horovod-mpi", "hvd-")  # the real one has it with MPI only


@case(arms=ADASUM, sizes=(2,))
def mismatched_kinds(hvd: Hvd) -> None:
    text = "Mismatched operations: One rank did an {}, but another rank did an {}."
    with fails(hvd, text, "ALLREDUCE", "ADASUM"):
        hvd.allreduce(mine(hvd, 3), name="x", op=hvd.Adasum if last(hvd) else hvd.Sum)


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The rule for a pair, each tensor for itself, in double precision."""
    x, y = a.double().flatten(), b.double().flatten()
    dot = x @ y
    return ((1 - dot / (2 * x @ x)) * a.double() + (1 - dot / (2 * y @ y)) * b.double()).to(a.dtype)


@case(arms=ADASUM, sizes=(2,))
def adasum_of_two(hvd: Hvd) -> None:
    a, b = data(0, 2, 3), data(1, 2, 3).flip(0)
    pair = (a, b)
    for dtype in (torch.float32, torch.float64):
        tensor = pair[hvd.rank()].to(dtype)
        got = hvd.allreduce(tensor, name=f"x.{dtype}", op=hvd.Adasum)
        same(got, adasum(a.to(dtype), b.to(dtype)))


@case(arms=ADASUM, sizes=(2,))
def adasum_averages_parallel_and_adds_orthogonal(hvd: Hvd) -> None:
    same(hvd.allreduce(data(0, 4), name="p", op=hvd.Adasum), data(0, 4))
    orthogonal = torch.eye(2)[hvd.rank()]
    same(hvd.allreduce(orthogonal, name="o", op=hvd.Adasum), torch.ones(2))


@case(arms=ADASUM, sizes=(2,))
def adasum_is_per_tensor_in_a_group(hvd: Hvd) -> None:
    pairs = [(data(0, 3), data(1, 3).flip(0)), (data(2, 5), data(0, 5).flip(0))]
    got = hvd.grouped_allreduce([pair[hvd.rank()] for pair in pairs], op=hvd.Adasum)
    for value, pair in zip(got, pairs, strict=True):
        same(value, adasum(*pair))


@case(sizes=(3,))
def adasum_needs_a_power_of_two(hvd: Hvd) -> None:
    text = "Running Adasum with non-power of 2 ranks is not supported yet."
    with raises(NotImplementedError, text):
        hvd.allreduce(mine(hvd, 3), name="x", op=hvd.Adasum)
    with raises(NotImplementedError, text):
        hvd.grouped_allreduce([mine(hvd, 3)], name="x", op=hvd.Adasum)
