"""What the hosts of one group know of each other's ranks: how far each is, and whether it lives.

On one host the windows say so, and the kernel. Of other hosts' ranks Gloo says only that some
connection has ended, or that time is up. So the first rank of each host has a thread that tells
all others several times a second what its host's ranks say of themselves, over connections of its
own, and writes what it hears to a board in its window, where all ranks of its host read it.
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
from hvdtrain.transports.carrier import PeerLost

TELL_S = 0.2
_SILENT_S = 2.0  # without news for so long a process does not run
_ROW = struct.Struct("<qqqq")  # barriers entered, state, life, when: time.monotonic_ns
HERE, GAVE_UP, LEFT = range(3)  # states: what a rank says of itself
ALIVE, ENDED, STOPPED, UNREACHABLE = range(4)  # lives: what the system says of it
LOST = (ENDED, UNREACHABLE)


@dataclass(frozen=True)
class Seen:
    """What is known of a rank: barriers that it has entered, what it says itself, and its life."""

    entered: int
    state: int
    life: int = ALIVE


class Board:
    """A row for every rank of the group, in the memory of the first rank of this host."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @staticmethod
    def size_bytes(size: int) -> int:
        """How much memory it takes."""
        return size * _ROW.size

    def write(self, rank: int, seen: Seen) -> None:
        """Note what has just been heard of a rank."""
        row = seen.entered, seen.state, seen.life, time.monotonic_ns()
        _ROW.pack_into(self._memory, rank * _ROW.size, *row)

    def read(self, rank: int) -> tuple[Seen, float]:
        """Return what is known of a rank, and how many seconds old that is."""
        entered, state, life, when = _ROW.unpack_from(self._memory, rank * _ROW.size)
        return Seen(entered, state, life), (time.monotonic_ns() - when) / 1e9


class Far:
    """The ranks of the other hosts, as this host's board has them."""

    def __init__(self, board: Board, hosts: list[list[int]], here: list[int]) -> None:
        self._board = board
        self._writer = here[0]
        self._hosts = [host for host in hosts if host != here]

    def look(self) -> dict[int, Seen]:
        """Return what is known of each: where nobody has written it for long, who has ended by
        then and no more. One that has not told of its host for long is stopped.
        """
        found: dict[int, Seen] = {}
        if self._board.read(self._writer)[1] > _SILENT_S:
            known = {rank: self._board.read(rank)[0] for host in self._hosts for rank in host}
            return {rank: seen for rank, seen in known.items() if seen.life in LOST}
        for host in self._hosts:
            for rank in host:
                found[rank], age_s = self._board.read(rank)
            first = found[host[0]]
            if age_s > _SILENT_S and first.life == ALIVE and first.state != LEFT:
                found[host[0]] = Seen(first.entered, first.state, STOPPED)
        return found


class Watch:
    """The thread in the first rank of a host, and its connections. Making one is collective over
    these ranks; `address` is where the others reach this one, and `near` says what is known here.
    """

    def __init__(
        self,
        store: Store,
        hosts: list[list[int]],
        me: int,
        address: str,
        board: Board,
        near: Callable[[], list[Seen]],
        timeout_s: float,
    ) -> None:
        self._hosts = hosts
        self._me = me
        self._board = board
        self._near = near
        self._heard = dict.fromkeys(range(len(hosts)), b"")
        self._unsent = dict.fromkeys(range(len(hosts)), b"")
        self._errors: dict[int, OSError] = {}
        self._peers = _connect(store, len(hosts), me, address, timeout_s)
        self._bell, self._ear = socket.socketpair()
        for host in hosts:
            for rank in host:
                board.write(rank, Seen(0, HERE))
        self._thread = threading.Thread(target=self._run, name="shm-hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the others for the last time, and end. Twice is safe."""
        with suppress(OSError):
            self._bell.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)

    def _run(self) -> None:
        last = False
        try:
            while not last:
                poller = select.poll()  # select.select knows no descriptor from 1024
                for end in (self._ear, *self._peers.values()):
                    poller.register(end, select.POLLIN)
                ready = {fd for fd, _ in poller.poll(1000 * TELL_S)}
                last = self._ear.fileno() in ready
                for host, peer in list(self._peers.items()):
                    if peer.fileno() in ready:
                        self._hear(host, peer)
                self._tell()
        finally:  # also after an error, so that the other hosts do not wait for this one
            for end in (self._bell, self._ear, *self._peers.values()):
                end.close()

    def _tell(self) -> None:
        seen = self._near()
        self._board.write(self._hosts[self._me][0], seen[0])
        rows = b"".join(_ROW.pack(one.entered, one.state, one.life, 0) for one in seen)
        for host, peer in self._peers.items():
            data = self._unsent[host] or rows  # one that is stopped does not take everything
            try:
                self._unsent[host] = data[peer.send(data) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._errors[host] = error  # reading will tell of it, but it is raised only once
            peer_sockets.spare_stopped_reader(peer)

    def _hear(self, host: int, peer: socket.socket) -> None:
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
            for rank in ranks if lost else ranks[:1]:
                seen, _ = self._board.read(rank)
                if seen.life != ENDED:
                    life = UNREACHABLE if lost else ENDED
                    self._board.write(rank, Seen(seen.entered, seen.state, life))
            self._peers.pop(host).close()
            return
        heard = self._heard[host] + data
        whole = len(ranks) * _ROW.size
        at = len(heard) // whole * whole
        self._heard[host] = heard[at:]
        if at:
            rows = _ROW.iter_unpack(heard[at - whole : at])
            for rank, (entered, state, life, _) in zip(ranks, rows, strict=True):
                self._board.write(rank, Seen(entered, state, life))


def _connect(
    store: Store, count: int, me: int, address: str, timeout_s: float
) -> dict[int, socket.socket]:
    """Return a connection to each other host: to those before this one, and from those after.

    Raises PeerLost naming the hosts that did not come.
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
