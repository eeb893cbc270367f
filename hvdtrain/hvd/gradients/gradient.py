"""Gradient: one parameter of an optimizer on this rank; and how gradients are read and written.

A reducer has a list of them, in the optimizer's order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain._torch.copies import copy_all_
from hvdtrain._torch.storage import StorageReference


@dataclass(eq=False, slots=True)
class Gradient:
    """A parameter, and how its gradient is sent. Ranks match it by `name`."""

    name: str
    param: Tensor
    passes_left: int
    """Backward passes before it is averaged."""
    hook: Any = None
    """The handle of its hook; a parameter that has none never required a gradient."""
    kind: str = ""
    """Of the plan in use: see `PlannedGradient`."""
    memory: tuple[torch.dtype, torch.device] | None = None
    """The parameter's dtype and device that the plan is for."""
    was_wanted: bool = False
    """Whether it was in the plan for this rank when its buckets were built."""
    bucket: Any = None
    """The bucket that it is in, if any. What follows is for that."""
    is_large: bool = False
    """Whether its hook copies it, by itself."""
    view: Any = None
    """Its part of the buffer."""
    may_be_lent: bool = False
    """Whether `p.grad` may be a part of the buffer."""
    lent: StorageReference | None = None
    """What refers to the storage of the part that `p.grad` was made."""
    taken: tuple[Tensor | None, int] | None = None
    """What `p.grad` was, and how often written to, when its values were sent or copied."""

    @property
    def is_wanted(self) -> bool:
        """Whether to average it: it is required, or it exists."""
        return self.param.requires_grad or self.param.grad is not None

    def take(self) -> None:
        """Note the gradient, whose values are sent or copied now, for `has_changed`."""
        grad = self.param.grad
        self.taken = grad, -1 if grad is None else grad._version

    @property
    def has_changed(self) -> bool:
        """Whether `p.grad` is another gradient than was taken, or was written to since.

        Writes to `p.grad.data`, or to a part of a larger tensor, are not seen: `data` counts none,
        and a part counts those to the other parts too.
        """
        if self.taken is None:
            return False
        grad, (before, version) = self.param.grad, self.taken
        if grad is not before or grad is None or grad._version == version:
            return grad is not before
        return grad.is_sparse or grad.untyped_storage().nbytes() == grad.nbytes


def dense(grad: Tensor | None) -> Tensor | None:
    """Return a gradient as a dense tensor. Raises AssertionError if it has a graph."""
    if grad is None:
        return None
    assert not grad.requires_grad, "gradients of gradients (create_graph) cannot be averaged"
    return grad.to_dense() if grad.is_sparse else grad


def write_gradients(params: Iterable[Tensor], results: Iterable[Tensor]) -> None:
    """Write results into the gradients, in place where possible, dense ones by one call for all.

    A sparse gradient stays sparse. A result that is in the gradient's memory already is there.
    """
    into, out = [], []
    for p, result in zip(params, results, strict=True):
        grad = p.grad
        if grad is not None and grad.is_sparse:
            rows = result if result.is_sparse else result.to(p.dtype).to_sparse()
            grad.zero_().add_(rows)  # there is no copy_ from other numbers of rows
        elif grad is None or result.is_sparse or overlaps_itself(grad):
            p.grad = result.to(p.dtype, copy=True)
        elif grad.data_ptr() != result.data_ptr():
            into.append(grad)
            out.append(result)
    if into:
        copy_all_(into, out)


def overlaps_itself(t: Tensor) -> bool:
    """Return whether elements of a dense tensor share memory, as after `expand`.

    Such a gradient, set by hand, cannot be written to: the result replaces it.
    """
    return not t.is_contiguous() and any(
        stride == 0 and n > 1 for stride, n in zip(t.stride(), t.shape, strict=True)
    )
