"""Eager operations: small data travels with its request, and rank 0 combines it in rank order.

The engine packs and unpacks it, the coordinator combines it. All ranks compute from the request
alone whether it is small enough, so they agree without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from hvdtrain.hvd.engine.arithmetic import narrow, widen
from hvdtrain.hvd.engine.collectives import from_bytes
from hvdtrain.hvd.engine.request import (
    ADASUM,
    AVERAGE,
    EAGER_BYTES,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Request,
    dtype_of,
)
from hvdtrain.transports.transport import as_bytes, flatten

_REDUCE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    AVERAGE: torch.add,  # `combine` divides at the end
    SUM: torch.add,
    MIN: torch.minimum,
    MAX: torch.maximum,
    PRODUCT: torch.mul,
}


def fits(request: Request, num_ranks: int) -> bool:
    """Return whether the data of this request travels with it. The same result on every rank."""
    # With more than 256 ranks, too much data would arrive at rank 0.
    if request.device != "CPU" or num_ranks * 1024 > 16 * EAGER_BYTES:
        return False
    return request.kind == "allreduce" and request.op != ADASUM and request.num_bytes <= EAGER_BYTES


def pack(tensors: list[Tensor]) -> bytes:
    """Return the bytes of contiguous CPU tensors, concatenated."""
    return b"".join(as_bytes(flatten(t)).numpy().tobytes() for t in tensors)


def unpack(payload: bytes, request: Request) -> list[Tensor]:
    """Return tensors of the request's shapes and dtypes, as views of one new buffer.

    Zeros for an empty payload.
    """
    tensors = list(zip(map(dtype_of, request.dtypes), request.shapes, strict=True))
    if not payload:
        return [torch.zeros(shape, dtype=dtype, device="cpu") for dtype, shape in tensors]
    buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    pieces = torch.split(buffer, [prod(shape) * dtype.itemsize for dtype, shape in tensors])
    return [from_bytes(piece, *kind) for piece, kind in zip(pieces, tensors, strict=True)]


def combine(request: Request, payloads: list[bytes], num_ranks: int) -> bytes:
    """Reduce the ranks' payloads, and scale the result.

    16-bit floats are reduced in float32 and rounded once.
    """
    factor = request.postscale / (num_ranks if request.op == AVERAGE else 1)
    reduce = _REDUCE[request.op]
    total: list[Tensor] = []
    for payload in payloads:
        tensors = [widen(t, request.op, factor) for t in unpack(payload, request)]
        total = (
            tensors if not total else [reduce(a, b) for a, b in zip(total, tensors, strict=True)]
        )
    dtypes = map(dtype_of, request.dtypes)
    return pack(
        [
            narrow(t, dtype, request.op, factor, bool(request.data))
            for t, dtype in zip(total, dtypes, strict=True)
        ]
    )
