"""reducescatter: reduce a tensor over all ranks, and keep one share of its rows on each.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvdtrain.hvd.engine.operation import AVERAGE
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
    return handles.reduce(
        "reducescatter", [tensor], name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors, all or none of them; return one handle."""
    return handles.reduce(
        "reducescatter", tensors, name, op, prescale_factor, postscale_factor, process_set, True
    )
