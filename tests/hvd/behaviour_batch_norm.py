"""SyncBatchNorm equals torch.nn.BatchNorm on the batches of all ranks; see behaviour.py."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd, case, raises

SHAPES = {1: (), 2: (5,), 3: (4, 3), 4: (2, 3, 2)}
PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def data(
    hvd: Hvd, rows: list[int], dims: int, dtype: torch.dtype = torch.float64, far: float = 3
) -> Any:
    """All ranks' batches as one, what to multiply outputs with for a loss, and this rank's rows."""
    torch.manual_seed(3)
    rows = rows[: hvd.size()]
    whole = far + 2 * torch.randn(sum(rows), 3, *SHAPES[dims], dtype=dtype)
    own = slice(sum(rows[: hvd.rank()]), sum(rows[: hvd.rank() + 1]))
    return whole, torch.randn_like(whole), own


def layers(
    hvd: Hvd, dims: int, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, Any]:
    """Ours, and a plain one, with the same unusual parameters and running statistics."""
    ours = hvd.SyncBatchNorm(3, **options).to(dtype)
    plain = PLAIN[dims](3, **options).to(dtype)
    torch.manual_seed(5)
    for tensor in [*ours.parameters(), *(b for b in ours.buffers() if b.dtype == dtype)]:
        tensor.data.uniform_(0.5, 2)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def compare(
    hvd: Hvd,
    /,
    dims: int,
    rows: list[int],
    dtype: torch.dtype = torch.float64,
    parameters: torch.dtype = torch.float64,
    far: float = 3,
    **options: Any,
) -> None:
    """Compare two steps with those of the plain layer, in double precision, on all batches."""
    ours, plain = layers(hvd, dims, parameters, **options)
    plain = plain.double()
    tolerance = 4 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
    tolerance = max(tolerance, far * 1e-14)
    whole, weights, own = data(hvd, rows, dims, dtype, far)
    for _ in range(2 if dtype == torch.float64 else 1):
        x: Any = whole[own].clone().requires_grad_()
        y = ours(x)
        (y * weights[own]).sum().backward()
        all_x: Any = whole.double().clone().requires_grad_()
        all_y = plain(all_x)
        (all_y * weights.double()).sum().backward()
        assert y.dtype == x.grad.dtype == dtype
        assert all(buffer.dtype in (parameters, torch.int64) for buffer in ours.buffers())
        buffers = zip(ours.buffers(), plain.buffers(), strict=True)
        for mine, theirs in ((y, all_y[own]), (x.grad, all_x.grad[own]), *buffers):
            close(mine.double(), theirs.double(), tolerance)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == parameters
        got = hvd.allreduce(mine.grad.double(), op=hvd.Sum, name="grad")
        close(got, theirs.grad, 10 * tolerance)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"momentum": 0.3, "eps": 1e-2},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]


@case(arms=["hvd-torchrun"], sizes=(1, 2))
def equals_batch_norm_on_all_batches_together(hvd: Hvd) -> None:
    for options in OPTIONS:
        compare(hvd, 3, [4, 4, 4], **options)
    compare(hvd, 2, [4, 4, 4], far=1e6)


@case(arms=["hvd-torchrun"])
def uneven_batches_of_any_shape(hvd: Hvd) -> None:
    for dims, rows in ((1, [5, 2, 3]), (2, [4, 0, 1]), (3, [0, 3, 0]), (4, [5, 2, 3])):
        compare(hvd, dims, rows)


@case(arms=["hvd-torchrun"], sizes=(2,))
def narrow_dtypes(hvd: Hvd) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parameters = torch.float32 if dtype == torch.float16 else dtype
        compare(hvd, 3, [3, 2], dtype, parameters)


@case(arms=["hvd-torchrun"])
def other_modes(hvd: Hvd) -> None:
    everything, _, own = data(hvd, [3, 2, 4], 2)
    mine = everything[own]
    ours, plain = layers(hvd, 2)
    with torch.no_grad():  # in training
        close(ours(mine), plain(everything)[own])
    close(ours.running_var, plain.running_var)
    ours.eval()
    plain.eval()
    if hvd.rank() == 0:  # with running statistics there is no communication
        close(ours(mine), plain(mine))
        assert ours.num_batches_tracked == 1
    ours, plain = (layer.eval() for layer in layers(hvd, 2, track_running_stats=0))
    close(ours(mine), plain(everything)[own])
    ours, plain = layers(hvd, 2)
    for parameter in ours.parameters():  # frozen, and an input that needs no gradient
        parameter.requires_grad_(False)
    assert not ours(mine).requires_grad
    x = mine.clone().requires_grad_()
    ours(x).sum().backward()
    assert x.grad is not None
    ours.bias.requires_grad_(True)
    ours(mine).sum().backward()
    close(ours.bias.grad, torch.full((3,), len(mine) * 5.0).double())


@case(arms=["hvd-torchrun"])
def a_network(hvd: Hvd) -> None:
    """A module that is used twice in a graph, its copy, and graphs backward in another order."""
    whole, _, own = data(hvd, [3, 2, 4], 1)
    shared, plain_shared = layers(hvd, 1)
    second = copy.deepcopy(shared)
    third = pickle.loads(pickle.dumps(shared))

    def network(x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> list[Tensor]:
        y = a(x) * 2 + x
        return [a(y).pow(3), b(a(y) + y).exp(), c(y.sigmoid())]

    plain = plain_shared, copy.deepcopy(plain_shared), copy.deepcopy(plain_shared)
    for _ in range(2):
        x, all_x = (t.clone().requires_grad_() for t in (whole[own], whole))
        for outputs in zip(
            reversed(network(x, shared, second, third)),
            reversed(network(all_x, *plain)),
            strict=True,
        ):
            for output in outputs:
                output.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        close(x.grad, all_x.grad[own], 1e-10)


@case(arms=["hvd-torchrun"])
def modules_of_unlike_numbers_fit_after_a_new_init(hvd: Hvd) -> None:
    layer = [hvd.SyncBatchNorm(2) for _ in range(1 + hvd.rank())][-1]
    layer(torch.ones(2, 2))
    hvd.shutdown()
    hvd.init()
    rank = torch.full((2, 2), float(hvd.rank()))
    means = layer(rank) + hvd.allreduce(-layer(rank).detach(), name="mean")
    close(means.mean(0), layer(rank).mean(0), 1e-5)


@case(arms=["hvd-torchrun"])
def inputs_without_channels_are_refused(hvd: Hvd) -> None:
    for shape in [(3,), (2, 4)]:
        with raises(ValueError, "expected"):
            hvd.SyncBatchNorm(3)(torch.ones(shape))
