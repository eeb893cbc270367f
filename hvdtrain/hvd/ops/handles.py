"""Shared by all operations: the checks at the call, names, and handles.

Ranks match operations by name. Operations without one are numbered by process set and kind, so
all ranks of a set must call them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.operation import (
    ADASUM,
    AVERAGE,
    GLOBAL_SET,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Key,
    Operation,
    Request,
    dtype_name,
)
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.process_sets import ProcessSet
from hvdtrain.hvd.util import get_average_backwards_compatibility_fun

_first = itemgetter(0)


def submit(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool = False,
    outputs: list[Tensor] | None = None,
    select: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> int:
    """Submit an operation to the engine and return its handle. Does not block.

    `fields`: the request's other fields. `select`: see `Operation`; by default the only result, or
    the tuple of all if `grouped`. Raises HorovodInternalError before `init`, after the job has
    ended and for tensors on different devices, TypeError for anything but tensors, and ValueError
    for errors of this rank alone, such as a name that is in use.
    """
    engine = basics.engine
    prefix = f"grouped_{kind}" if grouped else kind
    select = select or (tuple if grouped else _first)
    found = engine.names.find((process_set.process_set_id, f"{prefix}.{name}"))
    agreed = found.request
    if name is not None and agreed is not None and found.fits(tensors, fields):
        return engine.submit_call(Operation(found.key, agreed, tensors, outputs, select, name))
    _check(kind, tensors, process_set, **fields)
    on_gpu = bool(tensors) and tensors[0].is_cuda
    request = Request(
        kind,
        tuple(dtype_name(t.dtype) for t in tensors),
        tuple(tuple(t.shape) for t in tensors),
        "GPU" if on_gpu else "CPU",
        gpu=tensors[0].device.index if on_gpu else 0,
        data=(kind == "allreduce" and engine.settings.exact_horovod) or None,
        **fields,
    )
    key = Key(set_id(kind, process_set), f"{prefix}.{name}")
    dense = [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors]
    operation = Operation(key, request, dense, outputs, select, name)
    return engine.submit_call(operation, prefix if name is None else "")


def reduce(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool = False,
    in_place: bool = False,
) -> int:
    """Submit an allreduce or reducescatter, and return its handle."""
    inputs = list(tensors)  # one list for both: fewer objects for the garbage collector
    return submit(
        kind, inputs, name, process_set, grouped, inputs if in_place else None,
        op=op, prescale=float(prescale), postscale=float(postscale),
    )  # fmt: skip


def _check(
    kind: str,
    tensors: Sequence[Tensor],
    process_set: ProcessSet,
    op: int | None = None,
    root: int | None = None,
    **others: Any,
) -> None:
    """Raise for arguments that an operation cannot have on any rank."""
    scatters = kind == "reducescatter"
    if scatters and op not in (AVERAGE, SUM):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    if op is not None:
        check_op(op)
    if op == ADASUM:
        if process_set.process_set_id != GLOBAL_SET:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        check_adasum()
    members = basics.engine.sets.get(process_set.process_set_id or GLOBAL_SET, [root])
    if root is not None and root not in members:
        raise ValueError(f"broadcast received invalid root rank {root} for provided process set")
    check_tensors(kind, tensors)
    if scatters and any(t.dim() == 0 for t in tensors):
        raise ValueError("Reducescatter does not support scalar inputs")
    if len({t.device for t in tensors}) > 1:
        raise HorovodInternalError("Tensors in list must be on same device.")
    for t in tensors:
        if t.is_sparse or t.layout != tensors[0].layout:
            raise ValueError(f"Tensor type {t.type()} is not supported.")
        nonsense = t.dtype.is_complex and op in (MIN, MAX, PRODUCT)
        if nonsense or (str(t.dtype) == "torch.bool" and op == AVERAGE):
            raise ValueError(f"Tensor type {t.type()} is not supported with this reduction.")


def check_tensors(kind: str, tensors: Sequence[Any]) -> None:
    """Raise TypeError unless all are tensors."""
    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(
                f"hvd.{kind} needs a torch tensor, not {type(t).__name__}: pass torch.as_tensor(x)"
            )


def poll(handle: int) -> bool:
    """Return whether an operation has finished, with a result or an error. Never blocks.

    Raises ValueError for a handle that was synchronized already, or never returned.
    """
    if handle not in basics.handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    operation = basics.handles[handle]
    done = operation.done()
    if done:
        basics.engine.names.free(operation)
    return done


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None for a handle synchronized already.

    Raises HorovodInternalError if the ranks' requests mismatch, or a peer is lost.
    """
    operation = basics.handles.pop(handle, None)
    if operation is None:
        return None
    return operation.select(operation.wait())


choose_op = get_average_backwards_compatibility_fun(basics)
"""Return the reduction given by `op` or Horovod's deprecated `average`; the mean by default."""


def check_op(op: Any) -> None:
    """Raise ValueError if `op` is not a reduction."""
    if op not in range(PRODUCT + 1):
        raise ValueError(
            f"op={op!r} is not a reduction; use hvd.Average, Sum, Adasum, Min, Max or Product"
        )


def check_adasum() -> None:
    """Raise NotImplementedError unless the number of ranks is a power of two."""
    size = basics.size()
    if size & (size - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")


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
