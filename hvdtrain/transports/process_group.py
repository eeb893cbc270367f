"""A c10d process group in Python on top of `Shm`.

torch.distributed calls `TransportGroup`. It checks the arguments, flattens the tensors, and queues
the collective (see `work_queue`). send, recv and sparse tensors go through a Gloo group beside it.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain._torch.dynamo import untraced_methods
from hvdtrain._torch.join_work import keep_join_work
from hvdtrain._torch.storage import storage_key
from hvdtrain.liveness.failure import report_causes_first
from hvdtrain.transports.malloc import return_freed_memory
from hvdtrain.transports.shm import Shm
from hvdtrain.transports.shm_calls import SmallCall, small_call
from hvdtrain.transports.transport import (
    REDUCE_OPS,
    SUM,
    TransportError,
    as_bytes,
    copy_back,
    flatten,
    supports,
)
from hvdtrain.transports.work_queue import (
    QueuedWork,
    StorageUse,
    WorkQueue,
    is_in_use,
)

_MOST_CALLS = 1000  # the most entries of the cache of small calls
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_C10D_SUM = dist.ReduceOp.SUM
_STRIDED, _is_inference_mode = torch.strided, torch.is_inference_mode_enabled  # asked every time
_C10dGroup: Any = dist.ProcessGroup  # torch's stubs have overloads that no override could have


@untraced_methods
class TransportGroup(_C10dGroup):  # type: ignore[misc]
    """A process group on a transport, with a Gloo group beside it.

    Gloo handles sparse tensors, which need no speed, and send and recv, which are not collective.
    """

    def __init__(self, transport: Shm, gloo: Any) -> None:
        super().__init__(transport.rank, transport.size)
        keep_join_work()
        report_causes_first()
        self.transport = transport
        self._gloo = gloo
        self._group_name = self._group_desc = ""
        self._small_calls: dict[tuple[torch.dtype, torch.Size, Any], SmallCall] = {}
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
        is_awaited = not getattr(opts, "asyncOp", True)  # torch 2.7 lacks it
        is_small = is_awaited and type(tensors) is list and len(tensors) == 1
        if is_small and self._all_reduce_now(tensors[0], opts.reduceOp):
            return None
        tensors = _as_list(tensors)
        if tensors[0].is_sparse:
            return self._queue_sparse_all_reduce(tensors, opts)
        return self._queue_all_reduce(tensors, opts)

    def _all_reduce_now(self, t: Tensor, op: Any) -> bool:
        """Reduce a small tensor in the caller's thread; return False if it must be queued instead.

        Keeps the call, once its arguments have been checked, by dtype, shape and operation.
        """
        if not _is_plain(t):
            return False
        key = t.dtype, t.shape, SUM if op == _C10D_SUM else op.op
        call = self._small_calls.get(key)
        if call is None:
            if t.is_complex() or t.nbytes > self.transport.small_bytes:
                return False
            if len(self._small_calls) >= _MOST_CALLS:
                self._small_calls.clear()
            signature, *how = self._reduction("all_reduce", [t], op)
            call = self._small_calls[key] = small_call(signature, t.dtype, t.nbytes, *how)
        return self._queue.run_now(t.data_ptr(), self.transport.all_reduce_small, call, t)

    def _reduction(
        self, kind: str, tensors: list[Tensor], op: Any, more: str = ""
    ) -> tuple[str, str, int]:
        """Return a reduction's signature, the transport's name for the operation, the divisor."""
        is_mean = op == dist.ReduceOp.AVG
        name = SUM if is_mean else REDUCE_OPS.get(getattr(op, "op", op), "")
        divisor = self.size() if is_mean else 1
        for t in tensors:
            if is_mean and not (t.is_floating_point() or t.is_complex()):
                raise ValueError(f"AVG of {t.dtype} would not be a mean; use SUM and divide")
            if not supports(name, t.dtype):
                raise ValueError(
                    f"{self.transport.name} cannot combine {t.dtype} by {_op_name(op)}"
                )
        divided = "/n" * (divisor > 1)
        return f"{kind}({_describe(tensors)}, {name}{divided}{more})", name, divisor

    def _queue_all_reduce(
        self, tensors: Any, opts: Any = None, root: int | None = None
    ) -> QueuedWork:
        """Reduce each tensor in place; with a `root` only there, and from copies elsewhere."""
        tensors = _as_list(tensors)
        kind, more = ("all_reduce", "") if root is None else ("reduce", f", to {root}")
        signature, name, divisor = self._reduction(kind, tensors, _op(opts), more)
        has_result = root in (None, self.rank())
        self._check(tensors)
        for t in tensors:
            if root is None and t.is_contiguous() and not is_in_use(t):
                self.transport.prepare(t)

        def run() -> None:
            for t in tensors:
                flat = flatten(t) if has_result else flatten(t).clone()
                self.transport.all_reduce(signature, flat, name, divisor)
                if has_result:
                    copy_back(flat, [t])

        return self._put(run, tensors, [], opts)

    allreduce_coalesced = _queue_all_reduce

    def reduce(self, tensors: Any, opts: Any) -> QueuedWork:
        """Reduce to one rank: an all_reduce, of copies on the other ranks. Collective."""
        return self._queue_all_reduce(tensors, opts, self._root(opts.rootRank))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> QueuedWork:
        return self.reduce_scatter([output], [[input]], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> QueuedWork:
        return self.reduce_scatter(outputs, [[t] for t in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> QueuedWork:
        """Reduce lists of one tensor per rank, and keep this rank's. Collective."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        outputs = list(outputs)
        signature, name, divisor = self._reduction("reduce_scatter", outputs, _op(opts))
        for out, parts in zip(outputs, inputs, strict=True):
            # The list may also hold longer tensors, each of several ranks.
            self._check_parts("reduce_scatter", parts, math.gcd(len(parts), self.size()), out)

        def run(out: Tensor, data: Tensor) -> None:
            self.transport.reduce_scatter(signature, out, data.view(out.dtype), name, divisor)

        return self._put_lists(run, [[out] for out in outputs], inputs, opts)

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> QueuedWork:
        tensors = _as_list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        signature = f"broadcast({_describe(tensors)}, from {self._root(root)})"

        def run() -> None:
            for t in tensors:
                flat = flatten(t)
                self.transport.broadcast(signature, as_bytes(flat), root)
                copy_back(flat, [t])

        return self._put(run, tensors, [], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> QueuedWork:
        return self._queue_all_gather([[output]], [input], 1, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> QueuedWork:
        return self._queue_all_gather([[out] for out in outputs], list(inputs), 1, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> QueuedWork:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        lists = [list(parts) for parts in outputs]
        return self._queue_all_gather(lists, list(inputs), self.size(), opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        """Fill one list per rank with that rank's tensors. Collective."""
        return self.allgather(zip(*outputs, strict=True), inputs, opts)

    def _queue_all_gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], num_parts: int, opts: Any
    ) -> QueuedWork:
        """Gather each input into its list of `num_parts` tensors: one per rank, or one for all."""
        signature = f"all_gather({_describe(inputs)})"
        for parts, t in zip(outputs, inputs, strict=True):
            self._check_parts("all_gather", parts, num_parts, t)

        def run(out: Tensor, data: Tensor) -> None:
            self.transport.all_gather(signature, as_bytes(out), as_bytes(data))

        return self._put_lists(run, outputs, [[t] for t in inputs], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> QueuedWork:
        """Send each rank its rows; their numbers may differ. Collective."""
        received, sent = self._rows(output, output_splits), self._rows(input, input_splits)
        return self._queue_all_to_all([output], [input], received, sent, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> QueuedWork:
        received, sent = list(outputs), list(inputs)
        if not len(received) == len(sent) == self.size():
            raise ValueError(
                f"all_to_all needs {self.size()} tensors to send and as many to receive, "
                f"not {len(sent)} and {len(received)}"
            )
        return self._queue_all_to_all(received, sent, received, sent, opts)

    def _queue_all_to_all(
        self,
        results: list[Tensor],
        read: list[Tensor],
        received: list[Tensor],
        sent: list[Tensor],
        opts: Any,
        signature: str = "",
    ) -> QueuedWork:
        """Send each rank its tensor of `sent`, and receive one from each. They are the tensors
        `read` and `results`, or parts of these.

        Without a `signature` it is that of all_to_all, whose tensors all have one dtype.
        """
        if not signature:
            if len({t.dtype for t in (*received, *sent)}) > 1:
                raise ValueError(f"all_to_all from {_describe(sent)} to {_describe(received)}")
            signature = f"all_to_all({str(sent[0].dtype).removeprefix('torch.')})"

        def run() -> None:
            flats, datas = ([flatten(t) for t in tensors] for tensors in (received, sent))
            written = {storage_key(t.untyped_storage()) for t in results}
            if any(storage_key(t.untyped_storage()) in written for t in read):
                datas = [t.clone() for t in datas]
            self.transport.all_to_all(
                signature, [as_bytes(t) for t in flats], [as_bytes(t) for t in datas]
            )
            for flat, t in zip(flats, received, strict=True):
                copy_back(flat, [t])

        return self._put(run, results, read, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> QueuedWork:
        """Collect every rank's tensor in the root's list. Collective."""
        (t,) = _as_list(inputs)
        signature, whole, part = self._rooted(f"gather({_describe([t])}, to", t, outputs, opts)
        return self._queue_all_to_all(whole, [t], whole, part, opts, signature)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> QueuedWork:
        """Send every rank its tensor of the root's list. Collective."""
        (t,) = _as_list(outputs)
        signature, whole, part = self._rooted(f"scatter({_describe([t])}, from", t, inputs, opts)
        return self._queue_all_to_all([t], whole, part, whole, opts, signature)

    def _rooted(
        self, call: str, t: Tensor, lists: Any, opts: Any
    ) -> tuple[str, list[Tensor], list[Tensor]]:
        """Return the signature, and what this rank's list and `t` exchange with each rank.

        A list of the root that does not fit is part of the signature, so that all ranks raise
        Mismatch: else the others would wait for the root.
        """
        root, size, nothing = opts.rootRank, self.size(), torch.empty(0, device="cpu")
        signature, part = f"{call} {self._root(root)})", [nothing] * size
        part[root] = t
        if self.rank() != root:
            return signature, [nothing] * size, part
        whole = list(chain(*lists))
        if not self._fits(whole, size, t):
            shown = _describe(whole) or "empty"
            signature = f"refused {signature}: the list of rank {root} is {shown}"
            if size == 1:  # no other rank's call differs
                raise TransportError(signature)
        return signature, whole, part

    def barrier(self, opts: Any = None, timeout: Any = None) -> QueuedWork | None:
        """Wait for all ranks. Collective; None if it has completed."""
        is_awaited = not getattr(opts, "asyncOp", True)
        if is_awaited and self._queue.run_now(0, self.transport.barrier, "barrier()"):
            return None
        return self._put(lambda: self.transport.barrier("barrier()"), [], [], opts)

    # Operations of the Gloo group

    def _queue_sparse_all_reduce(self, tensors: list[Tensor], opts: Any) -> QueuedWork:
        """Queue an all-reduce by Gloo behind a barrier that compares the ranks' calls.

        The queue gives both groups one common order. The barrier protects the process: Gloo aborts
        it when a peer sends what this rank does not expect.
        """
        signature = f"all_reduce(sparse {_describe(tensors)}, {_op_name(_op(opts))})"

        def run() -> None:
            self.transport.barrier(signature)
            try:
                work = self._gloo.allreduce(tensors, opts or dist.AllreduceOptions())
            except (RuntimeError, ValueError, TypeError) as error:
                raise TransportError(f"{signature}, by Gloo: {error}") from None
            self.transport.wait_for(signature, work)

        return self._queue.put(run, tensors, tensors, wait=False)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        return self._transfer(self._gloo.send, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        return self._transfer(self._gloo.recv, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        return self._transfer(self._gloo.recv_anysource, tensors, tag)

    def _transfer(self, start: Callable[..., Any], tensors: list[Tensor], *args: int) -> Any:
        """Return Gloo's work, which the caller keeps until it is complete."""
        tensors = _as_list(tensors)
        self._check(tensors)
        flats = [flatten(t) for t in tensors]
        copied = [f.data_ptr() for f in flats] != [t.data_ptr() for t in tensors]
        if copied and start != self._gloo.send:
            raise ValueError(f"recv: {_describe(tensors)} is not contiguous; use a copy")
        work = start(flats, *args)
        weakref.finalize(work, StorageUse(flats).end)  # until then they must not be moved
        return work

    # Helpers

    def _put_lists(
        self, run: Callable[[Tensor, Tensor], None], outputs: Any, inputs: Any, opts: Any
    ) -> QueuedWork:
        """Queue `run(out, data)` for each list of outputs and its list of inputs, both flat.

        One tensor stays as it is, several become bytes.
        """
        pairs = list(zip(outputs, inputs, strict=True))

        def run_each() -> None:
            for outs, ins in pairs:
                if len(outs) == 1:
                    out = flatten(outs[0])
                else:
                    num_bytes = sum(t.nbytes for t in outs)
                    out = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                flats = [flatten(t) for t in ins]
                data = flats[0] if len(flats) == 1 else torch.cat([as_bytes(t) for t in flats])
                run(out, data)
                copy_back(out, outs)

        return self._put(run_each, list(chain(*outputs)), list(chain(*inputs)), opts)

    def _put(
        self, run: Callable[[], None], results: list[Tensor], read: list[Tensor], opts: Any
    ) -> QueuedWork:
        tensors = results + read
        self._check(tensors)
        return self._queue.put(run, results, tensors, wait=not getattr(opts, "asyncOp", True))

    def _check(self, tensors: list[Tensor]) -> None:
        for t in tensors:
            if t.device.type != "cpu" or t.is_sparse:
                raise ValueError(
                    f"{self.transport.name} supports dense CPU tensors, not {t.layout} on "
                    f"{t.device}; for another device use a group of its own, also beside "
                    f"'cpu:{self.transport.name},cuda:nccl': dist.new_group(backend='nccl')"
                )

    def _root(self, root: int) -> int:
        """Return a root, which torch does not check."""
        if not 0 <= root < self.size():
            raise ValueError(f"invalid root rank: {root} of {self.size()} ranks")
        return root

    def _fits(self, parts: Sequence[Tensor], num_parts: int, t: Tensor) -> bool:
        """Return whether `parts` are `num_parts` equal tensors that hold a `t` of every rank."""
        part = self.size() // num_parts * t.numel(), t.dtype
        return [(p.numel(), p.dtype) for p in parts] == [part] * num_parts

    def _check_parts(self, kind: str, parts: Sequence[Tensor], num_parts: int, t: Tensor) -> None:
        if not self._fits(parts, num_parts, t):
            raise ValueError(
                f"{kind} of {self.size()} ranks, {_describe([t])} each, does not fit "
                f"{_describe(parts) or 'an empty list'}"
            )

    def _rows(self, t: Tensor, splits: Sequence[int] | None) -> list[Tensor]:
        """Return the rows of `t` that belong to each rank."""
        if not t.dim():
            raise ValueError(f"all_to_all cannot split {_describe([t])}: it has no rows")
        rows = t.shape[0]
        splits = list(splits or [rows // self.size()] * self.size())
        if sum(splits) != rows or len(splits) != self.size():
            raise ValueError(
                f"{rows} rows cannot be divided among {self.size()} ranks by splits {splits}"
            )
        return list(torch.split(t.detach(), splits))


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
        and t.layout == _STRIDED
        and t.is_contiguous()
        and not (t.is_neg() or t.is_inference() or _is_inference_mode())
    )
