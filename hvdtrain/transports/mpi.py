"""The transport `mpi4py`: collectives over any MPI, through point-to-point messages of mpi4py.

`hvdtrain.transports.open_mpi` makes process groups of it. Every operation begins with an exchange
of headers between all pairs of ranks. So all ranks detect a mismatch before data move, small
operations need no second message, and a rank whose header is missing is a missing rank:

    rank a                                              rank b
      |<--- header: digest of the call[, small data] ---->|   both ways at once, tag _HEADER
      |<--- header: text of the call -------------------->|   if digests differ: both raise Mismatch
      |<=== pieces of large data ========================>|   tag _DATA
      |<--- "alive" ------------------------------------->|   if a rank is late: the liveness check
      |---- failure notice: the reason ------------------>|   a raises PeerLost, then b

Large all-reduces go in pieces that stay in the cache: each rank receives its share of a piece from
all others, adds them up in rank order, and sends the sum to all. MPI's own collectives are not used
for that: blocking ones cannot be cancelled, and none adds 16-bit floats in float32. MPI cannot
wake up a sleeping rank, so a pending rank polls, at growing intervals. After an operation a thread
goes on polling (`mpi_progress`), because a peer may still need the end of this rank's messages.

The number of messages grows with the pairs of ranks, which suits tens of ranks, not thousands.

MPI cannot shut down cleanly once a rank is lost, because MPI_Finalize waits for it: a process that
has raised PeerLost calls MPI_Abort at exit.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import struct
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.errors import BackendUnavailable, PeerLost
from hvdtrain.job.rendezvous import load_mpi
from hvdtrain.job.store_exchange import exchange, open_prefix
from hvdtrain.job.world import detect, may_be_mpi
from hvdtrain.transports.gloo import gloo_options
from hvdtrain.transports.malloc import use_huge_pages
from hvdtrain.transports.mpi_progress import progress_thread
from hvdtrain.transports.transport import (
    Combiner,
    Transport,
    TransportError,
    as_bytes,
    call_text,
    check_splits,
    mismatch,
    share_bounds,
)

# The size of the pieces of large data: bytes per rank, and the most in all. Two pieces fit into
# scratch memory, and they are large enough that ranks on one core seldom wait for each other.
SHARE_BYTES, MAX_PIECE_BYTES = 4 << 20, 32 << 20
_HUGE_BYTES = 4 << 20  # tensors of at least so many bytes are moved into huge pages
_GATHERED_BYTES = 64 << 10  # up to this total, ranks send all data to all, which saves a step
_HEADER_BYTES = 2048  # sent eagerly by every MPI, and takes little longer than one byte
_CALL = struct.Struct("<8sQ")  # digest of the call, size in bytes
_TEXT_BYTES = 768
_MAX_VIEWS = 100  # cached views of the headers: making one takes as long as a message
_HEADER, _DATA, _GAVE_UP, _ALIVE = range(4)  # tags

# How a pending rank polls: without a pause, then yielding the core, then sleeping in between.
_SPIN_S = 50e-6
_YIELD_S = 1e-3
_SHORTEST_S, _LONGEST_S = 20e-6, 200e-6
_MOVED_S = 100e-6  # a test that takes longer has moved data, and more are likely to come at once
_CHECK_S = 0.5  # interval of the checks for a failure notice
_LIVENESS_S = 1.5  # duration of a liveness check: three such intervals

_created = itertools.count()
_abandoned: list[Any] = []  # requests that may never complete, and buffers they still use


def open_mpi(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a process group over MPI. Collective; `store` must have its own key prefix.

    Raises BackendUnavailable if no MPI launcher has started this process or mpi4py is missing,
    WorldMismatch if mpi4py uses another MPI, RuntimeError if a rank does not join in time.
    """
    from hvdtrain.transports.process_group import TransportGroup

    mpi = init_mpi()
    store = open_prefix(store, rank, size, timeout.total_seconds())
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, gloo_options(timeout))
    comm = _connect(mpi, store, rank, size, timeout)
    return TransportGroup(Mpi(mpi, comm, timeout.total_seconds()), gloo)


