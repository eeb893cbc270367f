"""The operations on tensors, on one process group. Collective: all members call, in one order.

The executor runs them. Data that is only moved is moved as bytes, so every dtype works; dtypes that
Gloo cannot add up are added up in a wider one (`arithmetic`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hvdtrain._torch.copies import copy_all_
from hvdtrain.hvd.engine import adasum
from hvdtrain.hvd.engine.arithmetic import NOT_IN_NCCL, narrow, scale_, widen
from hvdtrain.hvd.engine.operation import Operation
from hvdtrain.hvd.engine.process_groups import all_reduce, broadcast, reduces_in_float32
from hvdtrain.hvd.engine.request import ADASUM, AVERAGE, Request, dtype_of
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.transports.transport import as_bytes, flatten


@dataclass
class Batch:
    """Operations of one kind that run together. On a rank that has joined, operations are None."""

    group: Any
    members: list[int]
    rank: int
    operations: list[Operation | None]
    requests: list[Any]
    extras: list[Any]
    wait: Callable[[Any], None]

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return len(self.members)

    def alone(self) -> tuple[Operation, Any]:
        """Return the only operation of a batch that is never fused, and its `extra`."""
        operation = self.operations[0]
        assert operation is not None  # `validation` refuses these kinds once a rank has joined
        return operation, self.extras[0]


def run_allreduce(batch: Batch) -> None:
    """Reduce all tensors of the batch, those of one dtype as one flat tensor."""
    request = batch.requests[0]
    device = torch.device("cpu")
    if request.device != "CPU":
        device = torch.device("cuda", torch.cuda.current_device())
    inputs: list[Tensor] = []
    for operation, m in zip(batch.operations, batch.requests, strict=True):
        if operation is None:  # this rank has joined, and contributes zeros
            tensors = zip(m.shapes, m.dtypes, strict=True)
            inputs += [torch.zeros(s, dtype=dtype_of(d), device=device) for s, d in tensors]
        else:
            inputs += operation.inputs
    reduced = _reduce(batch, inputs, request)
    at = 0
    for operation in batch.operations:
        if operation is None:
            continue
        results = reduced[at : at + len(operation.inputs)]
        at += len(operation.inputs)
        _finish(operation, results)


def _reduce(batch: Batch, inputs: list[Tensor], request: Request) -> list[Tensor]:
    """Return the reduced and scaled tensors in new memory, in the order of the inputs."""
    op, factor = request.op, request.postscale / (batch.size if request.op == AVERAGE else 1)
    results: list[Tensor] = [torch.empty(0, device="cpu")] * len(inputs)
    for dtype in dict.fromkeys(t.dtype for t in inputs):
        indices = [i for i, t in enumerate(inputs) if t.dtype == dtype]
        flat = torch.cat([inputs[i].detach().reshape(-1) for i in indices])
        scale_(flat, request.prescale)
        # A complex sum is the sum of its real and imaginary parts.
        wire = torch.view_as_real(flat).reshape(-1) if dtype.is_complex else flat
        plain = wire.dtype
        if request.device == "CPU" or dtype in NOT_IN_NCCL:
            wire = widen(wire, op, factor, reduces_in_float32(batch.group))
        sizes = [inputs[i].numel() for i in indices]
        if op == ADASUM:
            adasum.reduce_(wire, sizes, batch)
        elif wire.numel():
            batch.wait(all_reduce(batch.group, wire, op))
        wire = narrow(wire, plain, op, factor, bool(request.data))
        if dtype.is_complex:
            wire = torch.view_as_complex(wire.reshape(-1, 2))
        pieces = torch.split(wire, sizes)
        for i, piece in zip(indices, pieces, strict=True):
            results[i] = piece.view(inputs[i].shape)
    return results


def deliver(operation: Operation, results: list[Tensor]) -> list[Tensor]:
    """Return the results, copied to the caller's outputs if there are any."""
    if operation.outputs is None:
        # A view of a shared buffer would keep the whole buffer alive.
        return results if len(results) == 1 and _whole(results[0]) else [t.clone() for t in results]
    with torch.no_grad():
        for out, t in zip(operation.outputs, results, strict=True):
            if out.is_inference():  # such a tensor can be written in inference mode only
                with torch.inference_mode():
                    out.copy_(t.view(out.shape))
            else:
                out.copy_(t.view(out.shape))
    return operation.outputs


def deliver_all(operations: list[Operation], results: list[list[Tensor]]) -> None:
    """Deliver the results of several operations, with one copy for all tensors if that works."""
    into = [out for op in operations for out in op.outputs or ()]
    pairs = zip(operations, results, strict=True)
    out = [t for op, found in pairs if op.outputs is not None for t in found]
    if len(operations) > 1:
        # Else each alone: one may be read-only, or of inference mode.
        with suppress(RuntimeError), torch.no_grad():
            copy_all_(into, out)
            for op in operations:
                if op.outputs is not None:
                    op.finish(op.outputs)
    for op, found in zip(operations, results, strict=True):
        if not op.done():
            _finish(op, found)


