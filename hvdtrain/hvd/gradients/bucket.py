"""Bucket: the buffer in which the gradients of some parameters are reduced together on this rank.

Used by `BucketReducer`: it fills the bucket, all-reduces the buffer, and installs the result.

The result belongs into the tensor that `p.grad` is, as with Horovod: scripts hold it, save it, or
make it a view of memory of their own. A small gradient is copied back. To copy back a large one
would cost up to a fifth of a step, so the bucket lends its memory instead where nobody can notice:

    private      only the parameter refers to the gradient: `p.grad` becomes a tensor on its part of
                 the buffer, with a storage of its own
    else         it is copied back
    next step    before it writes to a lent part that anybody but `p.grad` refers to, the bucket
                 moves to new memory: the part belongs to its other holder

A large gradient can be the buffer itself (`BucketLayout.in_place`).
"""

from __future__ import annotations

import functools
from operator import is_
from typing import Any

import torch
from torch import Tensor

from hvdtrain._torch.copies import copy_all_
from hvdtrain._torch.storage import StorageReference, has_private_gradient, part_of_storage
from hvdtrain.hvd.gradients.channel import BucketChannel
from hvdtrain.hvd.gradients.plan import SMALL_NUMEL, BucketLayout


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
        self._strides = strides
        self._copied = [False] * len(params)
        # What each `p.grad` was when its values were taken, and how often it had been written to.
        self._taken: list[Tensor | None] = [None] * len(params)
        self._versions = [0] * len(params)
        self._casts = any(layout.dtype != p.dtype for p in params)
        # Which parts may be lent, and what refers to the storage of those that are.
        self._may_lend = [not self._casts and not layout.in_place] * len(params)
        self._lent: list[StorageReference | None] = [None] * len(params)
        if layout.in_place:
            return
        device = params[0].device if params else torch.device("cpu")
        self._allocate = functools.partial(channel.buffer, layout, device)
        self.num_small = sum(p.numel() < SMALL_NUMEL for p in params)
        self._use(self._allocate())

    def _use(self, flat: Tensor) -> None:
        """Make `flat` the buffer."""
        self.flat, self.views, at = flat, [], 0
        for p, stride in zip(self.params, self._strides, strict=True):
            piece = flat[at : at + p.numel()]
            shaped = piece.view(p.shape) if stride is None else piece.as_strided(p.shape, stride)
            self.views.append(shaped)
            at += p.numel()
        self.small = flat[: sum(p.numel() for p in self.params[: self.num_small])]
        self._lent = [None] * len(self.params)

    def copies_early(self, at: int) -> bool:
        """Return whether the gradient at this index may be copied before the bucket is complete."""
        return not self.layout.in_place and at >= self.num_small and not self._casts

    def copy_early(self, at: int, factor: float) -> None:
        """Copy one gradient in, times `factor`; lend its part, so that its own memory is free."""
        grad = self.params[at].grad
        if grad is None or grad.is_sparse or grad.requires_grad:
            return  # left to `fill`, which handles these cases
        self._take_back(at)
        torch.mul(grad, factor, out=self.views[at])
        self._copied[at] = True
        del grad  # it would count as a reference
        self._lend(at)
        self._taken[at] = grad = self.params[at].grad
        self._versions[at] = grad._version  # type: ignore[union-attr]

    def reset(self) -> None:
        """Reset the count of pending gradients for the next step."""
        self.pending = len(self.params)
        self._copied = [False] * len(self.params)
        self._taken = [None] * len(self.params)

    def fill(self, factor: float, changed: bool) -> Tensor:
        """Copy the other gradients in, times `factor`; return the buffer to reduce.

        `changed` is the value of the layout's flag element, if it has one.
        """
        if self.layout.in_place:
            flat = self._fill_in_place(factor)
            self._note_taken([p.grad for p in self.params])
            return flat
        n = self.num_small
        for at in range(n, len(self.params)):
            if not self._copied[at]:
                self._take_back(at)
        grads = [p.grad for p in self.params]
        self._note_taken(grads)
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

    def _note_taken(self, grads: list[Tensor | None]) -> None:
        """Note the gradients that are taken now, so that `find_changed` sees later changes."""
        if any(self._copied):
            pairs = zip(grads, self._taken, self._copied, strict=True)
            grads = [taken if copied else grad for grad, taken, copied in pairs]
            now = zip(_versions(grads), self._versions, self._copied, strict=True)
            self._versions = [before if copied else version for version, before, copied in now]
        else:
            self._versions = _versions(grads)
        self._taken = grads

    def find_changed(self) -> list[str]:
        """Return the parameters whose gradients were written to or replaced after they were taken.

        The buffer may hold such a change on this rank alone, or in part. Forgets what was taken.
        """
        taken, self._taken = self._taken, [None] * len(self.params)
        grads = [p.grad for p in self.params]
        versions = _versions(grads)
        if versions == self._versions and all(map(is_, grads, taken)):
            return []
        rows = zip(self.layout.names, grads, taken, self._versions, strict=True)
        return [name for name, grad, was, version in rows if has_changed(grad, was, version)]

    def _fill_in_place(self, factor: float) -> Tensor:
        """Return the only gradient, times `factor`, as the buffer; a copy if not contiguous."""
        (p,) = self.params
        grad = dense(p.grad)
        if grad is None:
            grad = p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
        # `data`: the reduction must not count as a change of the gradient.
        self.flat = grad.contiguous().data.view(-1)
        self.views = [self.flat.view(p.shape)]
        return self.flat.mul_(factor) if factor != 1.0 else self.flat

    def install(self, factor: float, sparse_as_dense: bool) -> None:
        """Make the reduced buffer, times `factor`, the values of the parameters' gradients."""
        if factor != 1.0:
            self.flat.mul_(factor)
        into, out = [], []
        for at, (p, view) in enumerate(zip(self.params, self.views, strict=True)):
            if at >= self.num_small:
                self._lend(at)
            grad = p.grad
            if grad is None:
                p.grad = view.to(p.dtype, copy=True)
            elif grad.is_sparse:
                result = view.to(p.dtype, copy=True)
                if sparse_as_dense:
                    grad.zero_().add_(result.to_sparse())
                else:
                    p.grad = result
            elif at < self.num_small or grad.data_ptr() != view.data_ptr():
                if not grad.is_contiguous() and overlaps_itself(grad):
                    p.grad = view.to(p.dtype, copy=True)
                    continue
                into.append(grad)
                out.append(view)
        if into:
            copy_all_(into, out)

    # Lending

    def _lend(self, at: int) -> None:
        """Make `p.grad` a part of the buffer, if that is allowed and nobody can notice."""
        p = self.params[at]
        if self._may_lend[at] and (p.grad is None or has_private_gradient(p)):
            part = part_of_storage(self.flat, self.views[at])
            self._lent[at] = StorageReference(part.untyped_storage())
            p.grad = part

    def _take_back(self, at: int) -> None:
        """Make sure that a part may be written: if anybody but `p.grad` holds it, move the buffer.

        Such a gradient is never lent again.
        """
        if self._lent[at] and not _is_same(self.params[at].grad, self.views[at]):
            self._may_lend[at] = False
            self._use(self._allocate().copy_(self.flat))


