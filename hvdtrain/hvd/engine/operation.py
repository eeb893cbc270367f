"""Operation: one collective of this rank, from the call to its result, and what names it.

All of the engine uses these. A `Key` names an operation; a `Request` is one rank's part in it, in a
form that ranks can compare.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.hvd.engine.gpu import await_event, record_event, use_on_current_stream

if TYPE_CHECKING:
    from hvdtrain.hvd.engine.engine import Engine

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)

GLOBAL_SET = 0
# Data up to this size travels with its request, and rank 0 reduces it: two small messages take a
# tenth of the time of a Gloo collective, which costs one to two milliseconds here.
EAGER_BYTES = 16 * 1024
_NAME_IN_USE_S = 1.0
_FINISH_S = 10.0

_lock = threading.Lock()  # guards the making of events


class Request(NamedTuple):
    """One rank's request without its name. Comparable, and plain data for JSON.

    A group of tensors is one request. `data` is for requests without tensors; in an allreduce it is
    true if float16 results are rounded before they are scaled, as in Horovod. `gpu` is the index of
    the tensors' GPU on this rank, and may be another one on each rank.
    """

    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "CPU"
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    data: Any = None
    gpu: int = 0

    @classmethod
    def from_wire(cls, fields: list[Any]) -> Request:
        """Return the request with these fields, which JSON has turned from tuples into lists."""
        if isinstance(fields, Request):
            return fields  # of rank 0 itself
        r = cls(*fields)
        shapes = tuple(tuple(shape) for shape in r.shapes)
        return r._replace(dtypes=tuple(r.dtypes), shapes=shapes, splits=tuple(r.splits))

    @property
    def numel(self) -> int:
        """The number of elements of this rank's tensors."""
        return sum(map(prod, self.shapes))

    @property
    def num_bytes(self) -> int:
        """The size of this rank's tensors in bytes."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * dtype_of(name).itemsize for shape, name in pairs)

    def is_eager(self, num_ranks: int) -> bool:
        """Return whether the data travels with the request. The same result on every rank."""
        # With more than 256 ranks, too much data would arrive at rank 0.
        if self.kind != "allreduce" or self.device != "CPU" or num_ranks > 256:
            return False
        one_dtype = len(set(self.dtypes)) == 1
        return one_dtype and self.op != ADASUM and self.num_bytes <= EAGER_BYTES


class Key(NamedTuple):
    """The name by which the operations of different ranks are matched, within a process set."""

    set_id: int
    name: str


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return torch.float32 for "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Operation:
    """A pending or completed operation. `wait` and `done` may be called from any thread.

    `inputs` are the caller's tensors, contiguous; `outputs` the tensors to write, or None if the
    operation makes its own. `select` returns the caller's part of the result. A caller that chose a
    name has it in `own_name`, and holds the name until it waits.
    """

    # Defaults of the class, which cost an operation nothing.
    payload = b""  # of a request without tensors
    owner: Engine | None = None  # that it was submitted to
    name: Any = None  # what its engine knows about the name: `slots.Name`
    waits = 0  # of the owner, when this was submitted
    extra: Any = None  # the numbers of rows that an allgather or alltoall has received
    result: Any = None
    error: Exception | None = None
    finished_s: float | None = None  # when the result, or the error, was there
    # On a GPU: when its inputs are there, and when its result is.
    submitted: Any = None
    _finished: Any = None
    _event: threading.Event | None = None  # made by the first that has to wait

    def __init__(
        self,
        key: Key,
        request: Request,
        inputs: Sequence[Tensor] = (),
        outputs: list[Tensor] | None = None,
        select: Callable[[Any], Any] = itemgetter(0),
        own_name: str | None = None,
    ) -> None:
        self.key = key
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        self.select = select
        self.own_name = own_name
        if request.device == "GPU" and inputs:
            self.submitted = record_event(inputs[0].device)

    def finish(self, result: Any) -> None:
        """Store the result, which on a GPU is complete once the current stream gets here."""
        finish_all([self], [result])

    def fail(self, error: Exception) -> None:
        """Complete with an error, unless completed already."""
        if self.finished_s is None:
            self.error = error
            finish_all([self], [None])

    def done(self) -> bool:
        """Return whether the result, or an error, is available."""
        if self.finished_s is None:
            return False
        return self._finished is None or bool(self._finished.query())

    def frees_name(self) -> bool:
        """Return whether this has finished, and the caller has waited for any operation since, as a
        step does, or 1 s has passed: only then may another operation have its name.

        Otherwise the second of two calls in a row could raise on one rank but not on a busier one,
        which would then block forever. After such a wait this is about to finish, once the slowest
        rank has submitted it: wait for that up to 10 s.
        """
        assert self.owner is not None
        has_waited = self.owner.waits > self.waits
        if has_waited and self.finished_s is None:
            self._await(_FINISH_S)
        if self.finished_s is None or not self.done():
            return False
        return has_waited or time.monotonic() - self.finished_s > _NAME_IN_USE_S

    def _await(self, timeout_s: float | None = None) -> None:
        assert self.owner is not None
        self.owner.send_submitted()
        with _lock:
            self._event = self._event or threading.Event()
        if self.finished_s is None:
            self._event.wait(timeout_s)

    def wait(self) -> Any:
        """Wait until the result is complete, also on a GPU, and return it. Releases the name.

        Raises the error that the operation failed with; HorovodInternalError if the job is over
        before a GPU has completed it.
        """
        owner = self.owner
        assert owner is not None
        owner.waits += 1
        if self.finished_s is None:
            self._await()
        owner.names.free(self)
        if self.error is not None:
            raise self.error
        if self._finished is not None:
            await_event(self._finished.query, lambda: owner.abort_reason)
            use_on_current_stream(self.result)
        return self.result


def finish_all(operations: Sequence[Operation], results: Iterable[Any]) -> None:
    """Store the results of operations. Callers wake up once all have theirs, since one that wakes
    up sooner competes with this thread for the interpreter.
    """
    now = time.monotonic()
    for op, result in zip(operations, results, strict=True):
        op.result = result
        if op.submitted is not None and op.error is None:
            op._finished = record_event(op.inputs[0].device)
        op.finished_s = now
    for op in operations:
        if op._event is not None:  # set before its thread looked at `finished_s`
            op._event.set()
