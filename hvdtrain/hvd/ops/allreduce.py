"""allreduce: single, grouped, in place, sparse.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvdtrain.hvd.engine.operation import AVERAGE
from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.ops.allgather import allgather_async
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
    return handles.reduce(
        "allreduce", [tensor], name, op, prescale_factor, postscale_factor, process_set
    )


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
    how = prescale_factor, postscale_factor, process_set
    return handles.reduce("allreduce", [tensor], name, op, *how, in_place=True)


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
    how = prescale_factor, postscale_factor, process_set
    result: Tensor = handles.synchronize(allreduce_async_(tensor, None, name, op, *how))
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
    return handles.reduce(
        "allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set, True
    )


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
    return handles.reduce(
        "allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set, True, True
    )


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
    how = prescale_factor, postscale_factor, process_set
    handle = grouped_allreduce_async_(tensors, None, name, op, *how)
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
    rows = allgather_async(by_row, f"{name}.indices", process_set)
    data = allgather_async(values, f"{name}.values", process_set)
    size = handles.set_size(process_set)

    def wait() -> Tensor:
        gathered = handles.synchronize(data)
        places = handles.synchronize(rows).transpose(0, 1)
        if op == AVERAGE:
            gathered = gathered / size
        return torch.sparse_coo_tensor(
            places, gathered, tensor.size(), device=gathered.device, check_invariants=False
        )

    return wait
