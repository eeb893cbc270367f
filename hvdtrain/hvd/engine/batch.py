"""Batch: operations that run together, as one flat tensor: copy in, reduce, copy out.

`copy_in` and `copy_out` are the same for all; what happens in between differs: the executor runs a
collective on a process group (`RUN`), rank 0's coordinator adds up small data (`combine`). All
members run the same batches in one order. Data that is only moved is moved as bytes, so every dtype
works; dtypes that Gloo cannot add up are added up in a wider one (`arithmetic`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hvdtrain._torch.copies import copy_all_
from hvdtrain.hvd.engine import adasum
from hvdtrain.hvd.engine.arithmetic import NOT_IN_NCCL, narrow, scale_, widen
from hvdtrain.hvd.engine.operation import (
    ADASUM,
    AVERAGE,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Operation,
    Request,
    dtype_of,
    finish_all,
)
from hvdtrain.hvd.engine.process_groups import all_reduce, broadcast
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.transports.process_group import TransportGroup
from hvdtrain.transports.transport import as_bytes, flatten

_REDUCE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    AVERAGE: torch.add,  # `narrow` divides at the end
    SUM: torch.add,
    MIN: torch.minimum,
    MAX: torch.maximum,
    PRODUCT: torch.mul,
}


@dataclass
class Batch:
    """Operations of one kind that run together, and what they run on."""

    group: Any
    members: list[int]
    me: int
    """This rank's index among the members."""
    operations: list[Operation]
    extras: list[Any]
    wait: Callable[[Any], None]

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return len(self.members)

    def exchange(self, partner: int, sent: Tensor, received: Tensor) -> None:
        """Swap bytes with one other member, while all others do so in pairs."""
        # Not send and recv: Gloo aborts all pending ones when a timed wait for one expires.
        split = [sent.numel() if rank == partner else 0 for rank in range(self.size)]
        self.wait(self.group.alltoall_base(received, sent, split, split))


def copy_in(tensors: Sequence[Tensor], prescale: float = 1.0) -> Tensor:
    """Return the elements of tensors of one dtype in one new tensor, scaled."""
    with torch.no_grad():
        flat = torch.cat([t if t.dim() == 1 else t.reshape(-1) for t in tensors])
        return scale_(flat, prescale)


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor with the shapes of these, one after another."""
    pieces = torch.split(flat, [t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def finish_batch(operations: Sequence[Operation], results: Sequence[Tensor]) -> None:
    """Finish operations with these results: copied to their outputs by one call for all if all have
    some, else each alone, since one may be read-only, or of inference mode.
    """
    outputs = [op.outputs for op in operations]
    if all(outputs):
        with suppress(RuntimeError), torch.no_grad():
            copy_all_([*chain.from_iterable(outputs)], results)  # type: ignore[arg-type]
            finish_all(operations, outputs)
            return
    left = iter(results)
    for op in operations:
        _finish_alone(op, [next(left) for _ in op.inputs])


def _finish_alone(operation: Operation, results: list[Tensor]) -> None:
    """Finish with results in the operation's outputs, or in new tensors, since a view of a shared
    buffer would keep the whole buffer alive. If that fails, fail this operation alone: no peer
    waits for this rank any more.
    """
    whole = len(results) == 1 and results[0].untyped_storage().nbytes() == results[0].nbytes
    try:
        for out, t in zip(operation.outputs or (), results, strict=False):
            # A tensor of inference mode can be written in that mode only.
            with torch.inference_mode(out.is_inference()), torch.no_grad():
                out.copy_(t)
        operation.finish(operation.outputs or (results if whole else [t.clone() for t in results]))
    except Exception as error:
        operation.fail(HorovodInternalError(str(error)))


# Small data, on rank 0


def combine(request: Request, data: Sequence[Tensor | None], num_ranks: int) -> Tensor:
    """Return the reduction of the ranks' flat tensors, in rank order, and scaled; None counts as
    zeros. 16-bit floats are reduced in float32 and rounded once. `request` is of one of the
    operations that are reduced alike.
    """
    factor = request.postscale / (num_ranks if request.op == AVERAGE else 1)
    first = next(t for t in data if t is not None)
    total: Tensor | None = None
    for flat in data:
        part = widen(torch.zeros_like(first) if flat is None else flat, request.op, factor)
        total = part if total is None else _REDUCE[request.op](total, part)
    assert total is not None
    return narrow(total, first.dtype, request.op, factor, bool(request.data))


def to_bytes(flat: Tensor) -> bytes:
    """Return the bytes of a flat CPU tensor."""
    return flat.view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of these bytes, in memory of its own."""
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


