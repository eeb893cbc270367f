"""Peers: how the ranks of a job wait for each other, exchange values, and notice a lost rank.

The rendezvous, the transports and the Horovod engine use it. All that it needs is a c10d store:

    await_ranks    all ranks of a world, started at any time -> a key prefix of their own
    exchange       every rank's value, through the store
    Peers          connections between the ranks: messages, status, and a callback on a lost rank

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
import os
import secrets
import selectors
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain import peer_sockets
from hvdtrain.errors import LaunchError, WorldError
from hvdtrain.peer_sockets import Connection, Header, encode
from hvdtrain.world import World, agent_keeps_store

ENDED = "has ended: its connection is closed"
UNREACHABLE = f"is unreachable: its host has not answered for {peer_sockets.LOST_S} s"
_ALIVE: Header = ["alive"]
_TICK_S = 0.5
_CONNECT_S = 5.0  # one attempt to connect to one address
_THREAD_END_S = 5.0


class PeerLost(RuntimeError):
    """A rank has exited, or did not arrive in time. What it was part of cannot be used any more."""


def poll_until(deadline: float, pause_s: float = 0.01) -> Iterator[None]:
    """Yield at once, then after pauses that grow to `pause_s`, until the deadline has passed."""
    yield
    pause = 0.001
    while time.monotonic() < deadline:
        time.sleep(min(pause, pause_s))
        pause *= 2
        yield


def exchange(
    store: Store, name: str, rank: int, size: int, value: Any, timeout_s: float
) -> list[Any]:
    """Return every rank's JSON `value`, in rank order, through the store. Collective.

    `name` must be new for this store's key prefix. Raises PeerLost naming the missing ranks.
    """
    keys = [f"{name}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(value))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except DistError:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        if missing:  # else the last one arrived just after the timeout
            raise PeerLost(f"rank {rank} {_timed_out(timeout_s, missing, size)}") from None
    return [json.loads(text) for text in store.multi_get(keys)]


def _timed_out(timeout_s: float, missing: Sequence[int], size: int) -> str:
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return (
        f"timed out after {timeout_s:g} s waiting for {ranks} "
        f"({len(missing)} of {size} ranks missing)"
    )


# All ranks of a world


def await_ranks(
    store: Store, world: World, timeout_s: float, deadline: float | None = None
) -> Store:
    """Wait for all ranks; return the store under a new prefix that only these processes use.

    Collective. A key alone proves nothing: torchrun's agent keeps its store when it restarts the
    ranks, and so the keys of dead ranks; and a start that failed on some ranks leaves keys, too.
    Therefore each rank answers rank 0, which uses the latest of its nonces:

        rank r                            rank 0
        set arrived/r = nonce        ->
                                     <-   set round/<nonce> = round, for every nonce it reads
        set <round>/answer/r = nonce ->
                                     <-   set <round>/begin, once the answers equal arrived/*

    Raises WorldError naming the missing ranks, LaunchError if two processes have the same rank.
    """
    deadline = deadline or time.monotonic() + timeout_s
    if not agent_keeps_store(world):
        _check_unique(store, world)
    nonce = uuid.uuid4().hex
    store.set(f"arrived/{world.rank}", nonce)
    run_round = _coordinate_round if world.rank == 0 else _join_round
    round_id, missing = run_round(store, world, nonce, deadline)
    if missing:
        raise WorldError(f"{world} {_timed_out(timeout_s, missing, world.size)}")
    if store.get(f"arrived/{world.rank}").decode() != nonce:
        raise LaunchError(f"two processes say that they are rank {world.rank} ({world.source})")
    return PrefixStore(round_id, store)


def _coordinate_round(
    store: Store, world: World, nonce: str, deadline: float
) -> tuple[str, list[int]]:
    """Run rank 0's side. Return the round's id and the ranks that did not answer in time."""
    round_id = uuid.uuid4().hex
    ranks = range(world.size)
    arrived = [f"arrived/{rank}" for rank in ranks]
    answers = [f"{round_id}/answer/{rank}" for rank in ranks]
    store.set(answers[0], nonce)
    for keys, placeholder in ((arrived, "not arrived"), (answers, "no answer")):
        for key in keys:
            store.compare_set(key, "", placeholder)  # multi_get blocks on a missing key
    notified = {b"not arrived"}
    for _ in poll_until(deadline):
        values = store.multi_get(arrived + answers)
        nonces, answered = values[: world.size], values[world.size :]
        if nonces == answered:
            store.set(f"{round_id}/begin", "")
            return round_id, []
        for other in {*nonces} - notified:
            store.set(f"round/{other.decode()}", round_id)
            notified.add(other)
    return round_id, [rank for rank in ranks if nonces[rank] != answered[rank]]


def _join_round(store: Store, world: World, nonce: str, deadline: float) -> tuple[str, list[int]]:
    """Run the side of all other ranks. Return what `_coordinate_round` returns."""
    round_key, round_id = f"round/{nonce}", ""
    for _ in poll_until(deadline, pause_s=0.02):
        if round_id and store.check([f"{round_id}/begin"]):
            return round_id, []
        # Read again each time: a restarted rank 0 begins a new round.
        newest = store.get(round_key).decode() if store.check([round_key]) else ""
        if newest != round_id:
            round_id = newest
            store.set(f"{round_id}/answer/{world.rank}", nonce)
    if not round_id:
        return round_id, [0]
    pairs = [[f"arrived/{rank}", f"{round_id}/answer/{rank}"] for rank in range(world.size)]
    missing = [rank for rank, pair in enumerate(pairs) if len({*store.multi_get(pair)}) > 1]
    return round_id, missing or [0]


def _check_unique(store: Store, world: World) -> None:
    """Raise LaunchError if another process has claimed this rank.

    Do not call it on a store that survives restarts (torchrun's agent).
    """
    # The id is random: two containers may have the same host name and process id.
    me = f"{socket.gethostname()}:{os.getpid()} {_PROCESS_ID}"
    other = store.compare_set(f"process/{world.rank}", "", me).decode()
    if other != me:
        pair = f"{other.split()[0]} and {me.split()[0]}"
        raise LaunchError(
            f"two processes say that they are rank {world.rank}: {pair} ({world.source})"
        )


_PROCESS_ID = uuid.uuid4().hex


# Connections between ranks


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

        Raises PeerLost naming the ranks that did not come, DistError if the store is lost.
        """
        self._rank = rank
        self._limit_s = limit_s
        # A peer that runs sends several messages within the limit.
        self._tick_s = min(tick_s, limit_s / 4) if limit_s else tick_s
        self._last_check = time.monotonic()
        self._status = status
        self._thread_name = thread_name
        self._thread: threading.Thread | None = None
        self._peers: dict[int, Connection] = {}
        self._own: deque[tuple[Header, bytes]] = deque()  # messages to this rank itself
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_recv, self._wake_send = socket.socketpair()
        for end in (self._wake_recv, self._wake_send):
            end.setblocking(False)
        self._selector.register(self._wake_recv, selectors.EVENT_READ)
        deadline = time.monotonic() + timeout_s
        try:
            lower = range(rank if is_mesh else min(rank, 1))
            higher = set(range(rank + 1, size)) if is_mesh or rank == 0 else set()
            for peer, sock in _connect(store, rank, lower, higher, addresses, deadline).items():
                self._peers[peer] = Connection(peer, sock)
                self._selector.register(sock, selectors.EVENT_READ, self._peers[peer])
            left_s = max(0.1, deadline - time.monotonic())
            self.members: list[Any] = exchange(store, "hello", rank, size, hello, left_s)
        except BaseException:
            self.close()
            raise

    def start(
        self,
        on_message: Callable[[int, Header, bytes], None],
        on_lost: Callable[[int, str], None],
        on_tick: Callable[[], None] = lambda: None,
        on_start: Callable[[], None] = lambda: None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Start the thread, which calls all of these: `on_start` first, `on_tick` after each wait.

        `on_message(rank, header, payload)`: `rank` is the sender. `on_lost(rank, why)`: `why` is a
        predicate, e.g. `ENDED`. An exception in any of them goes to `on_failure`, and ends the
        thread.
        """
        self._on_message, self._on_lost, self._on_tick = on_message, on_lost, on_tick
        self._on_start, self._on_failure = on_start, on_failure
        self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
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

    def is_current_thread(self) -> bool:
        """Return whether the caller is the thread of these connections."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the thread and close all connections. Twice is safe; in any thread."""
        self._stopping = True
        if self._thread is not None and not self.is_current_thread():
            self.wake()
            self._thread.join(_THREAD_END_S)
        if self._thread is None or self.is_current_thread() or not self._thread.is_alive():
            self._release()

    def close_in_child(self) -> None:
        """Close this process's copies of the connections, in a forked child."""
        self._close_sockets()

    def _close_sockets(self) -> None:
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
            left_s = self._last_check + self._tick_s - time.monotonic()
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
            self._on_tick()

    def _serve(self, peer: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.send(b"")
        if not events & selectors.EVENT_READ:
            return
        why = None
        if not peer.read():
            why = UNREACHABLE if peer.is_unreachable else ENDED
        frames = peer.frames()
        while not self._stopping:
            try:
                header, payload = next(frames)
            except StopIteration:
                break
            except ValueError as error:
                why = f"has sent an invalid message: {error}"
                break
            if header != _ALIVE or payload:
                self._on_message(peer.rank, header, payload)
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

    def _release(self) -> None:
        self._close_sockets()
        self._peers.clear()
        self._selector.close()


def _connect(
    store: Store,
    rank: int,
    lower: Sequence[int],
    higher: set[int],
    addresses: Sequence[str],
    deadline: float,
) -> dict[int, socket.socket]:
    """Connect to the lower ranks, and accept the higher ones. Return the sockets by rank."""
    secret = secrets.token_bytes(peer_sockets.SECRET_BYTES)
    listeners = peer_sockets.listen(addresses) if higher else []
    begin = time.monotonic()
    socks: dict[int, socket.socket] = {}
    try:
        if higher:
            places = [listener.getsockname()[:2] for listener in listeners]
            store.set(f"listening/{rank}", json.dumps([places, secret.hex()]))
        for peer in lower:
            socks[peer] = _reach(store, rank, peer, deadline)
        socks |= peer_sockets.accept_peers(listeners, secret, higher, deadline)
        if missing := sorted(higher - socks.keys()):
            size = max(higher) + 1
            raise PeerLost(f"rank {rank} {_timed_out(round(deadline - begin), missing, size)}")
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
        raise PeerLost(f"rank {rank} {_timed_out(timeout_s, [peer], peer + 1)}") from None
    places, secret = json.loads(store.get(key))
    for _ in poll_until(deadline, pause_s=0.05):
        for host, port in places:
            attempt_s = max(0.1, min(_CONNECT_S, deadline - time.monotonic()))
            try:
                return peer_sockets.connect((host, port), bytes.fromhex(secret), rank, attempt_s)
            except OSError as error:
                why = str(error)
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    raise PeerLost(f"rank {rank} could not reach rank {peer} at {tried}: {why}")
