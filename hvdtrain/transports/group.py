"""A c10d process group in Python on top of a transport (`Carrier`), and its work queue.

torch.distributed calls `Group`. Collectives run in the order of their calls, in a worker thread of
the group, or in the caller's thread if it would only wait. Operations that are rare or need no
speed go through a Gloo group beside it: see `Group`.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.transports.carrier import (
    REDUCE_OPS,
    SUM,
    Carrier,
    Mismatch,
    PeerLost,
    TransportError,
    as_bytes,
    supports,
)

# The storages that pending operations read or write, one entry per operation. One list for the
# process, because groups may share a storage. CPython's list.extend and .remove are atomic.
_in_use: list[int] = []


class Use:
    """Marks the storages of tensors as in use until `end`: they must not be moved meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # References keep the storages alive, so that no new storage gets the same `_cdata`.
        self._storages = [t.untyped_storage() for t in tensors if not t.is_sparse]
        _in_use.extend([storage._cdata for storage in self._storages])

    def end(self) -> None:
        """Remove the marks. Twice is safe."""
        storages, self._storages = self._storages, []
        for storage in storages:
            _in_use.remove(storage._cdata)

    __del__ = end


# torch's stubs have overloads that no override in Python could have.
_C10dWork: Any = dist.Work
_C10dGroup: Any = dist.ProcessGroup


