"""A c10d process group in Python on top of `Shm`.

torch.distributed calls `TransportGroup`. It checks the arguments, flattens the tensors, and queues
the collective (see `work_queue`). Operations that are rare or need no speed go through a Gloo group
beside it, as flat tensors too: Gloo ignores strides.
"""

from __future__ import annotations

import functools
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain._torch.dynamo import untraced_methods
from hvdtrain._torch.join_work import keep_join_work
from hvdtrain.liveness.failure import report_causes_first
from hvdtrain.transports.malloc import return_freed_memory
from hvdtrain.transports.shm import Shm
from hvdtrain.transports.transport import (
    REDUCE_OPS,
    SUM,
    TransportError,
    as_bytes,
    flatten,
    supports,
)
from hvdtrain.transports.work_queue import (
    QueuedWork,
    StorageUse,
    TransferWork,
    WorkQueue,
    is_in_use,
)

_MOST_CALLS = 1000  # the most entries of the cache of small calls
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_C10D_SUM = dist.ReduceOp.SUM
_C10dGroup: Any = dist.ProcessGroup  # torch's stubs have overloads that no override could have


@untraced_methods
class TransportGroup(_C10dGroup):  # type: ignore[misc]
    """A process group on a transport, with a Gloo group beside it.

    Gloo handles sparse tensors, gather and scatter, which need no speed, and send and recv, which
    are not collective.
    """

    def __init__(self, transport: Shm, gloo: Any) -> None:
        super().__init__(transport.rank, transport.size)
        keep_join_work()
        report_causes_first()
        self.transport = transport
        self._gloo = gloo
        self._group_name = self._group_desc = ""
        self._small_calls: dict[tuple[torch.dtype, torch.Size, Any], tuple[str, str, int]] = {}
        self._queue = WorkQueue(
            f"{transport.name}-group", functools.partial(transport.close, failed=True)
        )
        self._close = weakref.finalize(self, _close, self._queue, transport, os.getpid())

    def getBackendName(self) -> str:
        return self.transport.name

    name = _get_backend_name = getBackendName

    # The base class stores names in its C++ backends, and this group has none.
    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, name: str) -> None:
        self._group_desc = name

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes. `dcp.async_save` wants the CPU among them."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for a device: Gloo's for the CPU. The base class has none.

        From torch 2.14 on `batch_isend_irecv` reads from it whether the group coalesces. Raises
        RuntimeError for other devices, as torch does.
        """
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self._gloo

    def shutdown(self) -> None:
        """Release what the group holds. Not collective."""
        self._close()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a collective waits for a late rank."""
        self.transport.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # Collectives of the transport

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> QueuedWork | None:
        """Reduce in place. Collective; None if it has completed, as torch's NCCL group returns."""
        tensors, op = _as_list(tensors), _op(opts)
        is_awaited = not getattr(opts, "asyncOp", True)  # torch 2.7 lacks it
        if is_awaited and len(tensors) == 1 and self._all_reduce_now(tensors[0], op):
            return None
        if tensors[0].is_sparse:
            return self._queue_sparse_all_reduce(tensors, op, opts)
        return self._queue_all_reduce(tensors, op, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> QueuedWork:
        return self._queue_all_reduce(list(tensors), _op(opts), opts)

    def _all_reduce_now(self, t: Tensor, op: Any) -> bool:
        """Reduce a small tensor in the caller's thread; return False if it must be queued instead.

        Caches the checked arguments and the signature by dtype, shape and operation.
        """
        if t.numel() > self.transport.small_bytes or not _is_plain(t):
            return False
        key = t.dtype, t.shape, SUM if op == _C10D_SUM else op.op
        call = self._small_calls.get(key)
        if call is None:
            if t.nbytes > self.transport.small_bytes or t.is_complex():
                return False
            if len(self._small_calls) >= _MOST_CALLS:
                self._small_calls.clear()
            call = self._small_calls[key] = self._all_reduce_call([t], op)
        is_flat = t.dim() == 1 and t.stride(0) == 1 and not t.requires_grad
        flat = t if is_flat else flatten(t)
        signature, name, divisor = call
        run = self.transport.all_reduce
        return self._queue.run_now(t.data_ptr(), run, signature, flat, name, divisor)

    def _all_reduce_call(self, tensors: list[Tensor], op: Any) -> tuple[str, str, int]:
        """Return an all-reduce's signature, the transport's name for the operation, the divisor."""
        name, divisor = self._reduction(op, tensors)
        return f"all_reduce({_describe(tensors)}, {name}{'/n' * (divisor > 1)})", name, divisor

    def _queue_all_reduce(self, tensors: list[Tensor], op: Any, opts: Any) -> QueuedWork:
        signature, name, divisor = self._all_reduce_call(tensors, op)
        self._prepare(tensors)

        def run() -> None:
            for t in tensors:
                flat = flatten(t)
                self.transport.all_reduce(signature, flat, name, divisor)
                _copy_back(t, flat)

        return self._put(run, tensors, [], opts)

    def reduce(self, tensors: Any, opts: Any) -> QueuedWork:
        """Reduce to one rank: an all_reduce, of copies on the other ranks. Collective."""
        tensors, root = _as_list(tensors), opts.rootRank
        name, divisor = self._reduction(_op(opts), tensors)
        divided = "/n" * (divisor > 1)
        signature = f"reduce({_describe(tensors)}, {name}{divided}, to {root})"

        def run() -> None:
            for t in tensors:
                flat = flatten(t) if self.rank() == root else flatten(t).clone()
                self.transport.all_reduce(signature, flat, name, divisor)
                if self.rank() == root:
                    _copy_back(t, flat)

        return self._put(run, tensors, [], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> QueuedWork:
        return self._queue_reduce_scatter([output], [[input]], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> QueuedWork:
        return self._queue_reduce_scatter(list(outputs), [[t] for t in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> QueuedWork:
        """Reduce lists of one tensor per rank, and keep this rank's. Collective."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._queue_reduce_scatter(list(outputs), inputs, opts)

    def _queue_reduce_scatter(self, outputs: list[Tensor], inputs: Any, opts: Any) -> QueuedWork:
        op = _op(opts)
        name, divisor = self._reduction(op, outputs)
        signature = f"reduce_scatter({_describe(outputs)}, {name}{'/n' * (divisor > 1)})"
        for out, parts in zip(outputs, inputs, strict=True):
            each = self.size() // len(parts) * out.numel()
            if self.size() % len(parts) or any(
                t.numel() != each or t.dtype != out.dtype for t in parts
            ):
                raise ValueError(
                    f"reduce_scatter to {_describe([out])} wants {self.size()} times as much, and "
                    f"has {_describe(parts)}"
                )

        def run() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                flat = flatten(out)
                self.transport.reduce_scatter(signature, flat, _concatenate(parts), name, divisor)
                _copy_back(out, flat)

        return self._put(run, outputs, [t for parts in inputs for t in parts], opts)

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> QueuedWork:
        tensors = _as_list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        signature = f"broadcast({_describe(tensors)}, from {root})"

        def run() -> None:
            for t in tensors:
                flat = flatten(t)
                self.transport.broadcast(signature, as_bytes(flat), root)
                _copy_back(t, flat)

        return self._put(run, tensors, [], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> QueuedWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> QueuedWork:
        outputs, inputs = list(outputs), list(inputs)
        signature = f"all_gather({_describe(inputs)})"
        for out, t in zip(outputs, inputs, strict=True):
            if out.numel() != t.numel() * self.size() or out.dtype != t.dtype:
                raise ValueError(
                    f"all_gather of {_describe([t])} from {self.size()} ranks does not fit into "
                    f"{_describe([out])}"
                )

        def run() -> None:
            for out, t in zip(outputs, inputs, strict=True):
                flat = flatten(out)
                self.transport.all_gather(signature, as_bytes(flat), as_bytes(flatten(t)))
                _copy_back(out, flat)

        return self._put(run, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> QueuedWork:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        lists, inputs = [list(ts) for ts in outputs], list(inputs)
        signature = f"all_gather({_describe(inputs)})"
        for parts, t in zip(lists, inputs, strict=True):
            if len(parts) != self.size() or any(
                p.numel() != t.numel() or p.dtype != t.dtype for p in parts
            ):
                raise ValueError(
                    f"all_gather of {_describe([t])} from {self.size()} ranks does not fit into "
                    f"{_describe(parts)}"
                )

        def run() -> None:
            for parts, t in zip(lists, inputs, strict=True):
                flat = torch.empty(t.numel() * self.size(), dtype=t.dtype, device="cpu")
                self.transport.all_gather(signature, as_bytes(flat), as_bytes(flatten(t)))
                for part, piece in zip(parts, flat.chunk(self.size()), strict=False):
                    part.copy_(piece.view(part.shape))

        return self._put(run, [t for parts in lists for t in parts], inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
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
    ) -> QueuedWork:
        """Send each rank its rows; their numbers may differ. Collective."""
        if output.dtype != input.dtype:
            raise ValueError(f"all_to_all from {_describe([input])} to {_describe([output])}")
        recv_bytes = self._rows(output, output_splits)
        send_bytes = self._rows(input, input_splits)
        signature = f"all_to_all({str(input.dtype).removeprefix('torch.')})"

        def run() -> None:
            flat = flatten(output)
            data = as_bytes(flatten(input))
            self.transport.all_to_all(signature, as_bytes(flat), data, recv_bytes, send_bytes)
            _copy_back(output, flat)

        return self._put(run, [output], [input], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        outputs, inputs = list(outputs), list(inputs)
        if not len(outputs) == len(inputs) == self.size():
            raise ValueError(
                f"all_to_all wants {self.size()} tensors each way, and has {len(inputs)} to send "
                f"and {len(outputs)} to receive"
            )
        if any(t.dtype != inputs[0].dtype for t in (*inputs, *outputs)):
            raise ValueError(f"all_to_all from {_describe(inputs)} to {_describe(outputs)}")
        signature = f"all_to_all({str(inputs[0].dtype).removeprefix('torch.')})"

        def run() -> None:
            recv_bytes, send_bytes = [t.nbytes for t in outputs], [t.nbytes for t in inputs]
            flat = torch.empty(sum(recv_bytes), dtype=torch.uint8, device="cpu")
            data = _concatenate([as_bytes(flatten(t)) for t in inputs])
            self.transport.all_to_all(signature, flat, data, recv_bytes, send_bytes)
            for t, piece in zip(outputs, torch.split(flat, recv_bytes), strict=True):
                if t.numel():
                    t.copy_(piece.clone().view(t.dtype).view(t.shape))

        return self._put(run, outputs, inputs, opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> QueuedWork | None:
        """Wait for all ranks. Collective; None if it has completed."""
        is_awaited = not getattr(opts, "asyncOp", True)
        if is_awaited and self._queue.run_now(0, self.transport.barrier, "barrier()"):
            return None
        return self._put(lambda: self.transport.barrier("barrier()"), [], [], opts)

    # Operations of the Gloo group

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> QueuedWork:
        (t,), root = _as_list(inputs), opts.rootRank
        parts = [part for parts in outputs for part in parts] if self.rank() == root else []
        signature = f"gather({_describe([t])}, to {root})"
        misfit = self._misfit(parts, t, root)

        def run() -> None:
            flats = [flatten(part) for part in parts]
            into = [[as_bytes(flat) for flat in flats]] if flats else []
            args = into, [as_bytes(flatten(t))], opts
            self._run_by_gloo(signature, self._gloo.gather, *args, misfit=misfit)
            for part, flat in zip(parts, flats, strict=True):
                _copy_back(part, flat)

        return self._put(run, parts, [t], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> QueuedWork:
        (out,), root = _as_list(outputs), opts.rootRank
        parts = [part for parts in inputs for part in parts] if self.rank() == root else []
        signature = f"scatter({_describe([out])}, from {root})"
        misfit = self._misfit(parts, out, root)

        def run() -> None:
            flat = flatten(out)
            of = [[as_bytes(flatten(part)) for part in parts]] if parts else []
            args = [as_bytes(flat)], of, opts
            self._run_by_gloo(signature, self._gloo.scatter, *args, misfit=misfit)
            _copy_back(out, flat)

        return self._put(run, [out], parts, opts)

    def _misfit(self, parts: list[Tensor], t: Tensor, root: int) -> str:
        """Return what is wrong with the root's list of one tensor per rank; "" on other ranks."""
        if self.rank() != root or (
            len(parts) == self.size()
            and all(part.numel() == t.numel() and part.dtype == t.dtype for part in parts)
        ):
            return ""
        return f"the list of rank {root} is {_describe(parts) or 'empty'}"

    def _queue_sparse_all_reduce(self, tensors: list[Tensor], op: Any, opts: Any) -> QueuedWork:
        signature = f"all_reduce(sparse {_describe(tensors)}, {_op_name(op)})"
        opts = opts or dist.AllreduceOptions()

        def run() -> None:
            self._run_by_gloo(signature, self._gloo.allreduce, tensors, opts)

        work = QueuedWork(tensors, StorageUse(tensors), self._queue)
        return self._queue.put(run, work, wait=False)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> TransferWork:
        flats = self._flattened(tensors)
        return TransferWork(self._gloo.send(flats, dst, tag), flats)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> TransferWork:
        return self._receive(tensors, self._gloo.recv, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> TransferWork:
        return self._receive(tensors, self._gloo.recv_anysource, tag)

    def _receive(
        self, tensors: list[Tensor], method: Callable[..., Any], *args: int
    ) -> TransferWork:
        flats = self._flattened(tensors)

        def copy_back() -> None:
            for t, flat in zip(_as_list(tensors), flats, strict=True):
                _copy_back(t, flat)

        return TransferWork(method(flats, *args), flats, copy_back)

    def _flattened(self, tensors: Any) -> list[Tensor]:
        self._check(_as_list(tensors))
        return [flatten(t) for t in _as_list(tensors)]

    def _run_by_gloo(
        self, signature: str, method: Callable[..., Any], *args: Any, misfit: str = ""
    ) -> None:
        """Run an operation of the Gloo group behind a barrier that compares the ranks' calls.

        The queue gives both groups one common order. The barrier protects the process: Gloo aborts
        it when a peer sends what this rank does not expect. `misfit` is what this rank alone cannot
        do. It is part of the call that is compared, so that all ranks raise Mismatch: else the
        others would wait for this rank in Gloo.
        """
        if misfit:
            signature = f"refused {signature}: {misfit}"
        self.transport.barrier(signature)
        if misfit:
            raise TransportError(signature)  # the only rank
        try:
            work = method(*args)
        except (RuntimeError, ValueError, TypeError) as error:
            raise TransportError(f"{signature}, by Gloo: {error}") from None
        self.transport.wait_for(signature, work)

    # Helpers

    def _put(
        self, run: Callable[[], None], results: list[Tensor], read: list[Tensor], opts: Any
    ) -> QueuedWork:
        tensors = results + read
        self._check(tensors)
        work = QueuedWork(results, StorageUse(tensors), self._queue)
        return self._queue.put(run, work, wait=not getattr(opts, "asyncOp", True))

    def _check(self, tensors: list[Tensor]) -> None:
        for t in tensors:
            if t.device.type != "cpu" or t.is_sparse:
                raise ValueError(
                    f"{self.transport.name} supports dense CPU tensors, not {t.layout} on "
                    f"{t.device}"
                )

    def _prepare(self, tensors: list[Tensor]) -> None:
        self._check(tensors)
        for t in tensors:
            if t.is_contiguous() and not is_in_use(t):
                self.transport.prepare(t)

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
                raise ValueError(
                    f"{self.transport.name} cannot combine {t.dtype} by {_op_name(op)}"
                )
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


def _close(queue: WorkQueue, transport: Shm, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child, e.g. a DataLoader worker: the group belongs to its parent
    queue.close()
    finished = queue.join(0.5)
    transport.close(failed=not finished)
    queue.join(1.0)  # an operation that waited for a peer fails once the transport is closed
    # glibc before 2.38 does not reuse an aligned block between two blocks in use (its bug 14581),
    # and what torch keeps of each group can lie there: the heap would grow by a tensor per group.
    return_freed_memory()


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _op(opts: Any) -> Any:
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _describe(tensors: Sequence[Tensor]) -> str:
    """Describe tensors for error messages and for the comparison between ranks."""
    shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:3]]
    rest = tensors[3:]
    if rest:
        whole = zlib.crc32(repr([(t.dtype, tuple(t.shape)) for t in rest]).encode())
        count = sum(t.numel() for t in rest)
        shown.append(f"and {len(rest)} more of {count} elements, #{whole:08x}")
    return " ".join(shown)


def _is_plain(t: Tensor) -> bool:
    """Return whether the memory of a real `t` is its elements in order, and may be written now.

    An inference tensor can be written in inference mode only, and a normal one outside it.
    """
    return (
        type(t) in _PLAIN_TYPES
        and t.is_cpu
        and t.layout == torch.strided
        and t.is_contiguous()
        and not (t.is_neg() or t.is_inference())
        and not torch.is_inference_mode_enabled()
    )


def _copy_back(t: Tensor, flat: Tensor) -> None:
    """Copy the result to `t` if `flatten` had to make a copy."""
    if not t.is_contiguous() or t.is_neg() or t.is_conj():
        # In this order: leaving inference mode turns gradients on.
        with torch.inference_mode(t.is_inference()), torch.no_grad():
            t.copy_(flat.view(t.shape))


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    flats = [flatten(t) for t in parts]
    return flats[0] if len(flats) == 1 else torch.cat(flats)
