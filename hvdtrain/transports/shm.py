"""The transport `shm`: collectives in the shared memory of one host, with Gloo between hosts.

`hvdtrain.transports.open_shm` makes process groups of it. An all-reduce divides the elements among
the ranks of a host. Between two barriers each rank adds up its share over the buffers of all local
ranks, in rank order, and writes the sum to all of them, a cache-sized block at a time. So it reads
and writes as many bytes as its tensor has, which is the lower bound for tensors that are in shared
memory already (see `shm_buffers`); others are copied through a staging area. With several hosts
each share is also reduced across hosts, by Gloo, before it is written, so that every rank does its
part of the traffic (reduce-scatter, all-reduce, all-gather, as in NCCL's and BlueConnect's trees).

Every operation begins with a comparison of call signatures:

    each rank:      write the call, and the buffer of its tensor, to its slot;  local barrier
    several hosts:  local rank 0 all-gathers the hosts' calls by Gloo;  local barrier
    each rank:      read all calls; raise Mismatch if they mismatch

    operation                                  one host        several hosts
    all_reduce, reduce_scatter, barrier        shared memory   shared memory, Gloo between
    broadcast, all_gather, all_to_all          shared memory   Gloo
    reduce, gather, scatter, send, recv,
    sparse tensors                             Gloo            Gloo
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.errors import first_line
from hvdtrain.peers import PeerLost, exchange
from hvdtrain.transports.arrivals import Arrivals
from hvdtrain.transports.gloo import Connections, open_gloo
from hvdtrain.transports.heartbeat import Heartbeat, HeartbeatTable
from hvdtrain.transports.shm_buffers import SharedBuffers
from hvdtrain.transports.shm_sync import (
    CHECK_S,
    HEADER_BYTES,
    SLOT_BYTES,
    HostBarrier,
    LivenessCheck,
    RankMemory,
    SharedMapping,
    create_memfd,
    map_peer,
)
from hvdtrain.transports.transport import (
    HALVES,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    Combiner,
    Transport,
    as_bytes,
    check_splits,
    ends_within,
    mismatch,
    share_bounds,
)

STAGING_BYTES = 4 << 20  # a rank has two such areas: one is filled while the other is read
_SMALL_BYTES = 64 << 10  # up to here every rank adds up all elements, which saves a barrier
# A call: number of the tensor's shared buffer (0: none), its descriptor and size, the tensor's
# offset in it; lengths of the two fields that follow: freed buffers, text of the call.
_SLOT = struct.Struct("<QiQQHH")
_MAX_FREED = 16  # freed buffers that one operation can report
_TEXT_BYTES = SLOT_BYTES - _SLOT.size - 8 * _MAX_FREED
_CAUSE_S = 4.0  # how long after a failure of Gloo to look for the lost rank
_HOST_CALLS_BYTES = 2048  # the calls of one host's ranks, in the all-gather across hosts
# Dtypes that Gloo cannot add up, or not well, and the wider ones that are used instead.
_WIDER = {torch.int16: torch.int32, **dict.fromkeys(HALVES, torch.float32)}


@dataclass
class _Call:
    """The content of a rank's slot: its call, and the shared buffer that contains its tensor."""

    signature: bytes
    buffer: int
    fd: int
    buffer_bytes: int
    offset: int


