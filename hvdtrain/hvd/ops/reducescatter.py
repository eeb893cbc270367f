"""reducescatter: reduce a tensor over all ranks, and keep one share of its rows on each.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.operation import AVERAGE, SUM
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
    return begin([tensor], name, op, prescale_factor, postscale_factor, process_set)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors, all or none of them; return one handle."""
    return begin(tensors, name, op, prescale_factor, postscale_factor, process_set, True)


def begin(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool = False,
) -> int:
    """Start a reducescatter, and return its handle."""
    if op not in (AVERAGE, SUM):
        basics.engine  # noqa: B018  raises first if hvd is not initialised
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    handles.check_tensors("reducescatter", tensors)
    if any(t.dim() == 0 for t in tensors):
        raise ValueError("Reducescatter does not support scalar inputs")
    return handles.submit(
        "reducescatter", tensors, name, process_set, grouped,
        op=op, prescale=float(prescale), postscale=float(postscale),
    )  # fmt: skip
