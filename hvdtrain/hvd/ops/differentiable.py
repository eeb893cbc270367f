"""The operations that return new tensors, with gradients: allreduce, allgather, broadcast, ...

Collective over the process set; ranks match calls by name. A gradient is computed by another one of
these, so it has a gradient, too. It derives its name from the forward's, so that ranks may run
their backwards in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import Compression
from hvdtrain.hvd.engine.operation import AVERAGE, SUM
from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.ops.alltoall import Splits, alltoall_async
from hvdtrain.hvd.ops.broadcast import broadcast_async
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set

Begin = Callable[[Sequence[Tensor]], int]
Gradients = Callable[[str, Any, Sequence[Tensor]], Sequence[Tensor]]


class _Collective(torch.autograd.Function):
    """`begin` starts a collective on the tensors and returns its handle. `gradients(name, extra,
    grads)` returns the tensors' gradients from those of the results, by a collective of this name.
    """

    @staticmethod
    def forward(
        ctx: Any, begin: Begin, gradients: Gradients, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        handle = begin(tensors)
        operation = basics.handles[handle]
        results = handles.synchronize(handle)
        ctx.gradients = partial(gradients, f"{operation.key.name}.backward", operation.extra)
        return results if isinstance(results, tuple) else (results,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.gradients(grads)


def _run(begin: Begin, gradients: Gradients, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _Collective.apply(begin, gradients, *tensors)  # type: ignore[no-untyped-call]
    return results


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
    how = op, prescale_factor, postscale_factor, process_set
    return _reduce("allreduce", [tensor], name, compression, *how, False)[0]


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
    how = op, prescale_factor, postscale_factor, process_set
    return _reduce("allreduce", tensors, name, compression, *how, True)


def _reduce(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    compression: Any,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool,
) -> list[Tensor]:
    """Compress tensors, reduce them, and return the decompressed results."""
    how = op, prescale, postscale, process_set, grouped

    def gradients(name: str, extra: Any, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        if kind == "allreduce":
            return _reduce(kind, grads, name, Compression.none, *how)
        size = handles.set_size(process_set) if op == SUM else 1
        scaled = [g * (prescale * postscale * size) for g in grads]
        return grouped_allgather(scaled, name, process_set)

    handles.check_tensors(kind, tensors)
    narrowed, ctxs = zip(*map(compression.compress, tensors), strict=True)
    results = _run(lambda given: handles.reduce(kind, given, name, *how), gradients, narrowed)
    return [compression.decompress(t, ctx) for t, ctx in zip(results, ctxs, strict=True)]


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return all ranks' tensors, concatenated along the first dimension.

    Differentiable: a rank's gradient is its own rows of the mean of the ranks' gradients.
    """
    return _allgather([tensor], name, process_set, grouped=False)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """All-gather several tensors, all or none of them. Differentiable."""
    return _allgather(tensors, name, process_set, grouped=True)


def _allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, grouped: bool
) -> tuple[Tensor, ...]:
    def begin(tensors: Sequence[Tensor]) -> int:
        return handles.submit("allgather", tensors, name, process_set, grouped)

    def gradients(name: str, extra: Any, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        means = grouped_allreduce(grads, name=name, op=AVERAGE, process_set=process_set)
        me = process_set.rank()
        # `extra` has the ranks' numbers of rows in each result.
        pairs = zip(means, extra, strict=True)
        return [mean.narrow(0, sum(rows[:me]), rows[me]) for mean, rows in pairs]

    handles.check_tensors("allgather", tensors)
    return _run(begin, gradients, tensors)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a copy of the root's tensor.

    Differentiable: the root gets the mean of the ranks' gradients, other ranks get zeros.
    """

    def gradients(name: str, extra: Any, grads: Sequence[Tensor]) -> list[Tensor]:
        mean = allreduce(grads[0], name=name, op=AVERAGE, process_set=process_set)
        # Zeros with a graph: all ranks take part in the allreduce of a second backward.
        is_other = torch.tensor(basics.rank() != root_rank, device=mean.device)
        return [mean.masked_fill(is_other, 0)]

    def begin(tensors: Sequence[Tensor]) -> int:
        return broadcast_async(tensors[0], root_rank, name, process_set)

    return _run(begin, gradients, [tensor])[0]


def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send `splits[i]` rows to rank i; return the received rows, in rank order.

    With splits, also return the number of rows from each rank. Differentiable: gradients are sent
    back to the ranks that the rows came from.
    """
    handles.check_tensors("alltoall", [tensor])
    num_rows = tensor.shape[0] if tensor.dim() else 0

    def gradients(name: str, extra: Any, grads: Sequence[Tensor]) -> list[Tensor]:
        # The reverse exchange: every rank gets back as many rows as it sent. `extra`: received.
        grad, _ = alltoall(grads[0], extra, name, process_set)
        if len(grad) < num_rows:  # rows beyond the splits were not sent
            grad = torch.cat([grad, grad.new_zeros(num_rows - len(grad), *grad.shape[1:])])
        return [grad]

    def begin(tensors: Sequence[Tensor]) -> int:
        return alltoall_async(tensors[0], splits, name, process_set)

    output, received = _run(begin, gradients, [tensor])
    return output if splits is None else (output, received)


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
    how = op, prescale_factor, postscale_factor, process_set
    return _reduce("reducescatter", [tensor], name, compression, *how, False)[0]


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
    how = op, prescale_factor, postscale_factor, process_set
    return _reduce("reducescatter", tensors, name, compression, *how, True)
