"""One bucket on one rank: the buffer that some parameters' gradients share."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.engine.lanes import SMALL_NUMEL, Lane, Layout


def _references(p: Tensor) -> int:
    grad = p.grad
    return sys.getrefcount(grad)


def _own_references() -> int:
    p = torch.zeros(1, requires_grad=True)
    p.grad = torch.zeros(1)
    return _references(p)


# What sys.getrefcount says of a gradient that nobody holds but this module, as it looks at it. To
# put another tensor in its place is faster than to make it another.
_NOBODY_ELSE = _own_references()


class Bucket:
    """The parameters of one layout on this rank, and the buffer that their gradients share."""

    def __init__(
        self, layout: Layout, params: list[Tensor], strides: list[list[int] | None], lane: Lane
    ) -> None:
        self.layout = layout
        self.params = params
        self.pending = len(params)
        self.work: Any = None
        self.flat = torch.empty(0)
        self.views: list[Tensor] = []
        self.num_small = 0
        self._taken = [False] * len(params)
        if layout.in_place:
            return
        device = params[0].device if params else torch.device("cpu")
        self.flat = lane.buffer(layout, device)
        at = 0
        for p, stride in zip(params, strides, strict=True):
            piece = self.flat[at : at + p.numel()]
            shaped = piece.view(p.shape) if stride is None else piece.as_strided(p.shape, stride)
            self.views.append(shaped)
            at += p.numel()
        self._given = [view.view_as(view) for view in self.views]
        self._casts = any(view.dtype != p.dtype for view, p in zip(self.views, params, strict=True))
        self._places = [view.data_ptr() for view in self.views]
        self.num_small = sum(p.numel() < SMALL_NUMEL for p in params)
        self.small = self.flat[: sum(p.numel() for p in params[: self.num_small])]

    def takes(self, at: int) -> bool:
        """Whether the gradient at this place may be taken by itself, before the bucket is full."""
        return not self.layout.in_place and at >= self.num_small and not self._casts

    def take(self, at: int, factor: float) -> None:
        """Copy one gradient in, times `factor`, and make it a view of the bucket."""
        p, mine = self.params[at], self._given[at]
        grad = p.grad
        usual = grad is not None and not grad.is_sparse and not grad.requires_grad
        if grad is None or not usual or mine.data_ptr() != self._places[at]:
            return  # `fill` knows what to do
        torch.mul(grad, factor, out=self.views[at])
        self._taken[at] = True
        if grad is not mine and sys.getrefcount(grad) <= _NOBODY_ELSE:
            p.grad = mine

    def rearm(self) -> None:
        """Be ready for the next step."""
        self.pending = len(self.params)
        self._taken = [False] * len(self.params)

    def fill(self, factor: float, changed: bool) -> Tensor:
        """Copy the gradients in, times `factor`; return what is to be reduced."""
        if self.layout.in_place:
            return self._in_place(factor)
        grads = [p.grad for p in self.params]
        n = self.num_small
        if any(g is None or g.is_sparse or g.requires_grad for g in grads):
            grads = [dense(g) for g in grads]
            for view, grad, taken in zip(self.views, grads, self._taken, strict=True):
                if grad is None and not taken:
                    view.zero_()
            pairs = [
                (v, g) for v, g in zip(self.views[:n], grads[:n], strict=True) if g is not None
            ]
            if pairs:
                torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])
        elif n:
            torch._foreach_copy_(self.views[:n], grads[:n])  # type: ignore[arg-type]
        if n and factor != 1.0:
            self.small.mul_(factor)
        for view, grad, taken in zip(self.views[n:], grads[n:], self._taken[n:], strict=True):
            if grad is not None and not taken:
                torch.mul(grad, factor, out=view) if factor != 1.0 else view.copy_(grad)
        if self.layout.flag:
            self.flat[-1] = float(changed)
        return self.flat

    def _in_place(self, factor: float) -> Tensor:
        (p,) = self.params
        grad = dense(p.grad)
        if grad is None:
            grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
        if grad is not p.grad:
            p.grad = grad
        elif not grad.is_contiguous():
            grad.set_(grad.contiguous())  # type: ignore[call-overload]
        self.flat = grad.view(-1)
        return self.flat.mul_(factor) if factor != 1.0 else self.flat

    def install(self, factor: float, sparse_as_dense: bool) -> None:
        """Make the reduced buffer, times `factor`, the parameters' gradients."""
        if factor != 1.0:
            self.flat.mul_(factor)
        if self.layout.in_place:
            return
        for i, p in enumerate(self.params):
            grad, mine = p.grad, self._given[i]
            if self._casts or mine.data_ptr() != self._places[i]:
                mine = self._give(i, p)
            if grad is mine:
                continue
            if grad is not None and grad.is_sparse:
                p.grad = mine.clone().to_sparse() if sparse_as_dense else mine
            elif grad is None or sys.getrefcount(grad) <= _NOBODY_ELSE:
                p.grad = mine
            else:
                grad.set_(mine)  # type: ignore[call-overload]  # whoever holds it sees the mean

    def _give(self, i: int, p: Tensor) -> Tensor:
        """Make a gradient of a view: another tensor of the same memory, as its holder may give it
        other memory (`grad.data = ...`, `model.double()`), and the view must stay where it is.
        """
        view = self.views[i]
        if view.dtype != p.dtype:
            return view.to(p.dtype)
        self._given[i] = view.view_as(view)
        return self._given[i]


def dense(grad: Tensor | None) -> Tensor | None:
    """Return a gradient without gaps. Raises AssertionError for one that has a graph."""
    if grad is None:
        return None
    assert not grad.requires_grad, "gradients of gradients (create_graph) cannot be averaged"
    return grad.to_dense() if grad.is_sparse else grad
