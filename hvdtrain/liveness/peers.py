"""Peers: connections between ranks, with messages, a status, and a callback on a lost rank.

`Peers` is a star around rank 0 (the control plane of `hvd`) or a mesh (the heartbeat between the
hosts of `shm`). One thread per process reads all connections; sending never blocks.

    rank a                                              rank b > a
      |  listen; store.set("listening/a")                  |
      |<-- connect, authenticate (see peer_sockets) -------|
      |<== exchange("hello"): all are connected ==========>|
      |<-- messages; "alive", with a status, every tick -->|
    connection closed: b has ended; no acknowledgement for 10 s: its host is unreachable;
    nothing received for `limit_s`: it is stopped
"""

from __future__ import annotations

import json
import math
import os
import selectors
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from hvdtrain.errors import PeerLost
from hvdtrain.job.store_exchange import exchange, poll_until, timed_out
from hvdtrain.liveness import peer_sockets
from hvdtrain.liveness.peer_sockets import Connection, Header, InvalidMessage, encode

ENDED = "has ended: its connection is closed"
UNREACHABLE = f"is unreachable: its host has not answered for {peer_sockets.LOST_S} s"
OnMessage = Callable[[int, Header, bytes], None]
"""`on_message(rank, header, payload)`: `rank` is the sender."""
OnLost = Callable[[int, str], None]
"""`on_lost(rank, why)`: `why` is a predicate, e.g. `ENDED`."""
_ALIVE: Header = ["alive"]
_TICK_S = 0.5
_CONNECT_S = 5.0  # one attempt to connect to one address
_THREAD_END_S = 5.0