class Shm(Transport):
    """One rank of a group in shared memory. Making one is collective.

    `gloo` is a Gloo group over the same ranks, and `connections` are its sockets. Raises PeerLost
    if a rank does not join in time.
    """

    name = "shm"

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        gloo: Any,
        connections: Connections,
    ) -> None:
        self.rank = rank
        self.size = size
        self._gloo = gloo
        self._connections = [connections]
        self._sequence = 0
        self.buffers = SharedBuffers()
        self.hosts, memories = _group_by_host(store, rank, size, timeout_s)
        hosts, local_ranks = self.hosts, next(host for host in self.hosts if rank in host)
        self.local_rank = local_ranks.index(rank)
        self._barrier = HostBarrier(memories, self.local_rank, local_ranks, timeout_s)
        # Local ranks below this number own a share. Each needs a partner on every host, so there
        # are as many as the smallest host has ranks.
        self._num_owners = min(map(len, hosts)) if len(hosts) > 1 else len(local_ranks)
        self._combine = Combiner().combine
        self._staging_areas = [torch.split(memory.staging, STAGING_BYTES) for memory in memories]
        self._cross_host_group: Any = None
        self._heartbeat: Heartbeat | None = None
        if len(hosts) > 1:
            self._connect_hosts(store, timeout_s)

    @property
    def timeout_s(self) -> float:
        """How long an operation waits for a late rank, in seconds."""
        return self._barrier.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._barrier.timeout_s = seconds

    def _connect_hosts(self, store: Store, timeout_s: float) -> None:
        """Connect the ranks with the same local rank on all hosts, and start the heartbeat."""
        memory = self._barrier.memories[0].memory[HEADER_BYTES + 2 * STAGING_BYTES :]
        table = HeartbeatTable(memory, self.hosts, self.hosts.index(self._barrier.ranks))
        self._barrier.heartbeats = table
        if self.local_rank >= self._num_owners:
            return
        peers = [host[self.local_rank] for host in self.hosts]
        name, place = PrefixStore(f"across/{self.local_rank}", store), peers.index(self.rank)
        self._cross_host_group, connections = open_gloo(name, place, len(peers), timeout_s)
        self._connections.append(connections)
        if self.local_rank == 0:
            address, status = connections.address(), self._barrier.local_status
            self._heartbeat = Heartbeat(store, table, address, status, timeout_s)

    def close(self, failed: bool) -> None:
        """Release everything. Not collective; twice is safe."""
        self._barrier.leave(failed)
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._barrier.close()
        self.buffers.close()
        self._cross_host_group = None

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Return bytes in shared memory; None if they cannot be allocated there."""
        return self.buffers.allocate(num_bytes)

    def prepare(self, t: Tensor) -> None:
        """Move a tensor into shared memory if that pays. Not collective.

        Called in the caller's thread, while nothing else uses the tensor's storage.
        """
        self.buffers.prepare(t)

    # Operations

    def barrier(self, signature: str) -> None:
        self._compare_calls(signature)

    def all_reduce(self, signature: str, t: Tensor, op: str, divisor: int = 1) -> None:
        num_bytes = t.numel() * t.element_size()
        if len(self.hosts) == 1 and num_bytes <= _SMALL_BYTES:
            self._compare_calls(signature, staged=as_bytes(t))
            self._combine(self._all_staged(num_bytes, t.dtype), op, divisor, [t])
            return
        calls, shared = self._compare_calls(signature, t)
        if shared:
            self._reduce_shared(signature, self._map_buffers(calls, t), op, divisor)
            self._barrier.wait(signature)
            return
        for piece in torch.split(t, STAGING_BYTES // t.element_size()):
            staged = self._next_staging()[: piece.numel() * t.element_size()]
            staged.copy_(as_bytes(piece))
            self._barrier.wait(signature)
            self._reduce_shared(signature, self._all_staged(staged.numel(), t.dtype), op, divisor)
            self._barrier.wait(signature)
            piece.copy_(staged.view(t.dtype))

    def _reduce_shared(self, signature: str, buffers: list[Tensor], op: str, divisor: int) -> None:
        """Reduce this rank's share of the local ranks' buffers, and write it to all of them."""
        if self.local_rank >= self._num_owners:
            return
        begin, end = share_bounds(buffers[0].numel(), self._num_owners, self.local_rank)
        mine = [b[begin:end] for b in buffers]
        if self._cross_host_group is None:
            self._combine(mine, op, divisor, mine)
            return
        if begin == end:
            return  # the share is empty on every host, so no partner waits
        total = torch.empty(end - begin, dtype=_WIDER.get(mine[0].dtype, mine[0].dtype))
        self._combine(mine, op, 1, [total])
        self._reduce_across_hosts(signature, total, op)
        if divisor > 1:
            total.div_(divisor)
        for b in mine:
            b.copy_(total)

    def _reduce_across_hosts(self, signature: str, t: Tensor, op: str) -> None:
        """Reduce a share in place over its owners on all hosts."""
        if t.dtype == torch.bool:  # Gloo would add bools as numbers
            op = {SUM: MAX, PRODUCT: MIN}.get(op, op)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        self.wait_for(signature, self._cross_host_group.allreduce([t], options))

    def reduce_scatter(
        self, signature: str, out: Tensor, t: Tensor, op: str, divisor: int = 1
    ) -> None:
        if len(self.hosts) > 1:
            everything = t.clone()
            self.all_reduce(signature, everything, op, divisor)
            out.copy_(everything.view(self.size, -1)[self.rank])
            return
        calls, shared = self._compare_calls(signature, t)
        if shared:
            theirs = [b.view(self.size, -1)[self.rank] for b in self._map_buffers(calls, t)]
            self._combine(theirs, op, divisor, [out])
            self._barrier.wait(signature)
            return
        columns = STAGING_BYTES // self.size // t.element_size()
        for begin in range(0, out.numel(), columns):
            piece = t.view(self.size, -1)[:, begin : begin + columns]
            num_bytes = piece.numel() * t.element_size()
            self._next_staging()[:num_bytes].view(t.dtype).view(piece.shape).copy_(piece)
            self._barrier.wait(signature)
            staged = self._all_staged(num_bytes, t.dtype)
            theirs = [s.view(self.size, -1)[self.rank] for s in staged]
            self._combine(theirs, op, divisor, [out[begin : begin + columns]])

    def broadcast(self, signature: str, data: Tensor, root: int) -> None:
        self._compare_calls(signature)
        if len(self.hosts) > 1:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self.wait_for(signature, self._gloo.broadcast([data], options))
            return
        for piece in torch.split(data, STAGING_BYTES):
            mine = self._next_staging()
            if self.rank == root:
                mine[: piece.numel()].copy_(piece)
            self._barrier.wait(signature)
            if self.rank != root:
                piece.copy_(self._all_staged(piece.numel(), torch.uint8)[root])

    def all_gather(self, signature: str, out: Tensor, data: Tensor) -> None:
        if len(self.hosts) > 1:
            self._compare_calls(signature)
            self.wait_for(signature, self._gloo._allgather_base(out, data))
            return
        rows = out.view(self.size, -1)
        if data.numel() <= _SMALL_BYTES:
            self._compare_calls(signature, staged=data)
            for row, theirs in zip(rows, self._all_staged(data.numel(), torch.uint8), strict=True):
                row.copy_(theirs)
            return
        self._compare_calls(signature)
        for begin in range(0, data.numel(), STAGING_BYTES):
            piece = data[begin : begin + STAGING_BYTES]
            self._next_staging()[: piece.numel()].copy_(piece)
            self._barrier.wait(signature)
            staged = self._all_staged(piece.numel(), torch.uint8)
            for row, theirs in zip(rows, staged, strict=True):
                row[begin : begin + STAGING_BYTES].copy_(theirs)

    def all_to_all(
        self,
        signature: str,
        out: Tensor,
        data: Tensor,
        recv_bytes: list[int],
        send_bytes: list[int],
    ) -> None:
        splits = self._exchange_splits(signature, recv_bytes, send_bytes)
        if len(self.hosts) > 1:
            self.wait_for(signature, self._gloo.alltoall_base(out, data, recv_bytes, send_bytes))
            return
        cell = STAGING_BYTES // self.size
        outs, datas = torch.split(out, recv_bytes), torch.split(data, send_bytes)
        for begin in range(0, max(max(row) for row, _ in splits), cell):
            mine = self._next_staging()
            for r, piece in enumerate(datas):
                part = piece[begin : begin + cell]
                mine[r * cell : r * cell + part.numel()].copy_(part)
            self._barrier.wait(signature)
            at = self.rank * cell
            for piece, theirs in zip(
                outs, self._all_staged(STAGING_BYTES, torch.uint8), strict=True
            ):
                part = piece[begin : begin + cell]
                part.copy_(theirs[at : at + part.numel()])

    def _exchange_splits(
        self, signature: str, recv_bytes: list[int], send_bytes: list[int]
    ) -> list[Any]:
        """Return what every rank sends and receives. Raises Mismatch on all ranks if it differs."""
        table = torch.empty(2 * self.size * self.size, dtype=torch.int64)
        self.all_gather(signature, as_bytes(table), as_bytes(torch.tensor(send_bytes + recv_bytes)))
        splits = table.view(self.size, 2, self.size).tolist()
        check_splits(signature, splits)
        return splits

    def _next_staging(self) -> Tensor:
        """Return this rank's staging area for the next exchange. Two areas alternate."""
        self._sequence += 1
        area: Tensor = self._staging_areas[self.local_rank][self._sequence % 2]
        return area

    def _all_staged(self, num_bytes: int, dtype: torch.dtype) -> list[Tensor]:
        """Return what the local ranks have put into their current staging areas."""
        return [areas[self._sequence % 2][:num_bytes].view(dtype) for areas in self._staging_areas]

    # The comparison of calls

    def _compare_calls(
        self, signature: str, t: Tensor | None = None, staged: Tensor | None = None
    ) -> tuple[list[_Call], bool]:
        """Wait for all ranks and compare their calls.

        `staged` are bytes to put into the staging area before. Return the slots of this host's
        ranks, and whether `t` is in shared memory on all ranks of all hosts. Raises Mismatch on all
        ranks if they called different collectives.
        """
        area = self._next_staging()
        if staged is not None:
            area[: staged.numel()].copy_(staged)
        self._write_slot(signature, t)
        recorder = Arrivals.current
        begin = time.monotonic() if recorder is not None else 0.0
        self._barrier.wait(signature)
        slots = [self._read_slot(i) for i in range(len(self._barrier.ranks))]
        shared = all(slot.buffer for slot in slots)
        calls = {
            rank: slot.signature for rank, slot in zip(self._barrier.ranks, slots, strict=True)
        }
        if len(self.hosts) > 1:
            calls, shared = self._compare_across_hosts(signature, calls, shared)
        if recorder is not None:
            recorder.add_wait(begin)
        if len(set(calls.values())) > 1:
            raise mismatch({r: call.decode(errors="replace") for r, call in calls.items()})
        return slots, shared

    def _compare_across_hosts(
        self, signature: str, calls: dict[int, bytes], shared: bool
    ) -> tuple[dict[int, bytes], bool]:
        """All-gather the calls, and `shared`, across hosts through each host's local rank 0.

        Return the calls of all ranks, and whether `shared` is true on all hosts. A host whose ranks
        agree sends one call, in full; any other sends all of them, shortened.
        """
        self._sequence += 1
        leaders_area = self._staging_areas[0][self._sequence % 2]
        num_bytes = len(self.hosts) * _HOST_CALLS_BYTES
        if self.local_rank == 0:
            alike = len(set(calls.values())) == 1
            limit = _TEXT_BYTES if alike else (_HOST_CALLS_BYTES - 32) // len(calls) // 2 - 4
            texts = [call[:limit].hex() for call in calls.values()][: 1 if alike else None]
            text = json.dumps([texts, shared]).encode().ljust(_HOST_CALLS_BYTES)
            theirs = torch.empty(num_bytes, dtype=torch.uint8)
            ours = torch.frombuffer(bytearray(text[:_HOST_CALLS_BYTES]), dtype=torch.uint8)
            self.wait_for(signature, self._cross_host_group._allgather_base(theirs, ours))
            leaders_area[:num_bytes].copy_(theirs)
        self._barrier.wait(signature)
        calls = {}
        rows = leaders_area[:num_bytes].view(len(self.hosts), -1)
        for ranks, row in zip(self.hosts, rows, strict=True):
            texts, all_shared = json.loads(bytes(row.tolist()))
            shared = shared and all_shared
            calls |= zip(ranks, itertools.cycle(bytes.fromhex(text) for text in texts))
        return dict(sorted(calls.items())), shared

    def _write_slot(self, signature: str, t: Tensor | None) -> None:
        """Write this rank's call to its slot, with its tensor's buffer and the freed buffers."""
        slot = self._barrier.memories[self.local_rank].slot(self._sequence)
        buffer = self.buffers.find(t) if t is not None else None
        number, fd, num_bytes, offset = 0, -1, 0, 0
        if buffer is not None and t is not None:
            number, fd, num_bytes = buffer.number, buffer.fd, buffer.num_bytes
            offset = int(t.storage_offset()) * t.element_size()
        freed = self.buffers.take_freed(_MAX_FREED)
        text = signature.encode()[:_TEXT_BYTES]
        _SLOT.pack_into(slot, 0, number, fd, num_bytes, offset, len(freed), len(text))
        if freed:
            struct.pack_into(f"<{len(freed)}Q", slot, _SLOT.size, *freed)
        at = _SLOT.size + 8 * len(freed)
        slot[at : at + len(text)] = text

    def _read_slot(self, i: int) -> _Call:
        """Return the slot of local rank `i`, and unmap the buffers that it reports as freed."""
        slot = self._barrier.memories[i].slot(self._sequence)
        number, fd, num_bytes, offset, num_freed, length = _SLOT.unpack_from(slot)
        if num_freed:
            self.buffers.unmap(i, struct.unpack_from(f"<{num_freed}Q", slot, _SLOT.size))
        at = _SLOT.size + 8 * num_freed
        return _Call(bytes(slot[at : at + length]), number, fd, num_bytes, offset)

    def _map_buffers(self, calls: list[_Call], t: Tensor) -> list[Tensor]:
        """Return the same tensor of every rank of this host, as views of their shared memory."""
        size = t.numel() * t.element_size()
        buffers = []
        for i, call in enumerate(calls):
            if i == self.local_rank:
                buffers.append(t)
                continue
            pid = self._barrier.memories[i].pid
            try:
                whole = self.buffers.map_peer(i, pid, call.buffer, call.fd, call.buffer_bytes)
            except OSError as error:  # most likely the peer has exited
                signature = call.signature.decode(errors="replace")
                self._await_cause(LivenessCheck(self._barrier, signature))
                rank = self._barrier.ranks[i]
                raise self._barrier.give_up(
                    signature, [rank], f"has memory that cannot be mapped: {error}"
                ) from error
            buffers.append(whole[call.offset : call.offset + size].view(t.dtype))
        return buffers

    # Waiting for Gloo

    def wait_for(self, signature: str, work: Any) -> None:
        """Wait for an operation of Gloo, with liveness checks. Raises PeerLost.

        Gloo alone reports a lost rank late, and without its number.
        """
        liveness = LivenessCheck(self._barrier, signature)
        try:
            while not ends_within(work, CHECK_S):
                liveness.check()
        except PeerLost:
            self._shut_down()
            raise
        except RuntimeError as error:
            self._shut_down()
            self._await_cause(liveness)
            why = f"was lost, by Gloo: {first_line(error)}"
            raise self._barrier.give_up(signature, [], why) from error

    def _await_cause(self, liveness: LivenessCheck) -> None:
        """Raise PeerLost as soon as the exit of a rank is known; return after `_CAUSE_S`.

        An exit becomes known a moment after the rank's connections and memory have disappeared.
        """
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            liveness.check()
            time.sleep(CHECK_S / 4)

    def _shut_down(self) -> None:
        """Shut the Gloo connections down: pending operations fail here and on the peers."""
        for connections in self._connections:
            connections.shut_down()


