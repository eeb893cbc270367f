"""A channel between hosts over any MPI, by mpi4py. It uses MPI's non-blocking collectives, because
a blocking one could not be abandoned when a rank is lost.

MPI cannot wake up a sleeping rank, so a pending rank polls, at growing intervals. After an
operation a thread goes on polling (`mpi_progress`), because a peer may still need the end of this
rank's messages. MPI cannot shut down cleanly once a rank is lost, because MPI_Finalize waits for
it: a process that has lost one calls MPI_Abort at exit.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain.errors import BackendUnavailable, PeerLost
from hvdtrain.job.rendezvous import load_mpi
from hvdtrain.job.store_exchange import exchange
from hvdtrain.job.world import detect, may_be_mpi
from hvdtrain.liveness.failure import abort_mpi_at_exit
from hvdtrain.transports.mpi_progress import progress_thread
from hvdtrain.transports.transport import TransportError

# How a pending rank polls: without a pause, then yielding the core, then sleeping in between.
_SPIN_S = 50e-6
_YIELD_S = 1e-3
_SHORTEST_S, _LONGEST_S = 20e-6, 200e-6
_MOST_BYTES = 1 << 30  # of a message: MPI counts in 32 bits
_ANSWER_S = 1.5  # for the ranks to say that they have joined a communicator

_created = itertools.count()
_pending: set[_MpiWork] = set()
"""Buffers that MPI may still write to; kept for ever if a rank is lost."""


def init_mpi() -> Any:
    """Return `mpi4py.MPI`, initialised with thread support. Collective on the first call.

    Raises BackendUnavailable if no MPI launcher has started this process or mpi4py is missing,
    WorldMismatch if mpi4py uses another MPI.
    """
    world = detect()
    if not may_be_mpi(world):
        raise BackendUnavailable(
            f"mpi4py needs ranks that MPI's own launcher has started, and {world.started_by} has "
            f"started this process; use mpirun, or another transport"
        )
    mpi = load_mpi(world)
    level = mpi.Query_thread()
    if level < mpi.THREAD_MULTIPLE:
        names = "SINGLE", "FUNNELED", "SERIALIZED"  # with other numbers in MPI 5 than in MPI 4
        name = next(name for name in names if getattr(mpi, f"THREAD_{name}") == level)
        raise TransportError(
            f"MPI runs at MPI_THREAD_{name}, but the transport mpi4py needs MPI_THREAD_MULTIPLE, "
            f"because each of its groups has a thread; leave mpi4py.rc.thread_level at its "
            f"default, or use an MPI built with threads"
        )
    return mpi


def open_mpi_channel(store: Store, rank: int, size: int, timeout_s: float) -> MpiChannel:
    """Open a channel between the ranks that share `store`. Collective over these ranks only.

    Raises PeerLost if a rank does not join in time, and what `init_mpi` raises.
    """
    mpi = init_mpi()
    world = mpi.COMM_WORLD
    progress_thread(mpi)  # the first rank that is done may have to serve the others
    mine = [world.Get_rank(), next(_created)]
    members = exchange(store, "member", rank, size, mine, timeout_s)
    # Groups that are made at the same time need different tags: combine the world rank of the
    # group's rank 0 with the number of groups that this process has made.
    leader, count = members[0]
    tag = (count * world.Get_size() + leader) % (world.Get_attr(mpi.TAG_UB) + 1)
    created: Future[Any] = Future()

    def create() -> None:
        try:
            all_ranks = world.Get_group()
            group = all_ranks.Incl([member for member, _ in members])
            comm = world.Create_group(group, tag)
            group.Free()
            all_ranks.Free()
            created.set_result(comm)
        except BaseException as error:
            created.set_exception(error)

    # In a thread, because it blocks and has no timeout: a rank can hang after the exchange.
    threading.Thread(target=create, name="mpi-connect", daemon=True).start()
    try:
        has_ended = bool(wait([created], timeout_s).done)
    except BaseException:  # Ctrl-C: MPI_Finalize would wait for the thread
        abort_mpi_at_exit()
        raise
    if has_ended:
        store.set(f"connected/{rank}", "true")
        return MpiChannel(mpi, created.result())
    abort_mpi_at_exit()
    reason = "all ranks answer"
    try:
        exchange(store, "connected", rank, size, False, _ANSWER_S)
    except PeerLost as error:
        reason = str(error)
    raise PeerLost(f"MPI_Comm_create_group did not complete within {timeout_s:g} s: {reason}")


class MpiChannel:
    """A channel with a communicator of its own. Its methods are those of `GlooChannel`."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm

    def broadcast(self, t: Tensor, root: int) -> Any:
        pieces = map(self._memory, torch.split(t, _MOST_BYTES))
        return _MpiWork(self._mpi, [self._comm.Ibcast(piece, root) for piece in pieces], t)

    def all_gather(self, out: Tensor, t: Tensor) -> Any:
        if out.nbytes > _MOST_BYTES:  # MPI's own counts all of it
            each = [t.nbytes] * self._comm.Get_size()
            return self.all_to_all(out, t.repeat(len(each)), each, each)
        request = self._comm.Iallgather(self._memory(t), self._memory(out))
        return _MpiWork(self._mpi, [request], out, t)

    def all_to_all(
        self, out: Tensor, t: Tensor, recv_bytes: list[int], send_bytes: list[int]
    ) -> Any:
        requests = [
            start(self._memory(piece), peer)
            for start, memory, counts in (
                (self._comm.Irecv, out, recv_bytes),
                (self._comm.Isend, t, send_bytes),
            )
            for peer, part in enumerate(torch.split(memory, counts))
            for piece in torch.split(part, _MOST_BYTES)
        ]
        return _MpiWork(self._mpi, requests, out, t)

    def shut_down(self) -> None:
        abort_mpi_at_exit()  # MPI has no other way to give up an operation

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: `wait` has the timeout."""

    def close(self) -> None:
        if not self._mpi.Is_finalized():
            self._comm.Free()

    def _memory(self, t: Tensor) -> list[Any]:
        """Return the bytes of `t` as MPI takes them."""
        # By address, not by NumPy: a storage that NumPy has exported can no longer be resized, and
        # FSDP resizes its storages.
        return [self._mpi.buffer.fromaddress(t.data_ptr(), t.nbytes), self._mpi.BYTE]


class _MpiWork:
    """An operation that MPI has begun, and the tensors that it uses, kept until it completes."""

    def __init__(self, mpi: Any, requests: list[Any], *tensors: Tensor) -> None:
        self._mpi, self._requests, self._tensors = mpi, requests, tensors
        self._error = ""
        _pending.add(self)

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise its error, at once."""
        if self in _pending:
            try:
                if not self._mpi.Request.Testall(self._requests):
                    return False
            except self._mpi.Exception as error:
                self._error = f"by MPI: {error}"
            _pending.discard(self)
            progress_thread(self._mpi).poll_soon()
        return True

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        """Wait up to `timeout`. Raises RuntimeError if it has failed, or has not completed."""
        begin, pause_s = time.monotonic(), _SHORTEST_S
        while not self.is_completed():
            waited_s = time.monotonic() - begin
            if waited_s > timeout.total_seconds():
                raise RuntimeError("it has not completed yet")
            if waited_s > _YIELD_S:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
            elif waited_s > _SPIN_S:
                os.sched_yield()
        if self._error:
            raise RuntimeError(self._error)