class Peers:
    """This rank's connections to its peers: to rank 0 only, and from there to all; or a mesh.

    `members` is every rank's `hello`. `status()` returns bytes that peers receive with each "alive"
    message. Rank 0, or every rank of a mesh, listens at `addresses`. A rank from which nothing has
    arrived for `limit_s` counts as lost; 0 means no limit.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        hello: Any,
        addresses: Sequence[str],
        timeout_s: float,
        *,
        is_mesh: bool = False,
        limit_s: float = 0.0,
        tick_s: float = _TICK_S,
        status: Callable[[], bytes] = bytes,
        thread_name: str = "hvdtrain-peers",
    ) -> None:
        """Connect. Collective; `store` must have a new key prefix.

        Raises PeerLost naming the ranks that did not arrive, DistError if the store is lost.
        """
        self._rank = rank
        self._limit_s = limit_s
        # A peer that runs sends several messages within the limit.
        self._tick_s = min(tick_s, limit_s / 4) if limit_s else tick_s
        self._last_check = time.monotonic()
        self._tick_at = math.inf
        self._status = status
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._peers: dict[int, Connection] = {}
        self._own: deque[tuple[Header, bytes]] = deque()  # messages to this rank itself
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_recv, self._wake_send = socket.socketpair()
        for end in (self._wake_recv, self._wake_send):
            end.setblocking(False)
        self._selector.register(self._wake_recv, selectors.EVENT_READ)
        _open.add(self)
        deadline = time.monotonic() + timeout_s
        try:
            for peer, sock in _connect(store, rank, size, addresses, is_mesh, deadline).items():
                self._peers[peer] = Connection(peer, sock)
                self._selector.register(sock, selectors.EVENT_READ, self._peers[peer])
            left_s = max(0.1, deadline - time.monotonic())
            self.members: list[Any] = exchange(store, "hello", rank, size, hello, left_s)
        except BaseException:
            self.close()
            raise

    def start(
        self,
        on_message: OnMessage,
        on_lost: OnLost,
        on_tick: Callable[[], None] = lambda: None,
        on_start: Callable[[], None] = lambda: None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Start the thread, which calls all of these: `on_start` first, `on_tick` after each wait.

        An InvalidMessage of `on_message` drops the sender. Any other exception goes to
        `on_failure`, and ends the thread.
        """
        self._on_message, self._on_lost, self._on_tick = on_message, on_lost, on_tick
        self._on_start, self._on_failure = on_start, on_failure
        self._thread.start()

    def send(self, rank: int, header: Header, payload: bytes = b"") -> None:
        """Send to a connected rank, or to this rank itself. In any thread; never blocks."""
        self.send_all([rank], header, payload)

    def send_all(self, ranks: Sequence[int], header: Header, payload: bytes = b"") -> None:
        """Send the same to several ranks. Ranks that are lost are skipped."""
        frame = b""
        must_wake = False
        for rank in ranks:
            if rank == self._rank:
                self._own.append((header, payload))
                must_wake = True
            elif (peer := self._peers.get(rank)) is not None:
                frame = frame or encode(header, payload)
                must_wake |= not peer.send(frame)  # the kernel's buffer is full
        if must_wake:
            self.wake()

    def send_status(self) -> None:
        """Send "alive" and the status to the peers that have taken all earlier messages."""
        alive = encode(_ALIVE, self._status())
        for peer in list(self._peers.values()):
            if not peer.unsent:
                peer.send(alive)

    def wake(self) -> None:
        """Make the thread check its queues."""
        if not self.is_current_thread():
            with suppress(OSError):  # the buffer is full, so it will wake up; or it has ended
                self._wake_send.send(b"\0")

    def tick_within(self, seconds: float) -> None:
        """Make the thread call `on_tick` again in so many seconds, or sooner. In any thread."""
        self._tick_at = min(self._tick_at, time.monotonic() + seconds)
        self.wake()

    def silent_s(self, rank: int) -> float:
        """Return for how many seconds nothing has arrived from a connected rank; else 0."""
        peer = self._peers.get(rank)
        return 0.0 if peer is None else time.monotonic() - peer.last_received

    def is_current_thread(self) -> bool:
        """Return whether the caller is the thread of these connections."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the thread and close all connections. Twice is safe; in any thread."""
        self._stopping = True
        if self._thread.is_alive() and not self.is_current_thread():
            self.wake()
            self._thread.join(_THREAD_END_S)
        if self.is_current_thread() or not self._thread.is_alive():
            self._close_sockets()
            self._peers.clear()
            self._selector.close()

    def _close_sockets(self) -> None:
        _open.discard(self)
        connected = [peer.sock for peer in self._peers.values()]
        for sock in (*connected, self._wake_recv, self._wake_send):
            sock.close()

    # The thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            try:
                if self._on_failure is None:
                    raise
                self._on_failure(error)
            finally:
                for peer in self._peers.values():  # what was sent before is still delivered
                    with suppress(OSError):
                        peer.sock.shutdown(socket.SHUT_WR)

    def _loop(self) -> None:
        self._on_start()
        while not self._stopping:
            for peer in self._peers.values():
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
                if self._selector.get_key(peer.sock).events != wanted:
                    self._selector.modify(peer.sock, wanted, peer)
            left_s = min(self._last_check + self._tick_s, self._tick_at) - time.monotonic()
            for key, events in self._selector.select(0 if self._own else max(0.0, left_s)):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._wake_recv.recv(4096)
                else:
                    self._serve(key.data, events)
            while self._own and not self._stopping:
                header, payload = self._own.popleft()
                self._on_message(self._rank, header, payload)
            if time.monotonic() - self._last_check >= self._tick_s:
                self._check_peers()  # before `on_tick`, which may report a stopped rank less well
            if time.monotonic() >= self._tick_at:
                self._tick_at = math.inf
            self._on_tick()

    def _serve(self, peer: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.send(b"")
        if not events & selectors.EVENT_READ:
            return
        why = None
        if not peer.read():
            why = UNREACHABLE if peer.is_unreachable else ENDED
        try:
            for header, payload in peer.frames():
                if self._stopping:
                    return
                if header != _ALIVE or payload:
                    self._on_message(peer.rank, header, payload)
        except InvalidMessage as error:
            why = f"has sent an invalid message: {error}"
        if why is not None and not self._stopping:
            self._drop_lost(peer, why)

    def _check_peers(self) -> None:
        """Send "alive" to the peers, and drop those from which nothing came for `limit_s`."""
        now = time.monotonic()
        # If this process was stopped, what the peers sent meanwhile is still unread.
        was_stopped = now - self._last_check > 4 * self._tick_s
        self._last_check = now
        self.send_status()  # also without a limit: unacknowledged data show that a host is lost
        for peer in list(self._peers.values()):
            peer_sockets.spare_stopped_reader(peer.sock)
            if was_stopped:
                peer.last_received = now
            elif self._limit_s and now - peer.last_received > self._limit_s:
                why = f"has not answered for {self._limit_s:g} s: it is stopped or hangs"
                self._drop_lost(peer, why)

    def _drop_lost(self, peer: Connection, why: str) -> None:
        if self._peers.pop(peer.rank, None) is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()
            self._on_lost(peer.rank, why)


_open: weakref.WeakSet[Peers] = weakref.WeakSet()


def _close_copies() -> None:
    """Close a forked child's copies of the connections: it, e.g. a DataLoader worker, cannot use
    them, and would hold them open after its parent has died.
    """
    for peers in list(_open):
        peers._close_sockets()


os.register_at_fork(after_in_child=_close_copies)


def _connect(
    store: Store,
    rank: int,
    size: int,
    addresses: Sequence[str],
    is_mesh: bool,
    deadline: float,
) -> dict[int, socket.socket]:
    """Connect to the lower ranks, and accept the higher ones. Return the sockets by rank."""
    higher = set(range(rank + 1, size)) if is_mesh or rank == 0 else set()
    session = uuid.uuid4().hex
    listeners = peer_sockets.listen(addresses) if higher else []
    begin = time.monotonic()
    socks: dict[int, socket.socket] = {}
    try:
        if higher:
            places = [listener.getsockname()[:2] for listener in listeners]
            store.set(f"listening/{rank}", json.dumps([places, session]))
        for peer in range(rank if is_mesh else min(rank, 1)):
            socks[peer] = _reach(store, rank, peer, deadline)
        socks |= peer_sockets.accept_peers(listeners, session.encode(), higher, deadline)
        if missing := sorted(higher - socks.keys()):
            raise PeerLost(f"rank {rank} {timed_out(round(deadline - begin), missing, size)}")
    except BaseException:
        for sock in socks.values():
            sock.close()
        raise
    finally:
        for listener in listeners:
            listener.close()
    return socks


def _reach(store: Store, rank: int, peer: int, deadline: float) -> socket.socket:
    """Connect to a listening rank. Raises PeerLost."""
    key = f"listening/{peer}"
    timeout_s = max(0.1, deadline - time.monotonic())
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except DistError:
        raise PeerLost(f"rank {rank} {timed_out(timeout_s, [peer], peer + 1)}") from None
    places, session = json.loads(store.get(key))
    for _ in poll_until(deadline, pause_s=0.05):
        for host, port in places:
            attempt_s = max(0.1, min(_CONNECT_S, deadline - time.monotonic()))
            try:
                return peer_sockets.connect((host, port), session.encode(), rank, attempt_s)
            except OSError as error:
                why = str(error)
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    raise PeerLost(f"rank {rank} could not reach rank {peer} at {tried}: {why}")
