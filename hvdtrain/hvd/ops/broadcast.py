"""broadcast: every rank gets the root's tensor.

Collective over the process set; ranks match calls by name. `root_rank` is a rank of the whole
world, even with a process set.
"""

from __future__ import annotations

from torch import Tensor

from hvdtrain.hvd.basics import basics
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
    return _begin(tensor, root_rank, name, process_set, None)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to overwrite a tensor with the root's; return a handle."""
    return _begin(tensor, root_rank, name, process_set, [tensor])


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor with the root's, and return it."""
    result: Tensor = handles.synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def _begin(
    tensor: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    outputs: list[Tensor] | None,
) -> int:
    members = basics.engine.sets.get(process_set.process_set_id or 0, [])
    if process_set.process_set_id is not None and root_rank not in members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set"
        )
    return handles.submit(
        "broadcast", [tensor], name, process_set, outputs=outputs, root=int(root_rank)
    )
