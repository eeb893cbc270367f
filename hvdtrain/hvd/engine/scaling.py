"""Factors before and after a reduction, by Horovod's rules."""

from __future__ import annotations

from torch import Tensor


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
