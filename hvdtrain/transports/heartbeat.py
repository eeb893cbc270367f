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
from typing import NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.liveness.peer_sockets import InvalidMessage
from hvdtrain.liveness.peers import UNREACHABLE as HOST_UNREACHABLE
from hvdtrain.liveness.peers import Peers

INTERVAL_S = 0.2
_SILENT_S = 2.0  # a leader whose last heartbeat is older than this is not running
_ROW = struct.Struct("<qqqq")  # barriers entered, state, liveness, time written: time.monotonic_ns
HERE, GAVE_UP, LEFT = range(3)  # states: written by the rank itself
ALIVE, ENDED, STOPPED, UNREACHABLE = range(4)  # liveness: observed from outside
LOST = (ENDED, UNREACHABLE)  # what counts as lost


class RankStatus(NamedTuple):
    """The last known status of a rank: barriers it has entered, its own state, and its liveness."""

    entered: int
    state: int
    liveness: int = ALIVE


class HeartbeatTable:
    """A row for every rank of the group, in memory that the ranks of a host share.

    `hosts` are the ranks by host, `own_host` is the index of this host.
    """

    def __init__(self, memory: memoryview, hosts: list[list[int]], own_host: int) -> None:
        self._memory = memory
        self.hosts = hosts
        self.own_host = own_host

    @staticmethod
    def size_bytes(size: int) -> int:
        """Return the size of a table for `size` ranks."""
        return size * _ROW.size

    def write(self, rank: int, status: RankStatus) -> None:
        """Store the status of a rank, and the current time."""
        _ROW.pack_into(self._memory, rank * _ROW.size, *status, time.monotonic_ns())

    def read(self, rank: int) -> tuple[RankStatus, float]:
        """Return the status of a rank, and its age in seconds."""
        *status, when = _ROW.unpack_from(self._memory, rank * _ROW.size)
        return RankStatus(*status), (time.monotonic_ns() - when) / 1e9

    def remote_status(self) -> dict[int, RankStatus]:
        """Return the status of each rank of the other hosts.

        If this host's leader has not written for long, the table is stale: return only the ranks
        recorded as lost. A remote leader without a recent heartbeat is returned as STOPPED.
        """
        remote = [host for k, host in enumerate(self.hosts) if k != self.own_host]
        rows = {rank: self.read(rank) for host in remote for rank in host}
        found = {rank: status for rank, (status, _) in rows.items()}
        if self.read(self.hosts[self.own_host][0])[1] > _SILENT_S:
            return {rank: status for rank, status in found.items() if status.liveness in LOST}
        for leader, *_ in remote:
            status, age_s = rows[leader]
            if age_s > _SILENT_S and status.liveness == ALIVE and status.state != LEFT:
                found[leader] = status._replace(liveness=STOPPED)
        return found


class Heartbeat:
    """The heartbeat of a host's leader, which writes what it receives to the table.

    Making one is collective over the leaders. `address` is where other leaders reach this one.
    `local_status` returns the status of this host's ranks.
    """

    def __init__(
        self,
        store: Store,
        table: HeartbeatTable,
        address: str,
        local_status: Callable[[], list[RankStatus]],
        timeout_s: float,
    ) -> None:
        self._table = table
        self._local_status = local_status
        for rank in range(sum(map(len, table.hosts))):
            table.write(rank, RankStatus(0, HERE))
        self._peers = Peers(
            PrefixStore("heartbeat", store),
            table.own_host,
            len(table.hosts),
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
        self._table.write(self._table.hosts[self._table.own_host][0], statuses[0])
        return b"".join(_ROW.pack(*status, 0) for status in statuses)

    def _on_rows(self, host: int, header: list[str], rows: bytes) -> None:
        ranks = self._table.hosts[host]
        if len(rows) != len(ranks) * _ROW.size:
            raise InvalidMessage(f"{len(rows)} bytes for {len(ranks)} ranks")
        for rank, row in zip(ranks, _ROW.iter_unpack(rows), strict=True):
            self._table.write(rank, RankStatus(*row[:3]))

    def _on_lost(self, host: int, why: str) -> None:
        # A lost host loses all its ranks; a closed connection shows only the leader's exit.
        is_host_lost = why == HOST_UNREACHABLE
        ranks = self._table.hosts[host]
        for rank in ranks if is_host_lost else ranks[:1]:
            known, _ = self._table.read(rank)
            if known.liveness != ENDED:
                liveness = UNREACHABLE if is_host_lost else ENDED
                self._table.write(rank, known._replace(liveness=liveness))
