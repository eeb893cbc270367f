"""Eager operations: small data travels with its request, and rank 0 combines it in rank order.

The engine packs and unpacks it, the coordinator combines it. All ranks compute from the request
alone whether it is small enough, so they agree without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

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

_IN_NUMPY = {torch.float32, torch.float64, torch.float16, torch.int32, torch.int64}
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
    return b"".join([_bytes(t) for t in tensors])


def _bytes(t: Tensor) -> bytes:
    if t.dtype in _IN_NUMPY:  # twice as fast
        return t.numpy().tobytes()
    return as_bytes(flatten(t)).numpy().tobytes()


def unpack(payload: bytes, requests: list[Request]) -> list[list[Tensor]]:
    """Return tensors of each request's shapes and dtypes, as views of one new buffer.

    Zeros for an empty payload.
    """
    dtypes = [dtype_of(name) for request in requests for name in request.dtypes]
    shapes = [shape for request in requests for shape in request.shapes]
    if not payload:
        pairs = zip(shapes, dtypes, strict=True)
        tensors = [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in pairs]
    else:
        buffer = bytearray(payload)
        if len(set(dtypes)) == 1:
            pieces = torch.split(torch.frombuffer(buffer, dtype=dtypes[0]), list(map(prod, shapes)))
        else:
            sizes = [prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
            several = torch.split(torch.frombuffer(buffer, dtype=torch.uint8), sizes)
            pieces = tuple(from_bytes(p, d, (-1,)) for p, d in zip(several, dtypes, strict=True))
        tensors = [
            piece if len(shape) == 1 else piece.view(shape)
            for piece, shape in zip(pieces, shapes, strict=True)
        ]
    found = iter(tensors)
    return [[next(found) for _ in request.dtypes] for request in requests]


@dataclass
class Eager:
    """An operation that all ranks have submitted, with each rank's data; b"" counts as zeros."""

    request: Request
    payloads: list[bytes]
    num_ranks: int


def combine(operations: list[Eager]) -> bytes:
    """Reduce the ranks' data of each operation, and scale the results; return their bytes,
    concatenated.

    Operations that are computed alike are computed as one. 16-bit floats are reduced in float32 and
    rounded once.
    """
    alike: dict[Any, list[int]] = {}
    for at, operation in enumerate(operations):
        dtypes, request = set(operation.request.dtypes), operation.request
        has_data = tuple(map(bool, operation.payloads))
        how = (*dtypes, request.op, request.postscale, request.data, operation.num_ranks, *has_data)
        alike.setdefault(how if len(dtypes) == 1 else at, []).append(at)
    results = [b""] * len(operations)
    for group in alike.values():
        one = operations[group[0]].request
        if len(group) > 1:
            numel = sum(prod(s) for at in group for s in operations[at].request.shapes)
            one = one._replace(dtypes=one.dtypes[:1], shapes=((numel,),))
        joined = [
            b"".join([operations[at].payloads[rank] for at in group])
            for rank in range(len(operations[group[0]].payloads))
        ]
        whole, end = _combine(one, joined, operations[group[0]].num_ranks), 0
        for at in group:
            begin, end = end, end + operations[at].request.num_bytes
            results[at] = whole[begin:end]
    return b"".join(results)


def _combine(request: Request, payloads: list[bytes], num_ranks: int) -> bytes:
    factor = request.postscale / (num_ranks if request.op == AVERAGE else 1)
    reduce = _REDUCE[request.op]
    total: list[Tensor] = []
    for payload in payloads:
        (given,) = unpack(payload, [request])
        tensors = [widen(t, request.op, factor) for t in given]
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