def _versions(grads: list[Tensor | None]) -> list[int]:
    """Return how often each gradient was written to; -1 if there is none."""
    return [-1 if grad is None else grad._version for grad in grads]


def has_changed(grad: Tensor | None, taken: Tensor | None, version: int) -> bool:
    """Return whether a gradient is another one than `taken`, or was written to since `version`.

    Writes to `p.grad.data`, or to a part of a larger tensor, are not seen: `data` counts none, and
    a part counts those to the other parts too.
    """
    if grad is not taken or grad is None or grad._version == version:
        return grad is not taken
    return grad.is_sparse or grad.untyped_storage().nbytes() == grad.nbytes


def _is_same(grad: Tensor | None, view: Tensor) -> bool:
    """Return whether a gradient is the same elements in the same memory as `view`."""
    if grad is None or grad.is_sparse:
        return False
    return grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()


def overlaps_itself(t: Tensor) -> bool:
    """Return whether elements of a dense tensor share memory, as after `expand`.

    Such a gradient, set by hand, cannot be written to: the result replaces it.
    """
    end = 0  # of the memory that the dimensions so far reach over
    for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
        if n > 1 and stride <= end:
            return True
        end += stride * (n - 1)
    return False


def dense(grad: Tensor | None) -> Tensor | None:
    """Return a gradient as a dense tensor. Raises AssertionError if it has a graph."""
    if grad is None:
        return None
    assert not grad.requires_grad, "gradients of gradients (create_graph) cannot be averaged"
    return grad.to_dense() if grad.is_sparse else grad