def _finish(operation: Operation, results: list[Tensor]) -> None:
    """Deliver the results, or fail this operation alone: no peer waits for this rank any more."""
    try:
        operation.finish(deliver(operation, results))
    except Exception as error:
        operation.fail(HorovodInternalError(str(error)))


def _whole(t: Tensor) -> bool:
    return t.untyped_storage().nbytes() == t.nbytes


def run_broadcast(batch: Batch) -> None:
    """Broadcast all tensors of the batch as one sequence of bytes."""
    root = batch.members.index(batch.requests[0].root)
    operations = [op for op in batch.operations if op is not None]
    tensors = [t for op in operations for t in op.inputs]
    outputs = operations[0].outputs if len(tensors) == 1 else None
    # A single output that is the input's memory is broadcast in place; everything else goes through
    # a flat copy.
    in_place = outputs is not None and outputs[0].data_ptr() == tensors[0].data_ptr()
    flats = [as_bytes(flatten(t)) for t in tensors]
    flat = flats[0] if in_place else torch.cat(flats)
    if flat.numel():
        batch.wait(broadcast(batch.group, flat, root))
    if outputs is not None and in_place:
        if not outputs[0].is_inference():
            increment_version(outputs[0])  # not every transport writes through torch
        operations[0].finish(outputs)
        return
    at = 0
    for operation in operations:
        results = []
        for t in operation.inputs:
            results.append(from_bytes(flat[at : at + t.nbytes], t.dtype, list(t.shape)))
            at += t.nbytes
        _finish(operation, results)


def run_allgather(batch: Batch) -> None:
    """Concatenate along the first dimension, which may differ between ranks."""
    operation, extra = batch.alone()
    operation.extra = extra
    pairs = zip(operation.inputs, extra, strict=True)
    operation.finish([_gather(batch, t, rows) for t, rows in pairs])


def _gather(batch: Batch, t: Tensor, rows: list[int]) -> Tensor:
    row_bytes = _row_bytes(t)
    out = torch.empty(sum(rows) * row_bytes, dtype=torch.uint8, device=t.device)
    pieces = list(torch.split(out, [n * row_bytes for n in rows]))
    mine = as_bytes(flatten(t))
    if len(set(rows)) == 1:
        if out.numel():
            batch.wait(batch.group._allgather_base(out, mine))
    else:  # an all-gather needs equal sizes, so each member broadcasts its rows
        works = []
        for root, piece in enumerate(pieces):
            if root == batch.members.index(batch.rank):
                piece.copy_(mine)
            if piece.numel():
                works.append(broadcast(batch.group, piece, root))
        for work in works:
            batch.wait(work)
    return from_bytes(out, t.dtype, [sum(rows), *t.shape[1:]])


def run_alltoall(batch: Batch) -> None:
    """Send each member its rows. The result: the received rows, and their number per member."""
    operation, splits = batch.alone()
    t = operation.inputs[0]
    me = batch.members.index(batch.rank)
    received = [row[me] for row in splits]
    row_bytes = _row_bytes(t)
    out = torch.empty(sum(received) * row_bytes, dtype=torch.uint8, device=t.device)
    # The splits may cover fewer rows than `t`.
    data = as_bytes(flatten(t))[: sum(splits[me]) * row_bytes]
    batch.wait(
        batch.group.alltoall_base(
            out, data, [n * row_bytes for n in received], [n * row_bytes for n in splits[me]]
        )
    )
    result = from_bytes(out, t.dtype, [sum(received), *t.shape[1:]])
    operation.extra = received
    operation.finish((result, torch.tensor(received, dtype=torch.int32, device="cpu")))


def run_reducescatter(batch: Batch) -> None:
    """Reduce, and keep this rank's rows. Gloo's own reduce-scatter moves no fewer bytes."""
    operation, _ = batch.alone()
    reduced = _reduce(batch, operation.inputs, operation.request)
    me = batch.members.index(batch.rank)
    results = []
    for t in reduced:
        begin, rows = share(t.shape[0], batch.size, me)
        results.append(t[begin : begin + rows].clone())
    _finish(operation, results)


def share(rows: int, size: int, rank: int) -> tuple[int, int]:
    """Return the first row of a rank's share, and its number of rows: the first ranks get more."""
    each, left = divmod(rows, size)
    return rank * each + min(rank, left), each + (rank < left)


RUN = {
    "allreduce": run_allreduce,
    "broadcast": run_broadcast,
    "allgather": run_allgather,
    "alltoall": run_alltoall,
    "reducescatter": run_reducescatter,
}


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return bytes viewed as a tensor of this dtype and shape; a copy if they are not aligned."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)


def _row_bytes(t: Tensor) -> int:
    return t.element_size() * prod(t.shape[1:])
