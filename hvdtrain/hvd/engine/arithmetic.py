"""Scaling before and after a reduction, by Horovod's rules, and the reduction of uint64.

Used by `collectives` and `inline`. Transports and torch cannot reduce uint64, so it is reduced as
int64 or double.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.hvd.engine.request import MAX, MIN

_SIGN = -(1 << 63)
_LARGEST = float((1 << 64) - 2048)  # the largest uint64 that a double can represent


def from_uint64(t: Tensor, op: int, factor: float) -> Tensor:
    """Return uint64 elements in a dtype that can be reduced; `to_uint64` converts the result.

    For minimum and maximum it is int64 with the sign bit flipped, which keeps the order. Scaled
    results, e.g. a mean, use double, as all scaled integers do; others use int64, and wrap around.
    """
    if op in (MIN, MAX):
        return t.view(torch.int64) ^ _SIGN
    return t.double() if factor != 1.0 else t.view(torch.int64)


def to_uint64(wire: Tensor, op: int, factor: float) -> Tensor:
    """Convert the result of a reduction back from `from_uint64`, and multiply it by the factor."""
    if op in (MIN, MAX):
        return scale_((wire ^ _SIGN).view(torch.uint64), factor)
    if wire.dtype == torch.float64:
        return wire.mul_(factor).clamp_(0, _LARGEST).to(torch.uint64)
    return wire.view(torch.uint64)


def scale_(t: Tensor, factor: float) -> Tensor:
    """Multiply in place.

    Integers are multiplied in double precision and truncated toward zero, half precision in single.
    """
    if factor == 1.0:
        return t
    if t.dtype.is_complex or (t.dtype.is_floating_point and t.dtype.itemsize >= 4):
        return t.mul_(factor)
    if t.dtype.is_floating_point:
        return t.copy_(t.float().mul_(factor))
    return t.copy_(t.double().mul_(factor).trunc_())