class Work(_C10dWork):  # type: ignore[misc]
    """One pending collective. `wait` raises the error that it failed with.

    Callbacks of its future may run in the worker thread. If a callback waits for another
    collective, as PowerSGD's do, the worker runs that collective from within the wait.
    """

    def __init__(self, results: list[Tensor], use: Use, order: Order) -> None:
        super().__init__()
        self._results = results
        self.in_inference_mode = any(t.is_inference() for t in results)
        """Whether a result is an inference tensor, which can be written in inference mode only."""
        self._use = use
        self._order = order
        self._done = threading.Lock()
        self._done.acquire()
        self._future: Any = None
        self._guard = threading.Lock()
        self._completed = False
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Record the outcome and release all waiters. Called once."""
        self._use.end()
        with self._guard:
            self._error = error
            self._completed = True
            future = self._future
        self._done.release()
        if future is not None:
            future.set_result(self._results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion. Raises RuntimeError if that takes longer than `timeout`.

        Without one, the group's timeout limits the wait.
        """
        if not self._completed:
            self._order.help(self)
        seconds = timeout.total_seconds() if timeout is not None else 0
        if not self._done.acquire(timeout=seconds if seconds > 0 else -1):
            if not self._completed:
                raise TransportError("Operation timed out")  # Gloo's words
            self._done.acquire()
        self._done.release()
        if self._error is not None:
            raise self._error
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._completed

    def is_success(self) -> bool:
        """Return whether it has completed without an error."""
        return self._completed and self._error is None

    def exception(self) -> Any:
        """Return the error it failed with, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return self._results

    def get_future(self) -> Any:
        """Return a future of the result, which DDP uses instead of `wait`."""
        if not self._completed:
            self._order.help(self)
        with self._guard:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._completed:
                    self._future.set_result(self._results)
            future = self._future
        # C++ code sees an exception that a callback raises, but not one set on the future.
        return future.then(self._checked)

    def _checked(self, future: Any) -> Any:
        if self._error is not None:
            raise self._error
        return future.value()


class Transfer(_C10dWork):  # type: ignore[misc]
    """A pending send or receive of the Gloo group."""

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        super().__init__()
        self._work = work
        self._use = Use(tensors)

    def wait(self, *timeout: timedelta) -> bool:
        """Wait until the tensors are sent or received."""
        try:
            return bool(self._work.wait(*timeout))
        finally:
            self._use.end()

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return bool(self._work.is_completed())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


class Order:
    """The work queue of a group, and its worker thread, which runs collectives in order.

    `fail` is called after an unexpected error, when this rank may be out of step with its peers.
    """

    def __init__(self, name: str, fail: Callable[[], object]) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._count = threading.Lock()
        self._pending = 0
        self._broken: PeerLost | None = None
        self._name = name
        self._fail = fail
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, run: Callable[[], None], work: Work, wait: bool) -> Work:
        """Queue `run`. `wait`: the caller only waits, so if the queue is empty, run it here."""
        with self._count:
            idle = self._pending == 0
            closed = self._closed
            self._pending += not closed
            if not closed and not (idle and wait):
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._tasks.put((run, work))
        if closed:
            work.finish(PeerLost("the group was closed before this collective"))
        elif idle and wait:
            self._carry_out(run, work)
        return work

    def help(self, work: Work) -> None:
        """Drain the queue up to and including `work` if called in the worker thread itself."""
        if threading.current_thread() is not self._thread:
            return
        while not work.is_completed():
            if (task := self._tasks.get()) is None:
                self._tasks.put(None)  # the end marker is still needed, by `_run`
                return
            self._carry_out(*task)

    def close(self) -> None:
        """Stop the worker after the tasks queued so far. Does not wait: a task may hang."""
        with self._count:
            self._closed = True
            self._tasks.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the worker to end; return whether it has."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._carry_out(*task)
            del task  # release its tensors before waiting for the next task

    def _carry_out(self, run: Callable[[], None], work: Work) -> None:
        error: BaseException | None = None
        try:
            # An inference tensor can be written in inference mode only. Others must be written
            # outside it: Gloo replaces the indices and values of a sparse tensor, and a normal
            # tensor cannot hold parts that were made in inference mode.
            with self._turn, torch.inference_mode(work.in_inference_mode), torch.no_grad():
                if self._broken is not None:
                    raise PeerLost(str(self._broken))
                run()
        except PeerLost as lost:
            self._broken = error = lost
        except (Mismatch, TransportError) as problem:
            error = problem
        except BaseException as problem:
            # An unexpected error or an interrupt: the peers may be at any point of this operation.
            error = problem
            self._broken = PeerLost(f"this rank gave up in a collective before: {problem!r}")
            self._fail()
        with self._count:
            self._pending -= 1
        work.finish(error)
        if error is not None and not isinstance(error, Exception):
            raise error


class Group(_C10dGroup):  # type: ignore[misc]
    """A process group on a transport, with a Gloo group beside it.

    Gloo handles sparse tensors, gather, scatter and reduce to one rank, which need no speed, and
    send and recv, which are not collective.
    """

    def __init__(self, carrier: Carrier, gloo: Any) -> None:
        super().__init__(carrier.rank, carrier.size)
        self.carrier = carrier
        self._gloo = gloo
        self._group_name = self._group_desc = ""
        self._order = Order(f"{carrier.name}-group", functools.partial(carrier.close, failed=True))
        self._close = weakref.finalize(self, _close, self._order, carrier, os.getpid())

    def getBackendName(self) -> str:
        """Return the transport's name."""
        return self.carrier.name

    name = _get_backend_name = getBackendName

    # The base class stores names in its C++ backends, and this group has none.
    def getGroupName(self) -> str:  # noqa: D102
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: D102
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: D102
        return self._group_desc

    def setGroupDesc(self, name: str) -> None:  # noqa: D102
        self._group_desc = name

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for a device: Gloo's for the CPU. The base class has none.

        From torch 2.14 on `batch_isend_irecv` reads from it whether the group coalesces. Raises
        RuntimeError for other devices, as torch does.
        """
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self._gloo

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.carrier.rank

    def size(self) -> int:
        """Return the number of processes in the group."""
        return self.carrier.size

    def shutdown(self) -> None:
        """Release what the group holds. Not collective."""
        self._close()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a collective waits for a late rank."""
        self.carrier.timeout_s = timeout.total_seconds()
        self._gloo._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    # Collectives of the transport

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Combine a tensor over all ranks, in place. Collective."""
        tensors, op = _listed(tensors), _op(opts)
        if tensors[0].is_sparse:
            what = f"all_reduce(sparse {_told(tensors)}, {_op_name(op)})"
            opts = opts or dist.AllreduceOptions()
            return self._by_gloo(what, tensors, [], self._gloo.allreduce, tensors, opts)
        return self._reduce_all(tensors, op, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Combine several tensors over all ranks, in place. Collective."""
        return self._reduce_all(list(tensors), _op(opts), opts)

    def _reduce_all(self, tensors: list[Tensor], op: Any, opts: Any) -> Work:
        name, divisor = self._reduction(op, tensors)
        what = f"all_reduce({_told(tensors)}, {name}{'/n' * (divisor > 1)})"
        self._consider(tensors)

        def run() -> None:
            for t in tensors:
                flat = _flat(t)
                self.carrier.all_reduce(what, flat, name, divisor)
                _give_back(t, flat)

        return self._put(run, tensors, [], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Combine over all ranks, and keep this rank's part of the first dimension. Collective."""
        return self._scatter_all([output], [[input]], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Combine several tensors, and keep this rank's part of each. Collective."""
        return self._scatter_all(list(outputs), [[t] for t in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Combine lists of one tensor per rank, and keep this rank's. Collective."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._scatter_all(list(outputs), inputs, opts)

    def _scatter_all(self, outputs: list[Tensor], inputs: Any, opts: Any) -> Work:
        op = _op(opts)
        name, divisor = self._reduction(op, outputs)
        what = f"reduce_scatter({_told(outputs)}, {name}{'/n' * (divisor > 1)})"
        for out, parts in zip(outputs, inputs, strict=True):
            each = self.size() // len(parts) * out.numel()
            if self.size() % len(parts) or any(
                t.numel() != each or t.dtype != out.dtype for t in parts
            ):
                raise ValueError(
                    f"reduce_scatter to {_told([out])} wants {self.size()} times as much, and has "
                    f"{_told(parts)}"
                )

        def run() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                flat = _flat(out)
                self.carrier.reduce_scatter(what, flat, _joined(parts), name, divisor)
                _give_back(out, flat)

        return self._put(run, outputs, [t for parts in inputs for t in parts], opts)

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> Work:
        """Overwrite tensors with the root's, in place. Collective."""
        tensors = _listed(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        what = f"broadcast({_told(tensors)}, from {root})"

        def run() -> None:
            for t in tensors:
                flat = _flat(t)
                self.carrier.broadcast(what, as_bytes(flat), root)
                _give_back(t, flat)

        return self._put(run, tensors, [], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Concatenate every rank's tensor, all of one size. Collective."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Concatenate every rank's tensors, each of one size everywhere. Collective."""
        outputs, inputs = list(outputs), list(inputs)
        what = f"all_gather({_told(inputs)})"
        for out, t in zip(outputs, inputs, strict=True):
            if out.numel() != t.numel() * self.size() or out.dtype != t.dtype:
                raise ValueError(
                    f"all_gather of {_told([t])} from {self.size()} ranks does not fit into "
                    f"{_told([out])}"
                )

        def run() -> None:
            for out, t in zip(outputs, inputs, strict=True):
                flat = _flat(out)
                self.carrier.all_gather(what, as_bytes(flat), as_bytes(_flat(t)))
                _give_back(out, flat)

        return self._put(run, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Fill a list with every rank's tensor, all of one size. Collective."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        lists, inputs = [list(ts) for ts in outputs], list(inputs)
        what = f"all_gather({_told(inputs)})"
        for parts, t in zip(lists, inputs, strict=True):
            if len(parts) != self.size() or any(
                p.numel() != t.numel() or p.dtype != t.dtype for p in parts
            ):
                raise ValueError(
                    f"all_gather of {_told([t])} from {self.size()} ranks does not fit into "
                    f"{_told(parts)}"
                )

        def run() -> None:
            for parts, t in zip(lists, inputs, strict=True):
                flat = torch.empty(t.numel() * self.size(), dtype=t.dtype)
                self.carrier.all_gather(what, as_bytes(flat), as_bytes(_flat(t)))
                for part, piece in zip(parts, flat.chunk(self.size()), strict=False):
                    part.copy_(piece.view(part.shape))

        return self._put(run, [t for parts in lists for t in parts], inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Fill one list per rank with that rank's tensors. Collective."""
        by_tensor = [list(ts) for ts in zip(*outputs, strict=True)]
        return self.allgather(by_tensor, list(inputs), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Send each rank its rows; their numbers may differ. Collective."""
        if output.dtype != input.dtype:
            raise ValueError(f"all_to_all from {_told([input])} to {_told([output])}")
        received = self._rows(output, output_splits)
        sent = self._rows(input, input_splits)
        what = f"all_to_all({str(input.dtype).removeprefix('torch.')})"

        def run() -> None:
            flat = _flat(output)
            data = as_bytes(_flat(input))
            self.carrier.all_to_all(what, as_bytes(flat), data, received, sent)
            _give_back(output, flat)

        return self._put(run, [output], [input], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Send each rank its tensor. Collective."""
        outputs, inputs = list(outputs), list(inputs)
        if not len(outputs) == len(inputs) == self.size():
            raise ValueError(
                f"all_to_all wants {self.size()} tensors each way, and has {len(inputs)} to send "
                f"and {len(outputs)} to receive"
            )
        if any(t.dtype != inputs[0].dtype for t in (*inputs, *outputs)):
            raise ValueError(f"all_to_all from {_told(inputs)} to {_told(outputs)}")
        what = f"all_to_all({str(inputs[0].dtype).removeprefix('torch.')})"

        def run() -> None:
            sizes = [t.numel() * t.element_size() for t in outputs]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            data = _joined([as_bytes(_flat(t)) for t in inputs])
            sent = [t.numel() * t.element_size() for t in inputs]
            self.carrier.all_to_all(what, flat, data, sizes, sent)
            for t, piece in zip(outputs, torch.split(flat, sizes), strict=True):
                if t.numel():
                    t.copy_(piece.clone().view(t.dtype).view(t.shape))

        return self._put(run, outputs, inputs, opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Wait for all ranks. Collective."""
        return self._put(lambda: self.carrier.barrier("barrier()"), [], [], opts)

    # Operations of the Gloo group

    def reduce(self, tensors: Any, *options: Any) -> Work:
        """Combine over all ranks, on the root only. Collective."""
        tensors = _listed(tensors)
        what = f"reduce({_told(tensors)}, {_op_name(_op(options[0]))}, to {options[0].rootRank})"
        return self._by_gloo(what, tensors, [], self._gloo.reduce, tensors, *options)

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Collect every rank's tensor on the root. Collective."""
        inputs = _listed(inputs)
        what = f"gather({_told(inputs)}, to {options[0].rootRank})"
        results = [t for parts in outputs for t in parts]
        return self._by_gloo(what, results, inputs, self._gloo.gather, outputs, inputs, *options)

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Send every rank its tensor from the root. Collective."""
        outputs = _listed(outputs)
        what = f"scatter({_told(outputs)}, from {options[0].rootRank})"
        read = [t for parts in inputs for t in parts]
        return self._by_gloo(what, outputs, read, self._gloo.scatter, outputs, inputs, *options)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Transfer:
        """Send to one rank."""
        tensors = _listed(tensors)
        return Transfer(self._gloo.send(tensors, dst, tag), tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Transfer:
        """Receive from one rank."""
        tensors = _listed(tensors)
        return Transfer(self._gloo.recv(tensors, src, tag), tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Transfer:
        """Receive from any rank."""
        tensors = _listed(tensors)
        return Transfer(self._gloo.recv_anysource(tensors, tag), tensors)

    def _by_gloo(
        self,
        what: str,
        results: list[Tensor],
        read: list[Tensor],
        method: Callable[..., Any],
        *args: Any,
    ) -> Work:
        """Queue an operation of the Gloo group behind a barrier that compares the ranks' calls.

        The queue gives both groups one common order. The barrier protects the process: Gloo aborts
        it when a peer sends what this rank does not expect.
        """

        def run() -> None:
            self.carrier.barrier(what)
            try:
                work = method(*args)
            except (RuntimeError, ValueError, TypeError) as error:
                raise TransportError(f"{what}, by Gloo: {error}") from None
            self.carrier.wait_for(what, work)

        return self._order.put(run, Work(results, Use(results + read), self._order), wait=False)

    # Helpers

    def _put(
        self, run: Callable[[], None], results: list[Tensor], read: list[Tensor], opts: Any
    ) -> Work:
        tensors = results + read
        self._check(tensors)
        work = Work(results, Use(tensors), self._order)
        return self._order.put(run, work, wait=not getattr(opts, "asyncOp", True))

    def _check(self, tensors: list[Tensor]) -> None:
        for t in tensors:
            if t.device.type != "cpu" or t.is_sparse:
                raise ValueError(
                    f"{self.carrier.name} carries dense CPU tensors, not {t.layout} on {t.device}"
                )

    def _consider(self, tensors: list[Tensor]) -> None:
        self._check(tensors)
        for t in tensors:
            if t.is_contiguous() and t.untyped_storage()._cdata not in _in_use:
                self.carrier.consider(t)

    def _reduction(self, op: Any, tensors: list[Tensor]) -> tuple[str, int]:
        """Return the transport's name for a reduce operation, and the divisor."""
        if op == dist.ReduceOp.AVG:
            for t in tensors:
                if not (t.is_floating_point() or t.is_complex()):
                    raise ValueError(f"AVG of {t.dtype} would not be a mean; use SUM and divide")
            name, divisor = SUM, self.size()
        else:
            divisor = 1
            name = next((name for known, name in REDUCE_OPS.items() if op == known), "")
        for t in tensors:
            if not name or not supports(name, t.dtype):
                raise ValueError(f"{self.carrier.name} cannot combine {t.dtype} by {_op_name(op)}")
        return name, divisor

    def _rows(self, t: Tensor, splits: Sequence[int] | None) -> list[int]:
        """Return the number of bytes of `t` that belong to each rank."""
        rows = t.shape[0] if t.dim() else 0
        if not splits:
            if rows % self.size():
                raise ValueError(f"{rows} rows cannot be divided among {self.size()} ranks")
            splits = [rows // self.size()] * self.size()
        if sum(splits) != rows or len(splits) != self.size():
            raise ValueError(f"splits {list(splits)} of {rows} rows for {self.size()} ranks")
        row_bytes = t.numel() // max(rows, 1) * t.element_size()
        return [n * row_bytes for n in splits]


def _close(order: Order, carrier: Carrier, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child, e.g. a DataLoader worker: the group belongs to its parent
    order.close()
    finished = order.join(0.5)
    carrier.close(failed=not finished)
    order.join(1.0)  # an operation that waited for a peer fails once the transport is closed


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _op(opts: Any) -> Any:
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _told(tensors: Sequence[Tensor]) -> str:
    """Describe tensors for error messages and for the comparison between ranks."""
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:3]]
    rest = tensors[3:]
    if rest:
        whole = zlib.crc32(repr([(t.dtype, tuple(t.shape)) for t in rest]).encode())
        count = sum(t.numel() for t in rest)
        shown.append(f"and {len(rest)} more of {count} elements, #{whole:08x}")
    return " ".join(shown)


def _flat(t: Tensor) -> Tensor:
    """Return the elements in one dimension: a view if `t` is contiguous, else a copy."""
    return t.detach().contiguous().view(-1)


def _give_back(t: Tensor, flat: Tensor) -> None:
    """Copy the result to `t` if `_flat` had to make a copy."""
    if not t.is_contiguous():
        with torch.no_grad():
            t.copy_(flat.view(t.shape))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    flats = [_flat(t) for t in parts]
    return flats[0] if len(flats) == 1 else torch.cat(flats)
