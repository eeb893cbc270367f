"""broadcast: every rank gets the root's tensor.

Collective over the process set; ranks match calls by name. `root_rank` is a rank of the whole
world, even with a process set.
"""

from __future__ import annotations

from torch import Tensor

from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to receive the root's tensor, of the same shape and dtype, in a new one.

    Return a handle.
    """
    return handles.submit("broadcast", [tensor], name, process_set, root=int(root_rank))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to overwrite a tensor with the root's; return a handle."""
    into = [tensor]
    return handles.submit("broadcast", into, name, process_set, outputs=into, root=int(root_rank))


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor with the root's, and return it."""
    result: Tensor = handles.synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result