# Rendezvous: which ranks share memory


def _group_by_host(
    store: Store, rank: int, size: int, timeout_s: float
) -> tuple[list[list[int]], list[RankMemory]]:
    """Return the ranks grouped by host, and the memories of this host's ranks. Collective."""
    total = HEADER_BYTES + 2 * STAGING_BYTES + HeartbeatTable.size_bytes(size)
    fd = create_memfd(total)
    try:
        mapping = SharedMapping(fd, total)
        mine = RankMemory(mapping, os.getpid())
        mine.init()
        secret = secrets.token_bytes(16)
        mine.staging[:16].copy_(torch.frombuffer(bytearray(secret), dtype=torch.uint8))
        own = {"pid": os.getpid(), "fd": fd, "secret": secret.hex(), "host": _shared_namespace()}
        process_info = exchange(store, "process", rank, size, own, timeout_s)
        memories = {rank: mine}
        for r, other in enumerate(process_info):
            if r != rank and other["host"] == own["host"]:
                with suppress(OSError, ValueError):
                    peer = RankMemory(map_peer(other["pid"], other["fd"], total), other["pid"])
                    if bytes(peer.staging[:16].tolist()).hex() == other["secret"]:
                        memories[r] = peer
        reached = exchange(store, "reached", rank, size, sorted(memories), timeout_s)
    finally:
        os.close(fd)
    groups: list[list[int]] = []
    for r, ranks in enumerate(reached):
        if all(reached[other] == ranks for other in ranks):
            if ranks not in groups:
                groups.append(ranks)
        else:
            groups.append([r])  # a peer reached other memories: this rank counts as its own host
    groups.sort()
    here = next(group for group in groups if rank in group)
    return groups, [memories[r] for r in here]


def _shared_namespace() -> str:
    """Return a text that is equal only for processes that can share memory and a network.

    It combines the boot id with the network and PID namespaces.
    """
    parts = []
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
    for kind in ("net", "pid"):
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(parts)
