"""allreduce: single, grouped, in place, sparse.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import Compression
from hvdtrain.hvd.engine.request import ADASUM, AVERAGE
from hvdtrain.hvd.ops import allgather as gathering
from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor over all ranks into a new one; return a handle."""
    op = handles.choose_op(op, average)
    return _begin(
        "allreduce", [tensor], name, op, prescale_factor, postscale_factor, process_set,
        pick=handles.first,
    )  # fmt: skip


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor over all ranks in place; return a handle."""
    op = handles.choose_op(op, average)
    return _begin(
        "allreduce", [tensor], name, op, prescale_factor, postscale_factor, process_set,
        pick=handles.first, in_place=True,
    )  # fmt: skip


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks into a new one; by default to the mean.

    Differentiable: the gradient is reduced in the same way. Integers are averaged in double
    precision and truncated toward zero.
    """
    op = handles.choose_op(op, average)
    compressed, ctx = compression.compress(tensor)
    (reduced,) = handles.apply(
        _Allreduce, "allreduce", name, op, prescale_factor, postscale_factor, process_set,
        compressed,
    )  # fmt: skip
    decompressed: Tensor = compression.decompress(reduced, ctx)
    return decompressed


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks in place, and return it."""
    op = handles.choose_op(op, average)
    handle = allreduce_async_(
        tensor, None, name, op, prescale_factor, postscale_factor, process_set
    )
    result: Tensor = handles.synchronize(handle)
    return result


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce several tensors, all or none of them, into new ones; return one handle."""
    op = handles.choose_op(op, average)
    return _begin(
        "grouped_allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set,
        pick=tuple,
    )  # fmt: skip


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce several tensors in place; return one handle."""
    op = handles.choose_op(op, average)
    return _begin(
        "grouped_allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set,
        pick=tuple, in_place=True,
    )  # fmt: skip


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors, all or none of them, into new ones. Differentiable."""
    op = handles.choose_op(op, average)
    compressed, ctxs = zip(*(compression.compress(t) for t in tensors), strict=True)
    reduced = handles.apply(
        _Allreduce, "grouped_allreduce", name, op, prescale_factor, postscale_factor, process_set,
        *compressed,
    )  # fmt: skip
    return [compression.decompress(t, ctx) for t, ctx in zip(reduced, ctxs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place, and return them."""
    op = handles.choose_op(op, average)
    handle = grouped_allreduce_async_(
        tensors, None, name, op, prescale_factor, postscale_factor, process_set
    )
    results: tuple[Tensor, ...] = handles.synchronize(handle)
    return results


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to sum (op Average: to average) sparse COO tensors, by all-gathers of their entries.

    Return a function that waits for the result and returns it, uncoalesced.
    """
    indices, values = tensor._indices(), tensor._values()
    # An all-gather concatenates rows, and a sparse tensor's indices have one column per entry.
    by_row = indices.transpose(0, 1).contiguous()
    rows = gathering.allgather_async(by_row, f"{name}.indices", process_set)
    data = gathering.allgather_async(values, f"{name}.values", process_set)
    size = len(basics.engine.sets[process_set.process_set_id or 0])

    def wait() -> Tensor:
        gathered = handles.synchronize(data)
        places = handles.synchronize(rows).transpose(0, 1)
        if op == AVERAGE:
            gathered = gathered / size
        return torch.sparse_coo_tensor(places, gathered, tensor.size(), check_invariants=False)

    return wait


def _begin(
    prefix: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    pick: Callable[[Any], Any],
    in_place: bool = False,
) -> int:
    handles.check_reducible(tensors, op)
    if op == ADASUM:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        handles.check_adasum()
    # In exact mode float16 is rounded before it is scaled: see `Request.data`.
    rounds = basics.engine.settings.exact_horovod or None
    request = handles.describe(
        "allreduce", tensors, op=op, prescale=float(prescale), postscale=float(postscale),
        data=rounds,
    )  # fmt: skip
    outputs = list(tensors) if in_place else None
    return handles.submit(prefix, name, request, tensors, process_set, pick, outputs)


class _Allreduce(torch.autograd.Function):
    """A differentiable allreduce. The name of the backward's allreduce derives from the forward's,
    so ranks may run their backwards in different orders.
    """

    @staticmethod
    def forward(
        ctx: Any,
        prefix: str,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        handle = _begin(prefix, tensors, name, op, prescale, postscale, process_set, tuple)
        backward = f"{handles.name_of(handle)}.backward"
        ctx.how = (prefix, backward, op, prescale, postscale, process_set)
        result: tuple[Tensor, ...] = handles.synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        reduced = handles.apply(_Allreduce, *ctx.how, *grad_outputs)
        return (*[None] * len(ctx.how), *reduced)
