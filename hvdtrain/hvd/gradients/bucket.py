"""Bucket: the buffer in which the gradients of some parameters are reduced together on this rank.

Used by `Reducer`: it fills the bucket, all-reduces the buffer, and installs the result.

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
from hvdtrain.hvd.gradients.gradient import Gradient, dense, write_gradients
from hvdtrain.hvd.gradients.plan import SMALL_NUMEL, BucketLayout, BucketPlan


class Bucket:
    """The parameters of one layout on this rank, and the buffer that their gradients share."""

    def __init__(
        self,
        layout: BucketLayout,
        gradients: list[Gradient],
        plan: BucketPlan,
        channel: BucketChannel,
        factors: tuple[float, float],
    ) -> None:
        self.layout = layout
        self.gradients = gradients
        self.sent: Any = None
        self.pending = len(gradients)
        self._prescale, self._postscale = factors
        in_place = layout.in_place
        self._strides = [None if in_place else plan.gradients[g.name].stride for g in gradients]
        for g in gradients:
            g.bucket = self
            g.is_large = g.param.numel() >= SMALL_NUMEL and not in_place
            g.may_be_lent = layout.dtype == g.param.dtype and not in_place
        self._small = [g for g in gradients if not g.is_large]
        self._large = [g for g in gradients if g.is_large]
        if not in_place:
            device = gradients[0].param.device if gradients else torch.device("cpu")
            self._allocate = partial(channel.buffer, layout, device)
            self._use(self._allocate())

    def _use(self, flat: Tensor) -> None:
        """Make `flat` the buffer."""
        self.flat = flat
        end = self.layout.numel - self.layout.flag
        pieces = torch.split(flat[:end], [g.param.numel() for g in self.gradients])
        for g, piece, stride in zip(self.gradients, pieces, self._strides, strict=True):
            shape = g.param.shape
            g.view = piece.view(shape) if stride is None else piece.as_strided(shape, stride)
            g.lent = None

    def copy(self, g: Gradient) -> None:
        """Copy one gradient in, scaled; lend its part, so that its own memory is free."""
        grad, factor = dense(g.param.grad), self._prescale
        if g.lent and (
            grad is None or grad.data_ptr() != g.view.data_ptr() or grad.stride() != g.view.stride()
        ):
            # Another holder than `p.grad` has the part: it is that holder's, and never lent again.
            g.may_be_lent = False
            self._use(self._allocate().copy_(self.flat))
        if grad is None:
            g.view.zero_()
        elif factor != 1.0:
            torch.mul(grad, factor, out=g.view)
        else:
            g.view.copy_(grad)
        del grad  # it would count as a reference
        if g.param.grad is not None:
            self._lend(g)
        g.take()

    def fill(self, changed: bool) -> Tensor:
        """Copy the other gradients in, scaled; return the buffer to reduce.

        `changed` is the value of the layout's flag element, if it has one.
        """
        if self.layout.in_place:
            self._fill_in_place()
        else:
            for g in self._large:
                if g.taken is None:
                    self.copy(g)
            if self._small:
                self._fill_small()
        for g in self._small:
            g.take()
        if self.layout.flag:
            self.flat[-1] = float(changed)
        return self.flat

    def _fill_small(self) -> None:
        """Copy the small gradients by one call; missing ones count as zeros."""
        small = self.flat[: sum(g.param.numel() for g in self._small)]
        into, out = [g.view for g in self._small], [g.param.grad for g in self._small]
        if any(grad is None or grad.is_sparse or grad.requires_grad for grad in out):
            small.zero_()
            pairs = [(v, dense(g)) for v, g in zip(into, out, strict=True) if g is not None]
            into, out = [v for v, _ in pairs], [g for _, g in pairs]
        if out:
            copy_all_(into, out)  # type: ignore[arg-type]
        if self._prescale != 1.0:
            small.mul_(self._prescale)

    def _fill_in_place(self) -> None:
        """Make the only gradient, scaled, the buffer; a copy if it is not contiguous."""
        (g,) = self.gradients
        grad = dense(g.param.grad)
        if grad is None:
            grad = torch.zeros_like(g.param, memory_format=torch.contiguous_format)
            g.param.grad = grad
        # `data`: the reduction must not count as a change of the gradient.
        self._use(grad.contiguous().data.view(-1))
        if self._prescale != 1.0:
            self.flat.mul_(self._prescale)

    def install(self) -> None:
        """Make the reduced buffer, scaled, the values of the parameters' gradients."""
        if self._postscale != 1.0:
            self.flat.mul_(self._postscale)
        for g in self._large:
            g.taken = None  # it would count as a reference
            self._lend(g)
        write_gradients([g.param for g in self.gradients], [g.view for g in self.gradients])

    def _lend(self, g: Gradient) -> None:
        """Make `p.grad` a part of the buffer, if that is allowed and nobody can notice."""
        p = g.param
        private = p.grad is None or (not p.grad.is_sparse and has_private_gradient(p))
        if private and g.may_be_lent:
            part = part_of_storage(self.flat, g.view)
            g.lent = StorageReference(part.untyped_storage())
            p.grad = part
