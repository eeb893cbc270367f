"""Eager operations: small data travels with its request, and rank 0 combines it in rank order.

The engine packs and unpacks it, the coordinator combines it. All ranks compute from the request
alone whether it is small enough, so they agree without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from hvdtrain.hvd.engine.request import (
    ADASUM,
    AVERAGE,
    INLINE_BYTES,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Meta,
    dtype_of,
)
from hvdtrain.hvd.engine.scaling import from_uint64, scale_, to_uint64

_REDUCE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    AVERAGE: torch.add,  # `combine` divides at the end
    SUM: torch.add,
    MIN: torch.minimum,
    MAX: torch.maximum,
    PRODUCT: torch.mul,
}

_UNSIGNED = (torch.uint16, torch.uint32)  # torch cannot add them


def fits(meta: Meta, num_ranks: int) -> bool:
    """Return whether the data of this request travels with it. The same result on every rank."""
    # With more than 256 ranks, too much data would arrive at rank 0.
    if meta.device != "CPU" or num_ranks * 1024 > 16 * INLINE_BYTES:
        return False
    return meta.kind == "allreduce" and meta.op != ADASUM and meta.num_bytes <= INLINE_BYTES


def pack(tensors: list[Tensor]) -> bytes:
    """Return the bytes of contiguous CPU tensors, concatenated."""
    return b"".join(_bytes_of(t) for t in tensors)


def unpack(payload: bytes, meta: Meta) -> list[Tensor]:
    """Return tensors of the request's shapes and dtypes, as views of one new buffer."""
    buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
    tensors, at = [], 0
    for name, shape in zip(meta.dtypes, meta.shapes, strict=True):
        dtype = dtype_of(name)
        size = prod(shape) * dtype.itemsize
        if size == 0 or buffer is None:
            tensors.append(torch.zeros(shape, dtype=dtype))
            continue
        piece = buffer[at : at + size]
        if at % dtype.itemsize:
            piece = piece.clone()  # a view needs its dtype's alignment
        tensors.append(piece.view(dtype).view(shape))
        at += size
    return tensors


def combine(meta: Meta, payloads: list[bytes], num_ranks: int) -> bytes:
    """Reduce the ranks' payloads, and scale the result.

    Half precision is summed in single precision and rounded once.
    """
    factor = meta.postscale / (num_ranks if meta.op == AVERAGE else 1)
    reduce = _REDUCE[meta.op]
    total: list[Tensor] = []
    for payload in payloads:
        tensors = [_widen(t, meta.op, factor) for t in unpack(payload, meta)]
        total = (
            tensors if not total else [reduce(a, b) for a, b in zip(total, tensors, strict=True)]
        )
    scaled = []
    for t, dtype in zip(total, map(dtype_of, meta.dtypes), strict=True):
        if dtype == torch.uint64:
            t = to_uint64(t, meta.op, factor)
        else:
            t = scale_(t.half() if meta.data and dtype == torch.float16 else t, factor)
        scaled.append(t.to(dtype))
    return pack(scaled)


def _widen(t: Tensor, op: int, factor: float) -> Tensor:
    if t.dtype == torch.uint64:
        return from_uint64(t, op, factor)
    if t.dtype.is_floating_point and t.dtype.itemsize < 4:
        return t.float()
    if t.dtype.itemsize < 4 and t.dtype != torch.bool:
        return t.int()
    return t.long() if t.dtype in _UNSIGNED else t


def _bytes_of(t: Tensor) -> bytes:
    if t.numel() == 0:
        return b""
    return t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
