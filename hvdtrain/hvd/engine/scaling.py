"""Factors before and after a reduction, by Horovod's rules; and how uint64 is reduced."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.hvd.engine.request import MAX, MIN

_SIGN = -(1 << 63)
_LARGEST = float((1 << 64) - 2048)  # the largest uint64 that is a double


def from_uint64(t: Tensor, op: int, factor: float) -> Tensor:
    """Return uint64 elements as what a transport can reduce so that `to_uint64` gives the result.

    Minimum and maximum compare int64s whose sign bit is flipped, which keeps the order. Sums that
    are scaled, as a mean is, are of doubles, as scaled integers are anyway; others wrap around.
    """
    if op in (MIN, MAX):
        return t.view(torch.int64) ^ _SIGN
    return t.double() if factor != 1.0 else t.view(torch.int64)


def to_uint64(wire: Tensor, op: int, factor: float) -> Tensor:
    """Undo `from_uint64` after the reduction, and multiply by the factor."""
    if op in (MIN, MAX):
        return scale_((wire ^ _SIGN).view(torch.uint64), factor)
    if wire.dtype == torch.float64:
        return wire.mul_(factor).clamp_(0, _LARGEST).to(torch.uint64)
    return wire.view(torch.uint64)


def scale_(t: Tensor, factor: float) -> Tensor:
    """Multiply in place. Integers are multiplied in double precision and truncated toward zero,
    half precision in single.
    """
    if factor == 1.0:
        return t
    if t.dtype.is_complex or (t.dtype.is_floating_point and t.dtype.itemsize >= 4):
        return t.mul_(factor)
    if t.dtype.is_floating_point:
        return t.copy_(t.float().mul_(factor))
    return t.copy_(t.double().mul_(factor).trunc_())
