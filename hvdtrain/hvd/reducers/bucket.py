"""Bucket: the buffer that the gradients of some parameters share on this rank.

Used by `BucketReducer`: it fills the bucket, all-reduces the buffer, and installs the result. The
gradients are then views of the buffer, so the result is not copied out. A large gradient can be
the buffer itself (`BucketLayout.in_place`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from hvdtrain._torch.copies import copy_all_
from hvdtrain.hvd.engine.bucket_channel import BucketChannel
from hvdtrain.hvd.engine.bucket_plan import SMALL_NUMEL, BucketLayout


@functools.cache
def _unshared_references() -> int:
    """Return the sys.getrefcount of a gradient that only its parameter and one local refer to.

    Such a gradient is replaced (`p.grad = view`), which is faster than redirecting it
    (`grad.set_(view)`).
    """
    p = torch.zeros(1, requires_grad=True, device="cpu")
    p.grad = torch.zeros(1, device="cpu")
    grad = p.grad
    return sys.getrefcount(grad)


class Bucket:
    """The parameters of one layout on this rank, and the buffer that their gradients share."""

    def __init__(
        self,
        layout: BucketLayout,
        params: list[Tensor],
        strides: list[list[int] | None],
        channel: BucketChannel,
    ) -> None:
        self.layout = layout
        self.params = params
        self.pending = len(params)
        self.work: Any = None
        self.flat = torch.empty(0, device="cpu")
        self.views: list[Tensor] = []
        self.num_small = 0
        self._copied = [False] * len(params)
        self._unshared = _unshared_references()
        if layout.in_place:
            return
        device = params[0].device if params else torch.device("cpu")
        self.flat = channel.buffer(layout, device)
        at = 0
        for p, stride in zip(params, strides, strict=True):
            piece = self.flat[at : at + p.numel()]
            shaped = piece.view(p.shape) if stride is None else piece.as_strided(p.shape, stride)
            self.views.append(shaped)
            at += p.numel()
        # The tensors installed as gradients. User code may redirect them, but never the views.
        self._installed = [view.view_as(view) for view in self.views]
        self._casts = any(view.dtype != p.dtype for view, p in zip(self.views, params, strict=True))
        self._addresses = [view.data_ptr() for view in self.views]
        self.num_small = sum(p.numel() < SMALL_NUMEL for p in params)
        self.small = self.flat[: sum(p.numel() for p in params[: self.num_small])]

    def copies_early(self, at: int) -> bool:
        """Return whether the gradient at this index may be copied before the bucket is complete."""
        return not self.layout.in_place and at >= self.num_small and not self._casts

    def copy_early(self, at: int, factor: float) -> None:
        """Copy one gradient in, times `factor`, and replace it by a view of the bucket."""
        p, mine = self.params[at], self._installed[at]
        grad = p.grad
        usual = grad is not None and not grad.is_sparse and not grad.requires_grad
        if grad is None or not usual or mine.data_ptr() != self._addresses[at]:
            return  # left to `fill`, which handles these cases
        torch.mul(grad, factor, out=self.views[at])
        self._copied[at] = True
        if grad is not mine and sys.getrefcount(grad) <= self._unshared:
            p.grad = mine

    def reset(self) -> None:
        """Reset the count of pending gradients for the next step."""
        self.pending = len(self.params)
        self._copied = [False] * len(self.params)

    def fill(self, factor: float, changed: bool) -> Tensor:
        """Copy the other gradients in, times `factor`; return the buffer to reduce.

        `changed` is the value of the layout's flag element, if it has one.
        """
        if self.layout.in_place:
            return self._in_place(factor)
        grads = [p.grad for p in self.params]
        n = self.num_small
        # Small gradients are copied by one call; missing ones count as zeros.
        if any(g is None or g.is_sparse or g.requires_grad for g in grads):
            grads = [dense(g) for g in grads]
            for view, grad, copied in zip(self.views, grads, self._copied, strict=True):
                if grad is None and not copied:
                    view.zero_()
            pairs = [
                (v, g) for v, g in zip(self.views[:n], grads[:n], strict=True) if g is not None
            ]
            if pairs:
                copy_all_([v for v, _ in pairs], [g for _, g in pairs])
        elif n:
            copy_all_(self.views[:n], grads[:n])  # type: ignore[arg-type]
        if n and factor != 1.0:
            self.small.mul_(factor)
        for view, grad, copied in zip(self.views[n:], grads[n:], self._copied[n:], strict=True):
            if grad is not None and not copied:
                torch.mul(grad, factor, out=view) if factor != 1.0 else view.copy_(grad)
        if self.layout.flag:
            self.flat[-1] = float(changed)
        return self.flat

    def _in_place(self, factor: float) -> Tensor:
        """Return the only gradient itself, times `factor`, dense and contiguous, as the buffer."""
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
        """Install the reduced buffer, times `factor`, as the parameters' gradients."""
        if factor != 1.0:
            self.flat.mul_(factor)
        if self.layout.in_place:
            return
        for i, p in enumerate(self.params):
            grad, mine = p.grad, self._installed[i]
            if self._casts or mine.data_ptr() != self._addresses[i]:
                mine = self._new_view(i, p)
            if grad is mine:
                continue
            if grad is not None and grad.is_sparse:
                p.grad = mine.clone().to_sparse() if sparse_as_dense else mine
            elif grad is None or sys.getrefcount(grad) <= self._unshared:
                p.grad = mine
            else:
                grad.set_(mine)  # type: ignore[call-overload]  # other references see the mean

    def _new_view(self, i: int, p: Tensor) -> Tensor:
        """Return a new tensor on the memory of view `i`, or its cast to the parameter's dtype.

        Not the view itself, since user code may redirect a gradient to other memory
        (`grad.data = ...`, `model.double()`).
        """
        view = self.views[i]
        if view.dtype != p.dtype:
            return view.to(p.dtype)
        self._installed[i] = view.view_as(view)
        return self._installed[i]


def dense(grad: Tensor | None) -> Tensor | None:
    """Return a gradient as a dense tensor. Raises AssertionError if it has a graph."""
    if grad is None:
        return None
    assert not grad.requires_grad, "gradients of gradients (create_graph) cannot be averaged"
    return grad.to_dense() if grad.is_sparse else grad