def init_mpi() -> Any:
    """Return `mpi4py.MPI`, initialised with thread support. Collective on the first call."""
    world = detect()
    if not may_be_mpi(world):
        starter = "no launcher" if world.launcher == "none" else world.launcher
        raise BackendUnavailable(
            f"mpi4py needs ranks that MPI's own launcher has started, and {starter} has started "
            f"this process; use mpirun, or another transport"
        )
    mpi = load_mpi(world)
    level = mpi.Query_thread()
    if level < mpi.THREAD_MULTIPLE:
        names = ("SINGLE", "FUNNELED", "SERIALIZED")
        known = {getattr(mpi, f"THREAD_{name}"): name for name in names}
        raise TransportError(
            f"MPI runs at MPI_THREAD_{known.get(level, level)}, and the transport mpi4py needs "
            f"MPI_THREAD_MULTIPLE, for its groups have threads of their own; leave "
            f"mpi4py.rc.thread_level at its default, or use an MPI that is built with threads"
        )
    return mpi


def _connect(mpi: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make the communicator of the ranks that share `store`. Collective over these ranks only."""
    world = mpi.COMM_WORLD
    progress_thread(mpi)  # the first rank that is done may have to serve the others
    mine = [world.Get_rank(), next(_created)]
    timeout_s = timeout.total_seconds()
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
        _abort_at_exit(mpi)
        raise
    if has_ended:
        store.set(f"connected/{rank}", "true")
        return created.result()
    _abort_at_exit(mpi)
    reason = "all ranks answer"
    try:
        exchange(store, "connected", rank, size, False, _LIVENESS_S)
    except PeerLost as error:
        reason = str(error)
    raise PeerLost(f"MPI_Comm_create_group did not complete within {timeout_s:g} s: {reason}")


class Mpi(Transport):
    """One rank of a group over MPI, with a communicator of its own."""

    name = "mpi4py"

    def __init__(self, mpi: Any, comm: Any, timeout_s: float) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.timeout_s = timeout_s
        self._mpi = mpi
        self._comm = comm
        self._progress = progress_thread(mpi)
        self._piece_bytes = min(SHARE_BYTES * self.size, MAX_PIECE_BYTES)
        self._broken = False
        self._reason = ""  # why this rank gave up
        self._alive_sent: set[int] = set()  # ranks that were sent an "alive" message
        self._combine = Combiner().combine
        self._closed = False
        self._closing = threading.Lock()
        self._peers = [r for r in range(self.size) if r != self.rank]
        # A header must hold all_to_all's plan: the number of bytes to and from every rank.
        header_bytes = max(_HEADER_BYTES, _CALL.size + 16 * self.size)
        self._payload_bytes = header_bytes - _CALL.size
        self._headers = torch.zeros(self.size, header_bytes, dtype=torch.uint8, device="cpu")
        self._payloads = self._headers[:, _CALL.size :]
        rows = [row.numpy() for row in self._headers]
        self._calls = [memoryview(row)[: _CALL.size] for row in rows]
        # Receives, then sends, each in the order of `_peers`: `_Requests` pairs them with ranks.
        self._header_requests = [
            *(comm.Recv_init([rows[r], mpi.BYTE], r, _HEADER) for r in self._peers),
            *(comm.Send_init([rows[self.rank], mpi.BYTE], r, _HEADER) for r in self._peers),
        ]
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}
        self._in_huge_pages: set[tuple[int, int]] = set()  # address and bytes of large tensors

    def close(self, failed: bool) -> None:
        """Release everything. Twice is safe. Collective, as MPI_Comm_free is, unless `failed`."""
        with self._closing:
            was_closed, self._closed = self._closed, True
        if was_closed or failed or self._broken or self._mpi.Is_finalized():
            # An operation that still runs in another thread uses the communicator.
            _abandoned.append((self._comm, self._header_requests, self._headers))
            return
        for request in self._header_requests:
            request.Free()
        self._comm.Free()

    # Operations

    def barrier(self, signature: str) -> None:
        self._compare_calls(signature, 0)

    def all_reduce(self, signature: str, t: Tensor, op: str, divisor: int = 1) -> None:
        num_bytes = t.nbytes
        if num_bytes <= self._payload_bytes:
            views = self._payload_views(num_bytes, t.dtype)
            views[self.rank].copy_(t)
            self._compare_calls(signature, num_bytes)
            self._combine(views, op, divisor, [t])
            return
        self._compare_calls(signature, num_bytes)
        if num_bytes * len(self._peers) <= _GATHERED_BYTES:
            gathered = self._scratch_for("gathered", self.size * t.numel(), t.dtype)
            every_rank = gathered.view(self.size, -1)
            every_rank[self.rank].copy_(t)
            recv_tensors = {r: every_rank[r] for r in self._peers}
            self._exchange(signature, recv_tensors, dict.fromkeys(self._peers, t))
            self._combine(list(every_rank), op, divisor, [t])
            return
        self._use_huge_pages(t)
        pieces = [_shares(p, self.size) for p in _pieces(t, self._piece_bytes // t.element_size())]
        sums = [shares[self.rank] for shares in pieces]
        self._reduce_pieces(signature, pieces, sums, op, divisor, gather=True)

    def _reduce_pieces(
        self,
        signature: str,
        pieces: list[list[Tensor]],
        sums: list[Tensor],
        op: str,
        divisor: int,
        gather: bool,
    ) -> None:
        """Reduce this rank's share of each piece into `sums`, while the next piece arrives.

        `pieces[k][r]` is rank r's share of piece k. `gather`: send the sums to all ranks, too.
        """
        num_in_flight = min(2, len(pieces))
        # Rank 0's share of the first piece is the largest of all. This rank's own would not do: a
        # shorter last piece can have a larger one, since shares are rounded up to 64 elements.
        largest = pieces[0][0]
        buffers = [self._receive_buffers(f"share {k}", largest) for k in range(num_in_flight)]
        pending = self._start_share(pieces[0], buffers[0])
        for k, shares in enumerate(pieces):
            self._wait(signature, pending)
            pending = _Requests()
            if k + 1 < len(pieces):
                pending = self._start_share(pieces[k + 1], buffers[(k + 1) % 2])
            every_rank = self._by_rank(shares[self.rank], buffers[k % 2])
            self._combine(every_rank, op, divisor, [sums[k]])
            if gather:
                recv_tensors = {r: shares[r] for r in self._peers}
                pending += self._start(recv_tensors, dict.fromkeys(self._peers, sums[k]))
        self._wait(signature, pending)

    def reduce_scatter(
        self, signature: str, out: Tensor, t: Tensor, op: str, divisor: int = 1
    ) -> None:
        num_bytes = t.nbytes
        parts = t.view(self.size, -1)
        if num_bytes <= self._payload_bytes:
            self._compare_calls(signature, num_bytes, as_bytes(t))
            views = self._payload_views(num_bytes, t.dtype)
            mine = [view.view(self.size, -1)[self.rank] for view in views]
            self._combine(mine, op, divisor, [out])
            return
        self._compare_calls(signature, num_bytes)
        self._use_huge_pages(out, t)
        columns = max(1, self._piece_bytes // self.size // t.element_size())
        outs = _pieces(out, columns)
        pieces = [list(rows) for rows in zip(*(_pieces(p, columns) for p in parts), strict=True)]
        self._reduce_pieces(signature, pieces, outs, op, divisor, gather=False)

    def broadcast(self, signature: str, data: Tensor, root: int) -> None:
        if data.numel() <= self._payload_bytes:
            self._compare_calls(signature, data.numel(), data if self.rank == root else None)
            if self.rank != root:
                data.copy_(self._payload_views(data.numel(), torch.uint8)[root])
            return
        self._compare_calls(signature, data.numel())
        if not self._peers:
            return
        self._use_huge_pages(data)
        # The root sends each peer one share, and the peers exchange their shares.
        others = [r for r in range(self.size) if r != root]
        for piece in _pieces(data, self._piece_bytes):
            shares = dict(zip(others, _shares(piece, len(others)), strict=True))
            if self.rank == root:
                self._exchange(signature, {}, shares)
                continue
            mine = shares.pop(self.rank)
            self._exchange(signature, {root: mine}, {})
            self._exchange(signature, shares, dict.fromkeys(shares, mine))

    def all_gather(self, signature: str, out: Tensor, data: Tensor) -> None:
        rows = out.view(self.size, -1)
        if data.numel() <= self._payload_bytes:
            self._compare_calls(signature, data.numel(), data)
            rows.copy_(self._payloads[:, : data.numel()])
            return
        self._compare_calls(signature, data.numel())
        self._use_huge_pages(out, data)
        for begin in range(0, data.numel(), MAX_PIECE_BYTES):
            end = begin + MAX_PIECE_BYTES
            recv_tensors = {r: rows[r][begin:end] for r in self._peers}
            pending = self._start(recv_tensors, dict.fromkeys(self._peers, data[begin:end]))
            rows[self.rank][begin:end].copy_(data[begin:end])
            self._wait(signature, pending)

    def all_to_all(
        self,
        signature: str,
        out: Tensor,
        data: Tensor,
        recv_bytes: list[int],
        send_bytes: list[int],
    ) -> None:
        plan = torch.tensor([*send_bytes, *recv_bytes], device="cpu")
        self._compare_calls(signature, 0, as_bytes(plan))
        views = self._payload_views(16 * self.size, torch.int64)
        check_splits(signature, [view.view(2, self.size).tolist() for view in views])
        self._use_huge_pages(out, data)
        outs, datas = torch.split(out, recv_bytes), torch.split(data, send_bytes)
        for begin in range(0, max(recv_bytes + send_bytes), MAX_PIECE_BYTES):
            end = begin + MAX_PIECE_BYTES
            recv_tensors = {r: outs[r][begin:end] for r in self._peers if begin < recv_bytes[r]}
            send_tensors = {r: datas[r][begin:end] for r in self._peers if begin < send_bytes[r]}
            pending = self._start(recv_tensors, send_tensors)
            outs[self.rank][begin:end].copy_(datas[self.rank][begin:end])
            self._wait(signature, pending)

    def _scratch_for(self, use: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return scratch memory, kept for each use: new memory costs more than the work in it."""
        scratch = self._scratch.get((use, dtype))
        if scratch is None or scratch.numel() < count:
            with torch.inference_mode(False):
                scratch = torch.empty(count, dtype=dtype, device="cpu")
            self._scratch[use, dtype] = scratch
            self._use_huge_pages(scratch)
        return scratch[:count]

    def _use_huge_pages(self, *tensors: Tensor) -> None:
        """Move large tensors into huge pages, each the first time that it is used."""
        for t in tensors:
            memory = t.data_ptr(), t.nbytes
            if t.nbytes >= _HUGE_BYTES and memory not in self._in_huge_pages:
                if len(self._in_huge_pages) >= _MAX_VIEWS:
                    self._in_huge_pages.clear()
                self._in_huge_pages.add(memory)
                use_huge_pages(t)

    def _receive_buffers(self, use: str, share: Tensor) -> dict[int, Tensor]:
        """Return a receive buffer for every peer's version of this rank's share, by peer."""
        scratch = self._scratch_for(use, self.size * share.numel(), share.dtype).view(self.size, -1)
        return {r: scratch[r] for r in self._peers}

    def _by_rank(self, mine: Tensor, theirs: dict[int, Tensor]) -> list[Tensor]:
        """Return every rank's version of a share, in rank order."""
        parts = {r: scratch[: mine.numel()] for r, scratch in theirs.items()}
        return [mine if r == self.rank else parts[r] for r in range(self.size)]

    # The comparison of calls

    def _compare_calls(self, signature: str, num_bytes: int, payload: Tensor | None = None) -> None:
        """Wait for all ranks, and exchange headers, with their payloads.

        Raises Mismatch on all ranks if their calls differ.
        """
        if self._broken:
            raise PeerLost(f"{signature}: an earlier collective of this group was given up")
        _CALL.pack_into(self._calls[self.rank], 0, _digest(signature), num_bytes)
        if payload is not None:
            self._payloads[self.rank][: payload.numel()].copy_(payload)
        if not self._peers:
            return
        self._exchange_headers(signature)
        if any(call != self._calls[self.rank] for call in self._calls):
            self._raise_mismatch(signature)

    def _exchange_headers(self, signature: str, liveness_check: bool = False) -> None:
        self._mpi.Prequest.Startall(self._header_requests)
        self._wait(signature, _Requests(self._header_requests, self._peers * 2), liveness_check)

    def _payload_views(self, num_bytes: int, dtype: torch.dtype) -> list[Tensor]:
        """Return views of the payloads in all ranks' headers, by rank."""
        views = self._views.get((num_bytes, dtype))
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            # A view made in inference mode could not be written outside that mode.
            with torch.inference_mode(False):
                views = [row[:num_bytes].view(dtype) for row in self._payloads]
            self._views[num_bytes, dtype] = views
        return views

    def _raise_mismatch(self, signature: str) -> None:
        """Raise Mismatch with every rank's call. All ranks run this, and exchange the texts."""
        text = torch.frombuffer(bytearray(call_text(signature, _TEXT_BYTES)), dtype=torch.uint8)
        self._payloads[self.rank][:_TEXT_BYTES].zero_()
        self._payloads[self.rank][: text.numel()].copy_(text)
        self._exchange_headers(signature)
        texts = [row[:_TEXT_BYTES].numpy().tobytes().rstrip(b"\0") for row in self._payloads]
        sizes = [_CALL.unpack(call)[1] for call in self._calls]
        calls = {r: call.decode(errors="replace") for r, call in enumerate(texts)}
        if len(set(texts)) == 1:
            calls = {r: f"{call} of {sizes[r]} bytes" for r, call in calls.items()}
        raise mismatch(calls)

    # Messages

    def _exchange(
        self, signature: str, recv_tensors: dict[int, Tensor], send_tensors: dict[int, Tensor]
    ) -> None:
        self._wait(signature, self._start(recv_tensors, send_tensors))

    def _start_share(self, shares: list[Tensor], buffers: dict[int, Tensor]) -> _Requests:
        """Start receiving every peer's version of this rank's share, and sending peers theirs."""
        mine = shares[self.rank].numel()
        recv_tensors = {r: buffers[r][:mine] for r in self._peers}
        return self._start(recv_tensors, {r: shares[r] for r in self._peers})

    def _start(self, recv_tensors: dict[int, Tensor], send_tensors: dict[int, Tensor]) -> _Requests:
        """Start messages from and to ranks; skip empty ones."""
        started = _Requests()
        for start, tensors in ((self._comm.Irecv, recv_tensors), (self._comm.Isend, send_tensors)):
            for r, t in tensors.items():
                if t.numel():
                    # By address, not by NumPy: a storage that NumPy has exported can no longer be
                    # resized, and FSDP resizes its storages.
                    memory = self._mpi.buffer.fromaddress(t.data_ptr(), t.nbytes)
                    request = start([memory, self._mpi.BYTE], r, _DATA)
                    started += _Requests([request], [r], [t])
        return started

    def wait_for(self, signature: str, work: Any) -> None:
        """Wait for an operation of Gloo. If it fails, a liveness check finds the lost rank."""
        try:
            super().wait_for(signature, work)
        except PeerLost as error:
            self._exchange_headers(str(error), liveness_check=True)
            self._give_up(_Requests())
            raise

    def _wait(self, signature: str, started: _Requests, liveness_check: bool = False) -> None:
        """Wait for messages, up to the timeout. Raises PeerLost naming the ranks that are missing.

        `liveness_check`: this is a liveness check, which lasts `_LIVENESS_S`.
        """
        test, requests = self._mpi.Request.Testall, started.requests
        try:
            if test(requests):
                return
            begin = idle_since = time.monotonic()
            next_check = begin + min(_CHECK_S, self.timeout_s)
            pause_s = _SHORTEST_S
            while True:
                tested = time.monotonic()
                if test(requests):
                    return
                now = time.monotonic()
                if now - tested > _MOVED_S:
                    idle_since, pause_s = now, _SHORTEST_S
                if now > next_check:
                    late = now - begin > (_LIVENESS_S if liveness_check else self.timeout_s)
                    self._check_peers(signature, started, late, liveness_check)
                    next_check = now + min(_CHECK_S, self.timeout_s)
                if now - idle_since < _SPIN_S:
                    continue
                if now - idle_since < _YIELD_S:
                    os.sched_yield()
                    continue
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
        except BaseException as error:  # Ctrl-C leaves requests pending, too
            self._give_up(started)
            if isinstance(error, self._mpi.Exception):
                raise PeerLost(f"{signature}, by MPI: {error}") from None
            raise
        finally:
            if started.tensors:
                self._progress.poll_soon()

    def _check_peers(
        self, signature: str, started: _Requests, late: bool, liveness_check: bool
    ) -> None:
        """Raise PeerLost if a peer gave up, if this wait is `late`, or if another thread has closed
        the group; answer peers' checks.
        """
        if self._closed:
            raise PeerLost(f"{signature}: the group was closed meanwhile")
        status = self._mpi.Status()
        if self._comm.Iprobe(self._mpi.ANY_SOURCE, _GAVE_UP, status):
            text = bytearray(status.Get_count(self._mpi.BYTE))
            self._comm.Recv([text, self._mpi.BYTE], status.Get_source(), _GAVE_UP)
            self._reason = text.decode()
            why = f", for {self._reason}" if text else ""
            raise PeerLost(
                f"{signature}: rank {status.Get_source()} has given up{why}; "
                f"rank {self.rank} waited"
            )
        if late:
            # Testall frees requests only once all are done, so each still has its status.
            pairs = zip(started.requests, started.ranks, strict=True)
            missing = self._check_liveness({r for q, r in pairs if not q.Get_status()})
            who = ", ".join(f"rank {r}" for r in missing) or "a peer"
            how = (
                "does not answer"
                if liveness_check
                else f"did not arrive within {self.timeout_s:g} s"
            )
            self._reason = f"{who} {how}"
            raise PeerLost(f"{signature}: {self._reason}; rank {self.rank} waited")

        for r in self._peers:
            if self._comm.Iprobe(r, _ALIVE):
                self._send_alive(r)

    def _check_liveness(self, missing: set[int]) -> list[int]:
        """Return the ranks that failed the liveness check; all of `missing` if none failed.

        A rank that is only waiting itself answers at its next poll. Runs once per group: after a
        liveness check the group is given up.
        """
        for r in self._peers:  # they may be running a liveness check on this rank
            self._send_alive(r)
        silent = set(missing)
        deadline = time.monotonic() + _LIVENESS_S
        while silent and time.monotonic() < deadline:
            tags = (_ALIVE, _GAVE_UP)
            silent -= {r for r in silent if any(self._comm.Iprobe(r, tag) for tag in tags)}
            time.sleep(_LONGEST_S)
        return sorted(silent or missing)

    def _send_alive(self, rank: int) -> None:
        """Send a rank an "alive" message, once."""
        if rank not in self._alive_sent:
            self._alive_sent.add(rank)
            _abandoned.append(self._comm.Isend([b"", self._mpi.BYTE], rank, _ALIVE))

    def _give_up(self, started: _Requests) -> None:
        """Mark the group as broken, send the peers the reason, and call MPI_Abort at exit."""
        self._broken = True
        _abandoned.append(started)
        reason = self._reason.encode()
        _abandoned.append(reason)
        with suppress(self._mpi.Exception):
            for r in self._peers:
                _abandoned.append(self._comm.Isend([reason, self._mpi.BYTE], r, _GAVE_UP))
        _abort_at_exit(self._mpi)


@dataclass
class _Requests:
    """MPI requests, each with its peer's rank, and the tensors that they use, kept alive."""

    requests: list[Any] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def __iadd__(self, other: _Requests) -> _Requests:
        self.requests += other.requests
        self.ranks += other.ranks
        self.tensors += other.tensors
        return self


def _abort_at_exit(mpi: Any) -> None:
    """Call MPI_Abort at exit, because MPI_Finalize would wait for a lost rank. Twice is safe."""
    atexit.unregister(_abort)
    atexit.register(_abort, mpi)


def _abort(mpi: Any) -> None:
    if not mpi.Is_finalized():
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


@lru_cache(maxsize=1024)
def _digest(signature: str) -> bytes:
    return hashlib.blake2b(signature.encode(), digest_size=8).digest()


def _shares(t: Tensor, parts: int) -> list[Tensor]:
    """Divide a tensor into `parts` parts, some of which may be empty."""
    return [t[slice(*share_bounds(t.numel(), parts, k))] for k in range(parts)]


def _pieces(t: Tensor, count: int) -> list[Tensor]:
    return [t[begin : begin + count] for begin in range(0, t.numel(), count)]
