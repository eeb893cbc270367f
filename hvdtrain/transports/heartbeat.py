"""The heartbeat between the hosts of one group: progress and liveness of every rank.

`shm` uses it on several hosts. Within a host the shared memory and the kernel show a peer's status;
of ranks on other hosts Gloo reports only that some connection closed or timed out. So the leader
of each host, its local rank 0, runs a thread that sends the status of its host's ranks to all other
leaders, over connections of its own, and writes what it receives to a table in shared memory:

    leader of host a                                     leader of host b
      |---- one row per rank of a, every 0.2 s ------------>|  writes the rows to b's table
      |<--- one row per rank of b, every 0.2 s -------------|
      no row for 2 s: b's leader is STOPPED;  connection closed: b's leader has ENDED;
      connection timed out: all ranks of b are UNREACHABLE
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.peers import UNREACHABLE as HOST_UNREACHABLE
from hvdtrain.peers import Peers

INTERVAL_S = 0.2
_SILENT_S = 2.0  # a leader whose last heartbeat is older than this is not running
_ROW = struct.Struct("<qqqq")  # barriers entered, state, life, time written: time.monotonic_ns
HERE, GAVE_UP, LEFT = range(3)  # states: written by the rank itself
ALIVE, ENDED, STOPPED, UNREACHABLE = range(4)  # lives: observed from outside
LOST = (ENDED, UNREACHABLE)


@dataclass(frozen=True)
class RankStatus:
    """The last known status of a rank: barriers it has entered, its own state, and its life."""

    entered: int
    state: int
    life: int = ALIVE


class HeartbeatTable:
    """The heartbeat table: a row for every rank of the group, in shared memory of the leader."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @staticmethod
    def size_bytes(size: int) -> int:
        """Return the size of a table for `size` ranks."""
        return size * _ROW.size

    def write(self, rank: int, seen: RankStatus) -> None:
        """Store the status of a rank, and the current time."""
        row = seen.entered, seen.state, seen.life, time.monotonic_ns()
        _ROW.pack_into(self._memory, rank * _ROW.size, *row)

    def read(self, rank: int) -> tuple[RankStatus, float]:
        """Return the status of a rank, and its age in seconds."""
        entered, state, life, when = _ROW.unpack_from(self._memory, rank * _ROW.size)
        return RankStatus(entered, state, life), (time.monotonic_ns() - when) / 1e9


class RemotePeers:
    """The ranks of the other hosts, as this host's table has them."""

    def __init__(self, board: HeartbeatTable, hosts: list[list[int]], here: list[int]) -> None:
        self._board = board
        self._writer = here[0]
        self._hosts = [host for host in hosts if host != here]

    def status(self) -> dict[int, RankStatus]:
        """Return the status of each remote rank.

        If this host's leader has not written for long, the table is stale: return only the ranks
        recorded as lost. A remote leader without a recent heartbeat is returned as STOPPED.
        """
        found: dict[int, RankStatus] = {}
        if self._board.read(self._writer)[1] > _SILENT_S:
            known = {rank: self._board.read(rank)[0] for host in self._hosts for rank in host}
            return {rank: seen for rank, seen in known.items() if seen.life in LOST}
        for host in self._hosts:
            for rank in host:
                found[rank], age_s = self._board.read(rank)
            first = found[host[0]]
            if age_s > _SILENT_S and first.life == ALIVE and first.state != LEFT:
                found[host[0]] = RankStatus(first.entered, first.state, STOPPED)
        return found


class Heartbeat:
    """The heartbeat of a host's leader, which writes what it receives to the table.

    Making one is collective over the leaders. `me` is the index of this host in `hosts`, `address`
    is where other leaders reach this one. `local_status` returns the status of this host's ranks.
    """

    def __init__(
        self,
        store: Store,
        hosts: list[list[int]],
        me: int,
        address: str,
        table: HeartbeatTable,
        local_status: Callable[[], list[RankStatus]],
        timeout_s: float,
    ) -> None:
        self._hosts = hosts
        self._me = me
        self._table = table
        self._local_status = local_status
        for host in hosts:
            for rank in host:
                table.write(rank, RankStatus(0, HERE))
        self._peers = Peers(
            PrefixStore("heartbeat", store),
            me,
            len(hosts),
            None,
            [address],
            timeout_s,
            is_mesh=True,
            tick_s=INTERVAL_S,
            status=self._own_rows,
            thread_name="shm-heartbeat",
        )
        self._peers.start(self._on_rows, self._on_lost)

    def close(self) -> None:
        """Send a last heartbeat, and close the connections. Twice is safe."""
        self._peers.send_status()
        self._peers.close()

    def _own_rows(self) -> bytes:
        statuses = self._local_status()
        self._table.write(self._hosts[self._me][0], statuses[0])
        return b"".join(_ROW.pack(s.entered, s.state, s.life, 0) for s in statuses)

    def _on_rows(self, host: int, header: list[str], rows: bytes) -> None:
        statuses = _ROW.iter_unpack(rows)
        for rank, (entered, state, life, _) in zip(self._hosts[host], statuses, strict=True):
            self._table.write(rank, RankStatus(entered, state, life))

    def _on_lost(self, host: int, why: str) -> None:
        # A lost host loses all its ranks; a closed connection shows only the leader's exit.
        is_host_lost = why == HOST_UNREACHABLE
        for rank in self._hosts[host] if is_host_lost else self._hosts[host][:1]:
            known, _ = self._table.read(rank)
            if known.life != ENDED:
                life = UNREACHABLE if is_host_lost else ENDED
                self._table.write(rank, RankStatus(known.entered, known.state, life))
