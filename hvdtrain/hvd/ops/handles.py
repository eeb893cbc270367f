"""Shared by all operations: their names, their handles, and the checks at the call.

Ranks match operations by name. Operations without one are numbered by process set and kind, so
all ranks of a set must call them in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.engine import DUPLICATE_NAME
from hvdtrain.hvd.engine.operation import Operation
from hvdtrain.hvd.engine.request import (
    AVERAGE,
    GLOBAL_SET,
    MAX,
    MIN,
    PRODUCT,
    Key,
    Request,
    dtype_name,
)
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.process_sets import ProcessSet
from hvdtrain.hvd.util import get_average_backwards_compatibility_fun
from hvdtrain.job.store_exchange import poll_until

Select = Callable[[Any], Any]
_NAME_IN_USE_S = 1.0
_FINISH_S = 10.0


@dataclass
class Handle:
    """An operation that a caller can wait for. `select` returns the caller's part of the result."""

    operation: Operation
    select: Select
    own_name: str | None = None
    waits: int = 0
    """How often this rank had begun to wait for results, when the operation was submitted."""
    submitted_s: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Return whether the operation has finished, and the caller has waited for any operation
        since, as a step does, or 1 s has passed.

        Otherwise the second of two calls in a row could raise on one rank but not on a busier one,
        which would then block forever. After such a wait it is about to finish, once the slowest
        rank has submitted it: wait for that up to 10 s.
        """
        engine = basics.engine
        if engine.waits > self.waits and not self.operation.done():
            engine.send_submitted()
            for _ in poll_until(time.monotonic() + _FINISH_S, 0.0005):
                if self.operation.done():
                    break
        passed_s = time.monotonic() - self.submitted_s
        return self.operation.done() and (engine.waits > self.waits or passed_s > _NAME_IN_USE_S)


def submit(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool = False,
    outputs: list[Tensor] | None = None,
    select: Select | None = None,
    **fields: Any,
) -> int:
    """Submit an operation to the engine and return its handle. Does not block.

    `fields`: the request's other fields. `select`: see `Handle`; by default the only result, or the
    tuple of all if `grouped`. Raises HorovodInternalError before `init`, after the job has ended
    and for tensors on different devices, ValueError for errors of this rank alone, such as a name
    that is in use.
    """
    if len({t.device for t in tensors}) > 1:
        raise HorovodInternalError("Tensors in list must be on same device.")
    engine, client = basics.engine, basics.client
    number = set_id(kind, process_set)
    for t in tensors:
        if t.is_sparse or t.layout != tensors[0].layout:
            raise ValueError(f"Tensor type {t.type()} is not supported.")
    request = Request(
        kind,
        tuple(dtype_name(t.dtype) for t in tensors),
        tuple(tuple(t.shape) for t in tensors),
        "GPU" if tensors and tensors[0].is_cuda else "CPU",
        gpu=tensors[0].device.index if tensors and tensors[0].is_cuda else 0,
        **fields,
    )
    dense = [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors]
    prefix = f"grouped_{kind}" if grouped else kind
    with client.lock:
        own_name = _unnamed_name(prefix, number) if name is None else name
        key = Key(number, f"{prefix}.{own_name}")
        earlier = client.named.get(key)
        if earlier is not None and not earlier.is_over():
            raise ValueError(DUPLICATE_NAME)
        operation = Operation(key, request, dense, outputs)
        engine.submit(operation)
        handle, client.next_handle = client.next_handle, client.next_handle + 1
        select = select or (tuple if grouped else itemgetter(0))
        entry = client.handles[handle] = Handle(operation, select, own_name, engine.waits)
        if name is None:
            client.unnamed[number, prefix] = client.unnamed.get((number, prefix), 0) + 1
        else:
            client.named[key] = entry
    return handle


class HandleMap(Mapping[int, tuple[Any, Any]]):
    """Horovod's `_handle_map`: the tensors that an operation reads and writes, by its handle.

    Lists for a grouped operation. The written ones are None until they exist.
    """

    def __getitem__(self, handle: int) -> tuple[Any, Any]:
        entry = basics.client.handles[handle]
        operation = entry.operation
        written = operation.outputs or (operation.result if operation.done() else None)
        read = operation.inputs if entry.select is tuple else operation.inputs[0]
        return read, None if written is None else entry.select(written)

    def __iter__(self) -> Iterator[int]:
        return iter(list(basics.client.handles))

    def __len__(self) -> int:
        return len(basics.client.handles)


def poll(handle: int) -> bool:
    """Return whether an operation has finished, with a result or an error. Never blocks.

    Raises ValueError for a handle that was synchronized already, or never returned.
    """
    if handle not in basics.client.handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    entry = basics.client.handles[handle]
    done = entry.operation.done()
    if done:
        _free_name(entry)
    return done


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None for a handle synchronized already.

    Raises HorovodInternalError if the ranks' requests mismatch, or a peer is lost.
    """
    entry = basics.client.handles.pop(handle, None)
    if entry is None:
        return None
    try:
        return entry.select(entry.operation.wait())
    finally:
        _free_name(entry)


