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

import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain import peer_sockets
from hvdtrain.peers import PeerLost

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


class HeartbeatThread:
    """The heartbeat thread of a host's leader, and its connections.

    Making one is collective over the leaders. `me` is the index of this host in `hosts`, `address`
    is where other leaders reach this one. `local_status` returns the status of this host's ranks.
    """

    def __init__(
        self,
        store: Store,
        hosts: list[list[int]],
        me: int,
        address: str,
        board: HeartbeatTable,
        local_status: Callable[[], list[RankStatus]],
        timeout_s: float,
    ) -> None:
        self._hosts = hosts
        self._me = me
        self._board = board
        self._local_status = local_status
        self._received = dict.fromkeys(range(len(hosts)), b"")
        self._unsent = dict.fromkeys(range(len(hosts)), b"")
        self._errors: dict[int, OSError] = {}
        self._peers = _connect(store, len(hosts), me, address, timeout_s)
        self._stop_send, self._stop_recv = socket.socketpair()
        for host in hosts:
            for rank in host:
                board.write(rank, RankStatus(0, HERE))
        self._thread = threading.Thread(target=self._run, name="shm-hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send a last heartbeat, and stop the thread. Twice is safe."""
        with suppress(OSError):
            self._stop_send.shutdown(
                socket.SHUT_RDWR
            )  # makes `_stop_recv` readable, which ends the loop
        self._thread.join(1.0)

    def _run(self) -> None:
        last = False
        try:
            while not last:
                poller = select.poll()  # select.select fails for descriptors from 1024 on
                for end in (self._stop_recv, *self._peers.values()):
                    poller.register(end, select.POLLIN)
                ready = {fd for fd, _ in poller.poll(1000 * INTERVAL_S)}
                last = self._stop_recv.fileno() in ready
                for host, peer in list(self._peers.items()):
                    if peer.fileno() in ready:
                        self._receive(host, peer)
                self._send()
        finally:  # also after an error, so that the other hosts notice the end of this one
            for end in (self._stop_send, self._stop_recv, *self._peers.values()):
                end.close()

    def _send(self) -> None:
        seen = self._local_status()
        self._board.write(self._hosts[self._me][0], seen[0])
        rows = b"".join(_ROW.pack(one.entered, one.state, one.life, 0) for one in seen)
        for host, peer in self._peers.items():
            # A stopped peer reads nothing. Complete its partly sent heartbeat before a new one.
            data = self._unsent[host] or rows
            try:
                self._unsent[host] = data[peer.send(data) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._errors[host] = error  # kept: the system raises it once, then recv returns b""
            peer_sockets.spare_stopped_reader(peer)

    def _receive(self, host: int, peer: socket.socket) -> None:
        ranks = self._hosts[host]
        try:
            data = peer.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            data, self._errors[host] = b"", error
        if not data:
            error_seen = self._errors.get(host)
            lost = error_seen is not None and peer_sockets.is_unreachable(error_seen)
            # A lost host loses all its ranks; a closed connection shows only the leader's exit.
            for rank in ranks if lost else ranks[:1]:
                seen, _ = self._board.read(rank)
                if seen.life != ENDED:
                    life = UNREACHABLE if lost else ENDED
                    self._board.write(rank, RankStatus(seen.entered, seen.state, life))
            self._peers.pop(host).close()
            return
        heard = self._received[host] + data
        whole = len(ranks) * _ROW.size
        at = len(heard) // whole * whole  # only the newest complete heartbeat counts
        self._received[host] = heard[at:]
        if at:
            rows = _ROW.iter_unpack(heard[at - whole : at])
            for rank, (entered, state, life, _) in zip(ranks, rows, strict=True):
                self._board.write(rank, RankStatus(entered, state, life))


def _connect(
    store: Store, count: int, me: int, address: str, timeout_s: float
) -> dict[int, socket.socket]:
    """Return a connection to each other host's leader: connect to those before, accept those after.

    Raises PeerLost naming the later hosts that did not connect in time, RuntimeError or OSError if
    an earlier one cannot be reached.
    """
    deadline = time.monotonic() + timeout_s

    def left_s() -> float:
        return max(0.1, deadline - time.monotonic())

    secret = secrets.token_bytes(peer_sockets.SECRET_BYTES)
    listeners = peer_sockets.listen([address])
    peers: dict[int, socket.socket] = {}
    try:
        card = [address, listeners[0].getsockname()[1], secret.hex()]
        store.set(f"watch/{me}", json.dumps(card))
        for host in range(me):
            store.wait([f"watch/{host}"], timedelta(seconds=left_s()))
            where, port, theirs = json.loads(store.get(f"watch/{host}"))
            place, their_secret = (where, port), bytes.fromhex(theirs)
            peers[host] = peer_sockets.connect(place, their_secret, me, left_s())
        after = set(range(me + 1, count))
        peers |= peer_sockets.accept_peers(listeners, secret, after, deadline)
        if missing := sorted(after - peers.keys()):
            raise PeerLost(f"no heartbeat from host {', '.join(map(str, missing))} of {count}")
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    finally:
        for listener in listeners:
            listener.close()
    for peer in peers.values():
        peer.setblocking(False)
    return peers
