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

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdtrain._torch.copies import copy_all_
from hvdtrain._torch.storage import StorageReference, has_private_gradient, part_of_storage
from hvdtrain.hvd.gradients.channel import BucketChannel
from hvdtrain.hvd.gradients.gradient import (
    Taken,
    dense,
    has_changed,
    taken,
    write_gradients,
)
from hvdtrain.hvd.gradients.plan import SMALL_NUMEL, BucketLayout, BucketPlan
from hvdtrain.hvd.gradients.reducer import Factors


class Bucket:
    """The parameters of one layout on this rank, and the buffer that their gradients share."""

    def __init__(
        self,
        layout: BucketLayout,
        params: list[Tensor],
        plan: BucketPlan,
        channel: BucketChannel,
        factors: Factors,
    ) -> None:
        self.layout = layout
        self.params = params
        self.pending = len(params)
        self.sent: Any = None
        self.flat = torch.empty(0, device="cpu")
        self.views: list[Tensor] = []
        self._factors = factors
        self._strides = [plan.gradients[name].stride for name in layout.names]
        # The gradients from this index on are large: their hooks copy them, each by itself.
        self.first_large = sum(p.numel() < SMALL_NUMEL or layout.in_place for p in params)
        self._taken: list[Taken | None] = []  # what each `p.grad` was when its values were taken
        # Which parts may be lent, and what refers to the storage of those that are.
        self._may_lend = [layout.dtype == p.dtype for p in params]
        self._lent: list[StorageReference | None] = []
        self.reset()
        if not layout.in_place:
            device = params[0].device if params else torch.device("cpu")
            self._allocate = partial(channel.buffer, layout, device)
            self._use(self._allocate())

    def _use(self, flat: Tensor) -> None:
        """Make `flat` the buffer."""
        self.flat = flat
        end = self.layout.numel - self.layout.flag
        pieces = torch.split(flat[:end], [p.numel() for p in self.params])
        self.views = [
            piece.view(p.shape) if stride is None else piece.as_strided(p.shape, stride)
            for piece, p, stride in zip(pieces, self.params, self._strides, strict=True)
        ]
        self._lent = [None] * len(self.params)

    def reset(self) -> None:
        """Reset the count of pending gradients for the next step."""
        self.pending = len(self.params)
        self._taken = [None] * len(self.params)

    def copy(self, at: int) -> None:
        """Copy one gradient in, scaled; lend its part, so that its own memory is free."""
        p, factor, view = self.params[at], self._factors.prescale, self.views[at]
        grad = dense(p.grad)
        if self._lent[at] and (
            grad is None or grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride()
        ):
            # Another holder than `p.grad` has the part: it is that holder's, and never lent again.
            self._may_lend[at] = False
            self._use(self._allocate().copy_(self.flat))
            view = self.views[at]
        if grad is None:
            view.zero_()
        elif factor != 1.0:
            torch.mul(grad, factor, out=view)
        else:
            view.copy_(grad)
        del grad  # it would count as a reference
        if p.grad is not None:
            self._lend(at)
            self._taken[at] = taken(p.grad)

    def fill(self, changed: bool) -> Tensor:
        """Copy the other gradients in, scaled; return the buffer to reduce.

        `changed` is the value of the layout's flag element, if it has one.
        """
        factor = self._factors.prescale
        if self.layout.in_place:
            self._fill_in_place(factor)
            self._taken = [taken(self.params[0].grad)]
            return self.flat
        n = self.first_large
        for at in range(n, len(self.params)):
            if self._taken[at] is None:
                self.copy(at)
        # Small gradients are copied by one call; missing ones count as zeros.
        grads = [p.grad for p in self.params]
        self._taken = [was or taken(grad) for was, grad in zip(self._taken, grads, strict=True)]
        small = self.flat[: sum(p.numel() for p in self.params[:n])]
        into, out = self.views[:n], grads[:n]
        if any(g is None or g.is_sparse or g.requires_grad for g in out):
            small.zero_()
            pairs = [(v, dense(g)) for v, g in zip(into, out, strict=True) if g is not None]
            into, out = [v for v, _ in pairs], [g for _, g in pairs]
        if out:
            copy_all_(into, out)  # type: ignore[arg-type]
        if n and factor != 1.0:
            small.mul_(factor)
        if self.layout.flag:
            self.flat[-1] = float(changed)
        return self.flat

    def _fill_in_place(self, factor: float) -> None:
        """Make the only gradient, times `factor`, the buffer; a copy if it is not contiguous."""
        (p,) = self.params
        grad = dense(p.grad)
        if grad is None:
            grad = p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
        # `data`: the reduction must not count as a change of the gradient.
        self.flat = grad.contiguous().data.view(-1)
        self.views = [self.flat.view(p.shape)]
        if factor != 1.0:
            self.flat.mul_(factor)

    def find_changed(self) -> list[str]:
        """Return the parameters whose gradients were written to or replaced after they were taken.

        The buffer may hold such a change on this rank alone, or in part. Forgets what was taken.
        """
        rows = zip(self.layout.names, self.params, self._taken, strict=True)
        changed = [name for name, p, was in rows if was and has_changed(p.grad, was)]
        self._taken = [None] * len(self.params)
        return changed

    def install(self) -> None:
        """Make the reduced buffer, scaled, the values of the parameters' gradients."""
        if self._factors.postscale != 1.0:
            self.flat.mul_(self._factors.postscale)
        if not self.layout.in_place:
            for at in range(self.first_large, len(self.params)):
                self._lend(at)
        write_gradients(self.params, self.views)

    def _lend(self, at: int) -> None:
        """Make `p.grad` a part of the buffer, if that is allowed and nobody can notice."""
        p = self.params[at]
        private = p.grad is None or (not p.grad.is_sparse and has_private_gradient(p))
        if private and self._may_lend[at]:
            part = part_of_storage(self.flat, self.views[at])
            self._lent[at] = StorageReference(part.untyped_storage())
            p.grad = part
