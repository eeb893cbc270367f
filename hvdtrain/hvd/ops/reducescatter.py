"""reducescatter: reduce a tensor over all ranks, and keep one share of its rows on each.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import Compression
from hvdtrain.hvd.engine.request import AVERAGE, SUM
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce a tensor over all ranks to this rank's share of the rows; return a handle.

    If the rows do not divide evenly, the first ranks get one more each.
    """
    return _begin(
        "reducescatter", [tensor], name, op, process_set, prescale_factor, postscale_factor,
        handles.first,
    )  # fmt: skip


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks; return this rank's share of the rows. Differentiable."""
    compressed, ctx = compression.compress(tensor)
    (reduced,) = handles.apply(
        _Reducescatter,
        "reducescatter",
        name,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        compressed,
    )
    decompressed: Tensor = compression.decompress(reduced, ctx)
    return decompressed


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors, all or none of them; return one handle."""
    return _begin(
        "grouped_reducescatter", tensors, name, op, process_set, prescale_factor,
        postscale_factor, tuple,
    )  # fmt: skip


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce several tensors; return this rank's share of the rows of each. Differentiable."""
    compressed, ctxs = zip(*(compression.compress(t) for t in tensors), strict=True)
    reduced = handles.apply(
        _Reducescatter, "grouped_reducescatter", name, op, process_set, prescale_factor,
        postscale_factor, *compressed,
    )  # fmt: skip
    return [compression.decompress(t, ctx) for t, ctx in zip(reduced, ctxs, strict=True)]


def _begin(
    prefix: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    pick: Callable[[Any], Any],
) -> int:
    if op not in (AVERAGE, SUM):
        basics.engine  # noqa: B018  raises first if hvd is not initialised
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    if any(t.dim() == 0 for t in tensors):
        raise ValueError("Reducescatter does not support scalar inputs")
    request = handles.describe(
        "reducescatter", tensors, op=op, prescale=float(prescale), postscale=float(postscale)
    )
    return handles.submit(prefix, name, request, tensors, process_set, pick)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        prefix: str,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        handle = _begin(prefix, tensors, name, op, process_set, prescale, postscale, tuple)
        size = len(basics.engine.sets[process_set.process_set_id or 0])
        ctx.factor = prescale * postscale * (size if op == SUM else 1)
        ctx.how = f"{prefix}.{handles.name_of(handle)}.backward", process_set
        result: tuple[Tensor, ...] = handles.synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        from hvdtrain.hvd.ops.allgather import grouped_allgather_async

        name, process_set = ctx.how
        scaled = [g * ctx.factor for g in grad_outputs]
        grads = handles.synchronize(grouped_allgather_async(scaled, name, process_set))
        return (None, None, None, None, None, None, *grads)
