"""allgather: every rank gets all ranks' rows. (`differentiable` has those that block.)

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to concatenate all ranks' tensors along the first dimension; return a handle.

    The size of that dimension may differ between ranks, and may be zero.
    """
    return handles.submit("allgather", [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to all-gather several tensors, all or none of them; return one handle."""
    return handles.submit("allgather", tensors, name, process_set, grouped=True)
