"""reducescatter: reduce a tensor over all ranks, and keep one share of its rows on each.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import Compression
from hvdtrain.hvd.engine.request import AVERAGE, SUM
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.ops.allgather import grouped_allgather
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
    return _ReducescatterCall(name, op, prescale_factor, postscale_factor, process_set).begin(
        [tensor]
    )


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
    call = _ReducescatterCall(name, op, prescale_factor, postscale_factor, process_set)
    return handles.compressed([tensor], compression, call.run)[0]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors, all or none of them; return one handle."""
    return _ReducescatterCall(name, op, prescale_factor, postscale_factor, process_set, True).begin(
        tensors
    )


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
    call = _ReducescatterCall(name, op, prescale_factor, postscale_factor, process_set, True)
    return handles.compressed(tensors, compression, call.run)


class _ReducescatterCall(NamedTuple):
    """The arguments of a reducescatter."""

    name: str | None
    op: int
    prescale: float
    postscale: float
    process_set: ProcessSet
    grouped: bool = False

    def begin(self, tensors: Sequence[Tensor]) -> int:
        """Start it, and return its handle."""
        if self.op not in (AVERAGE, SUM):
            basics.engine  # noqa: B018  raises first if hvd is not initialised
            raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
        if any(t.dim() == 0 for t in tensors):
            raise ValueError("Reducescatter does not support scalar inputs")
        return handles.submit(
            "reducescatter", tensors, self.name, self.process_set, self.grouped,
            op=self.op, prescale=float(self.prescale), postscale=float(self.postscale),
        )  # fmt: skip

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run it as part of the autograd graph."""

        def gradients(name: str, extra: Any, grads: Sequence[Tensor]) -> Sequence[Tensor]:
            size = handles.set_size(self.process_set) if self.op == SUM else 1
            scaled = [g * (self.prescale * self.postscale * size) for g in grads]
            prefix = "grouped_reducescatter" if self.grouped else "reducescatter"
            return grouped_allgather(scaled, f"{prefix}.{name}.backward", self.process_set)

        return handles.differentiable(self.begin, gradients, tensors)
