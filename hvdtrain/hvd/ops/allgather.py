"""allgather: every rank gets all ranks' rows.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.request import AVERAGE
from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to concatenate all ranks' tensors along the first dimension; return a handle.

    The size of that dimension may differ between ranks, and may be zero.
    """
    return _begin("allgather", [tensor], name, process_set, handles.first)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return all ranks' tensors, concatenated along the first dimension.

    Differentiable: a rank's gradient is its own rows of the mean of the ranks' gradients.
    """
    result: Tensor = handles.apply(_Allgather, False, name, process_set, tensor)[0]
    return result


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to all-gather several tensors, all or none of them; return one handle."""
    return _begin("grouped_allgather", tensors, name, process_set, tuple)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """All-gather several tensors, all or none of them. Differentiable."""
    result: tuple[Tensor, ...] = handles.apply(_Allgather, True, name, process_set, *tensors)
    return result


def _begin(
    prefix: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[Any], Any],
) -> int:
    request = handles.describe("allgather", tensors)
    return handles.submit(prefix, name, request, tensors, process_set, pick)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        prefix = "grouped_allgather" if grouped else "allgather"
        handle = _begin(prefix, tensors, name, process_set, tuple)
        operation = handles.operation_of(handle)
        ctx.how = f"{prefix}.{handles.name_of(handle)}.backward", process_set
        ctx.rows = [t.shape[0] if t.dim() else 0 for t in tensors]
        result: tuple[Tensor, ...] = handles.synchronize(handle)
        me = basics.engine.sets[operation.key.set_id].index(basics.rank())
        # The first row of this rank in each result: `extra` has the ranks' numbers of rows.
        ctx.begins = [sum(rows[:me]) for rows in operation.extra]
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        # A late import, since allreduce imports this module.
        from hvdtrain.hvd.ops.allreduce import grouped_allreduce_async

        name, process_set = ctx.how
        handle = grouped_allreduce_async(grad_outputs, None, name, AVERAGE, process_set=process_set)
        means = handles.synchronize(handle)
        grads = [g.narrow(0, b, n) for g, b, n in zip(means, ctx.begins, ctx.rows, strict=True)]
        return (None, None, None, *grads)
