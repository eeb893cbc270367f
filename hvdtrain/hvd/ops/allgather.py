"""allgather: every rank gets all ranks' rows.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    return handles.submit("allgather", [tensor], name, process_set)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return all ranks' tensors, concatenated along the first dimension.

    Differentiable: a rank's gradient is its own rows of the mean of the ranks' gradients.
    """
    return _run([tensor], name, process_set, grouped=False)[0]


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to all-gather several tensors, all or none of them; return one handle."""
    return handles.submit("allgather", tensors, name, process_set, grouped=True)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """All-gather several tensors, all or none of them. Differentiable."""
    return _run(tensors, name, process_set, grouped=True)


def _run(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, grouped: bool
) -> tuple[Tensor, ...]:
    num_rows = [t.shape[0] if t.dim() else 0 for t in tensors]

    def begin(tensors: Sequence[Tensor]) -> int:
        return handles.submit("allgather", tensors, name, process_set, grouped)

    def gradients(name: str, extra: Any, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        # A late import, since allreduce imports this module.
        from hvdtrain.hvd.ops.allreduce import grouped_allreduce

        prefix = "grouped_allgather" if grouped else "allgather"
        backward = f"{prefix}.{name}.backward"
        means = grouped_allreduce(grads, name=backward, op=AVERAGE, process_set=process_set)
        me = basics.engine.sets[process_set.process_set_id or 0].index(basics.rank())
        # The first row of this rank in each result: `extra` has the ranks' numbers of rows.
        firsts = [sum(rows[:me]) for rows in extra]
        return [g.narrow(0, at, n) for g, at, n in zip(means, firsts, num_rows, strict=True)]

    return handles.differentiable(begin, gradients, tensors)
