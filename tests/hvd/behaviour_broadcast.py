"""Broadcast in all its forms; see behaviour.py."""

from __future__ import annotations

import torch

from tests.hvd.behaviour import TYPES, Hvd, case, data, fails, last, mine, raises, same

INVALID = "broadcast received invalid root rank {root} for provided process set"


@case()
def every_form(hvd: Hvd) -> None:
    tensor, expected = mine(hvd, 3), data(1, 3)
    same(hvd.broadcast(tensor, 1, name="x"), expected)
    same(hvd.broadcast(tensor, root_rank=1), expected)
    same(hvd.synchronize(hvd.broadcast_async(tensor, 1, "x")), expected)
    same(tensor, mine(hvd, 3))
    parameter = torch.nn.Parameter(tensor)
    assert hvd.broadcast_(parameter, 1, "x", hvd.global_process_set) is parameter
    same(parameter, expected)
    parameter = torch.nn.Parameter(mine(hvd, 3))
    assert hvd.synchronize(hvd.broadcast_async_(parameter, 0, "x")) is parameter
    same(parameter, data(0, 3))
    assert parameter.is_leaf
    assert parameter.requires_grad


@case()
def roots_out_of_range(hvd: Hvd) -> None:
    for root in (-1, hvd.size()):
        with raises(ValueError, INVALID.format(root=root)):
            hvd.broadcast(mine(hvd, 2), root, name="x")
        with raises(ValueError, INVALID.format(root=root)):
            hvd.broadcast_async_(mine(hvd, 2), root, name="x")


@case()
def mismatches(hvd: Hvd) -> None:
    text = (
        "Mismatched BROADCAST root ranks: One rank specified root rank {}, "
        "but another rank specified root rank {}."
    )
    with fails(hvd, text, 0, 1):
        hvd.broadcast(mine(hvd, 2), 1 if last(hvd) else 0, name="x")
    text = (
        "Mismatched BROADCAST tensor shapes: One rank sent a tensor of shape {}, "
        "but another rank sent a tensor of shape {}."
    )
    with fails(hvd, text, [2], [3]):
        hvd.broadcast(mine(hvd, 3 if last(hvd) else 2), 0, name="x")
    with fails(hvd, TYPES, "float32", "int32"):
        hvd.broadcast_(mine(hvd, 2, dtype=torch.int32 if last(hvd) else torch.float32), 0, name="x")


@case()
def gradient_goes_to_the_root(hvd: Hvd) -> None:
    n = hvd.size()
    for root in range(n):
        x = mine(hvd, 2).requires_grad_()
        hvd.broadcast(x, root, name="x").backward(torch.full((2,), hvd.rank() + 1.0))
        same(x.grad, torch.full((2,), (n + 1) / 2 if hvd.rank() == root else 0.0))