def _free_name(entry: Handle) -> None:
    """Release the name of an operation, unless a later operation holds it by now."""
    named = basics.client.named
    if named.get(entry.operation.key) is entry:
        del named[entry.operation.key]


choose_op = get_average_backwards_compatibility_fun(basics)
"""Return the reduction given by `op` or Horovod's deprecated `average`; the mean by default."""


def check_reducible(tensors: Sequence[Tensor], op: int) -> None:
    """Raise ValueError for min, max or product of complex tensors, and for the mean of bools."""
    for t in tensors:
        nonsense = t.dtype.is_complex and op in (MIN, MAX, PRODUCT)
        if nonsense or (t.dtype == torch.bool and op == AVERAGE):
            raise ValueError(f"Tensor type {t.type()} is not supported with this reduction.")


def check_adasum() -> None:
    """Raise NotImplementedError unless the number of ranks is a power of two."""
    size = basics.size()
    if size & (size - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")


def compressed(
    tensors: Sequence[Tensor],
    compression: Any,
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> list[Tensor]:
    """Compress tensors, run a collective on them, and return its decompressed results."""
    narrowed, ctxs = zip(*(compression.compress(t) for t in tensors), strict=True)
    results = run(narrowed)
    return [compression.decompress(t, ctx) for t, ctx in zip(results, ctxs, strict=True)]


def differentiable(
    begin: Callable[[Sequence[Tensor]], int],
    gradients: Callable[[str, Any, Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Run a collective as part of the autograd graph; return its results.

    `begin` starts it on the tensors and returns the handle. `gradients(name, extra, grads)` returns
    the tensors' gradients from those of the results, by differentiable operations, so that they
    have gradients too. Its own collective derives its name from the forward's, so that ranks may
    run their backwards in different orders.
    """
    results: tuple[Tensor, ...] = _Differentiable.apply(begin, gradients, *tensors)  # type: ignore[no-untyped-call]
    return results


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Any, gradients: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        handle = begin(tensors)
        entry = basics.client.handles[handle]
        results = synchronize(handle)
        ctx.gradients, ctx.name, ctx.extra = gradients, entry.own_name, entry.operation.extra
        return results if isinstance(results, tuple) else (results,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.gradients(ctx.name, ctx.extra, grads)


def set_size(process_set: ProcessSet) -> int:
    """Return the number of ranks of a process set; 0 if it is not registered."""
    number = process_set.process_set_id
    return 0 if number is None else len(basics.engine.sets.get(number, ()))


def set_id(kind: str, process_set: ProcessSet) -> int:
    """Return a process set's id. Raises ValueError unless this rank is in it."""
    engine = basics.engine
    number = process_set.process_set_id
    members = engine.sets.get(number) if number is not None else None
    if number is None or members is None:
        raise ValueError(
            f"{kind.capitalize()}: Process set provided does not exist, or has not been registered."
        )
    if engine.world.rank not in members:
        raise ValueError(
            f"{kind.capitalize()}: Rank {engine.world.rank} is not a member of the provided "
            "process set."
        )
    return number


def _unnamed_name(prefix: str, number_of_set: int) -> str:
    """Return the next default name; it contains the number of joins, which restart the count."""
    number = basics.client.unnamed.get((number_of_set, prefix), 0)
    if number_of_set != GLOBAL_SET or not basics.engine.joins:
        return f"noname.{number}"
    return f"noname.{basics.engine.joins}.{number}"


def restart_unnamed() -> None:
    """Restart the count after a join: a rank that joined early has made fewer calls than others."""
    client = basics.client
    with client.lock:
        for key in [key for key in client.unnamed if key[0] == GLOBAL_SET]:
            del client.unnamed[key]
