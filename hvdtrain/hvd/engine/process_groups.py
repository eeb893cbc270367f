"""The engine's own process groups, and waits on them that end when a peer is lost.

The executor and the bucket channels use them. A wait is split into slices of a second, and between
two slices it checks whether the control plane has reported a lost rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain import transports
from hvdtrain.errors import first_line
from hvdtrain.hvd.engine.operation import AVERAGE, MAX, MIN, PRODUCT, SUM
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.transports.gloo import open_gloo
from hvdtrain.transports.transport import ends_within

REDUCE_OPS = {
    AVERAGE: dist.ReduceOp.SUM,  # the engine divides: see `batch`
    SUM: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}
_SLICE_S = 1.0
# The control plane reports a peer that is late or lost; this limit is for when it cannot.
_LIMIT_S = 24 * 3600.0
# In error texts for tensors that torch or a transport does not support. All ranks raise them alike,
# and the connections stay intact.
_REFUSALS = ("scalar type", "not supported", "nsupported", "not implemented for", "cannot combine")
# By default threads of torch's end the process when a peer is lost. The control plane notices it as
# well, and the caller gets an error that elastic training recovers from.
_NCCL_WATCHES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_CONNECT_CHECK_S = 0.05
_CLOSE_S = 0.5  # the longest time to close a group without pending operations
_SHUT_DOWN_S = 3.0  # the same once its connections have been shut down


class ProcessGroups:
    """The process groups of one engine, by name. The executor makes and drops them, in the same
    order on all ranks.

    `transport` is for CPU tensors. `abort_reason()` returns why the job is over, or None. An
    operation takes at most `limit_s` seconds; 0 means 24 hours.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        transport: str,
        connect_s: float,
        abort_reason: Callable[[], str | None],
        limit_s: float = 0.0,
    ) -> None:
        self._limit = timedelta(seconds=limit_s or _LIMIT_S)
        self.transport = transport
        self._store = store
        self._connect_s = connect_s
        self._rank = rank
        self._abort_reason = abort_reason
        self._groups: dict[str, tuple[Any, Any]] = {}  # with their connections, of Gloo only

    def get(self, label: str, members: list[int], device: str) -> Any:
        """Return the group of this name over these ranks. The first call is collective over them.

        Raises ConnectionBroken if the group cannot be made.
        """
        transport = self._transport(device)
        name = f"{label}/{transport}"
        opened = self._groups.get(name)
        if opened is None:
            if (reason := self._abort_reason()) is not None:
                raise ConnectionBroken(reason)  # some ranks would not join
            store = PrefixStore(name, self._store)
            rank, size = members.index(self._rank), len(members)
            try:
                if transport == "nccl":
                    opened = _open_nccl(store, rank, size, self._connect_s), None
                else:
                    opened = self._open(transport, store, rank, size)
            except ConnectionBroken:
                raise
            except RuntimeError as error:
                raise ConnectionBroken(f"could not connect {name}: {error}") from None
            opened[0]._set_default_timeout(self._limit)
            self._groups[name] = opened
        return opened[0]

    def _open(self, transport: str, store: Store, rank: int, size: int) -> tuple[Any, Any]:
        """Return a group, and Gloo's connections. Raises ConnectionBroken as soon as the control
        plane has lost a peer: Gloo itself would wait for it until the timeout.
        """
        opened: list[Any] = []

        def connect() -> None:
            try:
                if transport == "gloo":
                    opened.append(open_gloo(store, rank, size, self._connect_s))
                else:
                    limit = timedelta(seconds=self._connect_s)
                    opened.append((transports.OPEN[transport](store, rank, size, limit), None))
            except BaseException as error:
                opened.append(error)

        connecting = threading.Thread(target=connect, name="hvd-connect", daemon=True)
        connecting.start()
        while connecting.is_alive():
            connecting.join(_CONNECT_CHECK_S)
            if not opened and (reason := self._abort_reason()) is not None:
                raise ConnectionBroken(reason)  # the thread ends at the timeout
        (result,) = opened
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[no-any-return]

    def _transport(self, device: str) -> str:
        if device == "CPU":
            return self.transport
        return "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"

    def activity(self, kind: str, device: str) -> str:
        """Return Horovod's name for the innermost timeline event of an operation."""
        what = "BCAST" if kind == "broadcast" else kind.upper()
        return f"{self._transport(device).upper()}_{what}"

    def drop(self, label: str | None = None) -> None:
        """Close the groups of a channel or process set, by default all. An operation that still
        waits for a peer fails, also on the peer.

        A thread that waits in Gloo is left behind: if a connection breaks in the middle of a
        message, Gloo (of torch 2.13) does not tell the operation that sends or receives it, which
        then waits for its own limit.
        """
        names = [n for n in list(self._groups) if label in (None, n.rpartition("/")[0])]
        dropped = {name: self._groups.pop(name) for name in names}
        of_gloo = [connections for _, connections in dropped.values() if connections is not None]
        failed = self._abort_reason() is not None

        def end() -> None:
            for name, (group, _) in dropped.items():
                if failed and name.endswith("/nccl") and hasattr(group, "abort"):
                    # Its kernels wait on the GPU for a peer that is lost.
                    threading.Thread(target=group.abort, name="hvd-abort", daemon=True).start()
                elif not name.endswith("/gloo"):  # whose groups end with their memory
                    group.shutdown()
            dropped.clear()

        closer = threading.Thread(target=end, name="hvd-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_S)
        if closer.is_alive():
            for connections in of_gloo:
                # Gloo's destructor waits for operations that wait for a peer.
                connections.shut_down()
        closer.join(_SHUT_DOWN_S)

    def wait(
        self, work: Any, cuda: bool = False, give_up: Callable[[], str | None] | None = None
    ) -> None:
        """Wait for an operation. Raises ConnectionBroken if a peer is lost, or the job is over.

        `give_up()` may return a further reason to stop waiting.
        """
        try:
            if cuda:
                work.wait()  # blocks the current stream, not this thread
                return
            while not ends_within(work, _SLICE_S):
                reason = self._abort_reason() or (give_up() if give_up is not None else None)
                if reason is not None:
                    raise ConnectionBroken(reason)
        except ConnectionBroken:
            raise
        except RuntimeError as error:
            if is_refusal(error):
                raise
            raise ConnectionBroken(first_line(error)) from None


class ConnectionBroken(HorovodInternalError):
    """A connection has failed, so no operation can complete any more."""


def is_refusal(error: Exception) -> bool:
    """Return whether an error is about a dtype or operation that no rank can reduce."""
    return any(phrase in str(error) for phrase in _REFUSALS)


def all_reduce(group: Any, tensor: Tensor, op: int) -> Any:
    """Start an in-place reduction; return the work to wait for."""
    options = dist.AllreduceOptions()
    options.reduceOp = REDUCE_OPS[op]  # type: ignore[assignment]
    if hasattr(options, "asyncOp"):  # torch 2.7 lacks it: all its operations are asynchronous
        options.asyncOp = True
    return group.allreduce([tensor], options)


def broadcast(group: Any, tensor: Tensor, root: int) -> Any:
    """Start to overwrite a tensor with that of member `root`; return the work to wait for."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([tensor], options)


def _open_nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    before = {name: os.environ.get(name) for name in _NCCL_WATCHES}
    os.environ.update(_NCCL_WATCHES)
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
