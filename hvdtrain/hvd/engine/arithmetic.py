"""The arithmetic of reductions: wider dtypes while adding up, and scaling, by Horovod's rules.

Used by `batch`. Transports and torch cannot reduce uint64, so it is reduced as
int64 or double. 16-bit floats are reduced in float32, and rounded once, at the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hvdtrain.hvd.engine.operation import ADASUM, MAX, MIN, dtype_of

_SIGN = -(1 << 63)
_LARGEST = float((1 << 64) - 2048)  # the largest uint64 that a double can represent
_WIDER = {
    torch.bool: torch.int32,
    torch.float16: torch.float32,  # no slower than float16 in Gloo, despite twice the bytes
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,  # the sum for a mean of large numbers must not overflow
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    **{dtype_of(name): torch.float32 for name in dir(torch) if name.startswith("float8_")},
}


NOT_IN_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that are widened for NCCL, too. It reduces the others as they are, and so does Horovod."""


def widen(t: Tensor, op: int, factor: float, by_float32: bool = False) -> Tensor:
    """Return real elements in a dtype that can be reduced; `narrow` converts the result back.

    `by_float32`: the transport reduces 16-bit floats in float32 itself, and rounds the result.
    bfloat16 then stays as it is, which is half the bytes, unless `factor` would round it again.
    float16 does not, since a sum may overflow where the mean does not.
    For the minimum and maximum of uint64 that is int64 with the sign bit flipped, which keeps the
    order. Scaled results of uint64, e.g. a mean, use double, as all scaled integers do; others use
    int64, and wrap around.
    """
    if t.dtype == torch.bfloat16 and by_float32 and op != ADASUM and _is_power_of_two(factor):
        return t
    if t.dtype != torch.uint64:
        return t.to(_WIDER.get(t.dtype, t.dtype))
    if op in (MIN, MAX):
        return t.view(torch.int64) ^ _SIGN
    return t.double() if factor != 1.0 else t.view(torch.int64)


def narrow(t: Tensor, dtype: torch.dtype, op: int, factor: float, rounds_first: bool) -> Tensor:
    """Multiply the result of a reduction by `factor`, and return it in the dtype that it had.

    `rounds_first`: round float16 before it is multiplied, as Horovod does.
    """
    if dtype == torch.uint64:
        if op in (MIN, MAX):
            return scale_((t ^ _SIGN).view(dtype), factor)
        if t.dtype == torch.float64:
            return t.mul_(factor).clamp_(0, _LARGEST).to(dtype)
        return t.view(dtype)
    return scale_(t.half() if rounds_first and dtype == torch.float16 else t, factor).to(dtype)


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


def _is_power_of_two(factor: float) -> bool:
    return abs(math.frexp(factor)[0]) == 0.5