# Collectives, in the executor


def run_allreduce(batch: Batch) -> None:
    """Reduce all tensors of the batch, those of one dtype as one flat tensor."""
    finish_batch(batch.operations, _reduce(batch))


def give_zeros(operation: Operation) -> None:
    """Make zeros the tensors of an operation of a rank that has joined: nobody waits for it."""
    request = operation.request
    device = "cpu" if request.device == "CPU" else f"cuda:{torch.cuda.current_device()}"
    pairs = zip(request.shapes, request.dtypes, strict=True)
    zeros = [torch.zeros(shape, dtype=dtype_of(name), device=device) for shape, name in pairs]
    operation.inputs = operation.outputs = zeros


def _reduce(batch: Batch) -> list[Tensor]:
    """Return the reduced and scaled tensors, in the order of the operations."""
    inputs = [t for op in batch.operations for t in op.inputs]
    request = batch.operations[0].request
    op, factor = request.op, request.postscale / (batch.size if request.op == AVERAGE else 1)
    results: list[Tensor] = [torch.empty(0, device="cpu")] * len(inputs)
    for dtype in dict.fromkeys(t.dtype for t in inputs):
        indices = [i for i, t in enumerate(inputs) if t.dtype == dtype]
        flat = copy_in([inputs[i] for i in indices], request.prescale)
        # A complex sum is the sum of its real and imaginary parts.
        wire = torch.view_as_real(flat).reshape(-1) if dtype.is_complex else flat
        plain = wire.dtype
        if request.device == "CPU" or dtype in NOT_IN_NCCL:
            wire = widen(wire, op, factor, isinstance(batch.group, TransportGroup))
        sizes = [inputs[i].numel() for i in indices]
        if op == ADASUM:
            adasum.reduce_(wire, sizes, batch.me, batch.size, batch.exchange)
        elif wire.numel():
            batch.wait(all_reduce(batch.group, wire, op))
        wire = narrow(wire, plain, op, factor, bool(request.data))
        if dtype.is_complex:
            wire = torch.view_as_complex(wire.reshape(-1, 2))
        for i, piece in zip(indices, torch.split(wire, sizes), strict=True):
            results[i] = piece.view(inputs[i].shape)
    return results


def run_broadcast(batch: Batch) -> None:
    """Broadcast all tensors of the batch as one sequence of bytes."""
    operations = batch.operations
    root = batch.members.index(operations[0].request.root)
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
    pieces = torch.split(flat, [t.nbytes for t in tensors])
    pairs = zip(pieces, tensors, strict=True)
    finish_batch(operations, [_of_bytes(piece, t.dtype, t.shape) for piece, t in pairs])


def run_allgather(batch: Batch) -> None:
    """Concatenate along the first dimension, which may differ between ranks."""
    operation = batch.operations[0]  # never fused
    operation.extra = batch.extras[0]
    pairs = zip(operation.inputs, operation.extra, strict=True)
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
            if root == batch.me:
                piece.copy_(mine)
            if piece.numel():
                works.append(broadcast(batch.group, piece, root))
        for work in works:
            batch.wait(work)
    return _of_bytes(out, t.dtype, [sum(rows), *t.shape[1:]])


def run_alltoall(batch: Batch) -> None:
    """Send each member its rows. The result: the received rows, and their number per member."""
    operation, splits = batch.operations[0], batch.extras[0]
    t = operation.inputs[0]
    me = batch.me
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
    result = _of_bytes(out, t.dtype, [sum(received), *t.shape[1:]])
    operation.extra = received
    operation.finish((result, torch.tensor(received, dtype=torch.int32, device="cpu")))


def run_reducescatter(batch: Batch) -> None:
    """Reduce, and keep this rank's rows. Gloo's own reduce-scatter moves no fewer bytes."""
    reduced = _reduce(batch)
    shares = [share(t.shape[0], batch.size, batch.me) for t in reduced]
    own = [t.narrow(0, *share) for t, share in zip(reduced, shares, strict=True)]
    finish_batch(batch.operations, own)


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


def _of_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return bytes viewed as a tensor of this dtype and shape; a copy if they are not aligned."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)


def _row_bytes(t: Tensor) -> int:
    return t.element_size() * prod(t.shape[1:])
