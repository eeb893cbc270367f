"""The control plane: a star of TCP sockets around rank 0, and the one thread that reads them.

Messages are frames of a JSON list and raw bytes: nothing that could run code is ever unpacked.
Sending never blocks: what the kernel does not take at once, the thread sends later. A closed
connection is how a rank that has died is noticed, within milliseconds; a lost host is noticed by
TCP (see `peer_sockets`), a stopped process, where there is a limit, by missing "alive" messages.

A start, which any rank may have to try again after it failed on some:

    rank 0: listen; number the meeting; publish [places, secret, number] under one fixed key
    others: read the key; connect; authenticate; send what they are   (refused: read the key again)
    rank 0: once all are there, send what everybody is; both sides use the meeting's name space
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain import peer_sockets
from hvdtrain.errors import LaunchError, WorldError
from hvdtrain.rendezvous import own_addresses
from hvdtrain.world import World

_SIZES = struct.Struct("<II")
_READ_BYTES = 1 << 18
_TICK_S = 0.5
_MOST_BYTES = 1 << 28  # of one message; a plan of 100,000 parameters takes a tenth of it
_ANSWER_S = 5.0
_RETRY_S = 0.1
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface

Header = list[Any]
_ALIVE: Header = ["alive"]
Deliver = Callable[[int, Header, bytes], None]


class Control:
    """This rank's end of the star.

    `deliver(rank, header, payload)` and `lost(rank, why)` are called in the control thread, as is
    `tick()` every half second; `rank` is the sender. `people` is what every rank said in its hello,
    `store` a name space of this meeting. A rank that sends nothing for `limit_s` counts as lost; 0
    waits for ever.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        hello: dict[str, Any],
        timeout_s: float,
        limit_s: float = 0.0,
    ) -> None:
        """Connect. Collective. Raises WorldError naming the ranks that did not come."""
        self._rank = world.rank
        self._limit_s = limit_s
        # A peer that runs sends several messages within the limit.
        self._tick_s = min(_TICK_S, limit_s / 4) if limit_s else _TICK_S
        self._last_check = time.monotonic()
        self.store = store
        self._peers: dict[int, _Peer] = {}
        self._own: deque[tuple[Header, bytes]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._stopping = False
        self._thread: threading.Thread | None = None
        deadline = time.monotonic() + timeout_s
        try:
            meet = self._gather if world.rank == 0 else self._join
            self.people: list[dict[str, Any]] = meet(world, store, hello, deadline)
        except BaseException:
            self.close()
            raise
        for peer in self._peers.values():
            peer.sock.setblocking(False)
            peer.heard = time.monotonic()
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)

    def start(
        self,
        deliver: Deliver,
        lost: Callable[[int, str], None],
        tick: Callable[[], None],
        begin: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Begin to deliver; `begin` is the first thing that the thread does. An exception in any of
        these goes to `failed`, and ends the thread.
        """
        self._deliver, self._lost, self._tick, self._begin = deliver, lost, tick, begin
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name="hvd-control", daemon=True)
        self._thread.start()

    def send(self, rank: int, header: Header, payload: bytes = b"") -> None:
        """Send to rank 0, or from there to anybody, oneself included. Any thread; never blocks."""
        if rank == self._rank:
            self._own.append((header, payload))
            self.wake()
            return
        peer = self._peers.get(rank)
        if peer is not None and not peer.send(_frame(header, payload)):
            self.wake()  # the kernel's buffer is full: the thread goes on

    def send_all(self, ranks: list[int], header: Header, payload: bytes = b"") -> None:
        """Send the same to several ranks."""
        frame = _frame(header, payload)
        waiting = False
        for rank in ranks:
            if rank == self._rank:
                self._own.append((header, payload))
                waiting = True
            elif (peer := self._peers.get(rank)) is not None:
                waiting |= not peer.send(frame)
        if waiting:
            self.wake()

    def wake(self) -> None:
        """Let the thread look at its queues."""
        if not self.is_current_thread():
            with suppress(OSError):  # it has been woken already, or has gone
                os.write(self._wake_out, b"\0")

    def is_current_thread(self) -> bool:
        """Return whether the caller is the control thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the thread and close every socket. Twice is safe; from any thread."""
        self._stopping = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self.wake()
            thread.join(5)
        if thread is None or thread is threading.current_thread() or not thread.is_alive():
            self._release()

    def forget(self) -> None:
        """Close this process's copies of the sockets, in a forked child."""
        for peer in self._peers.values():
            peer.sock.close()
        for fd in (self._wake_in, self._wake_out):
            os.close(fd)

    # The thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            # Without this thread everybody would wait for ever.
            self._failed(error)
            for peer in self._peers.values():  # after what was sent, which is still delivered
                with suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_WR)

    def _loop(self) -> None:
        self._begin()
        for peer in list(self._peers.values()):
            if (end := self._deliver_all(peer)) is not None:  # what came together with the hello
                self._drop(peer, end)
        while not self._stopping:
            for peer in list(self._peers.values()):
                self._watch(peer)
            for key, events in self._selector.select(0 if self._own else self._tick_s):
                if key.data is None:
                    _drain(self._wake_in)
                else:
                    self._serve(key.data, events)
            while self._own and not self._stopping:
                header, payload = self._own.popleft()
                self._deliver(self._rank, header, payload)
            if time.monotonic() - self._last_check >= self._tick_s:
                self._check_peers()  # first: it knows more of a stopped rank than the inspector
            self._tick()

    def _check_peers(self) -> None:
        """Tell the peers that this process runs, and give up those that have been silent."""
        now = time.monotonic()
        # What the peers sent meanwhile is still unread then.
        was_stopped = now - self._last_check > 4 * self._tick_s
        self._last_check = now
        alive = _frame(_ALIVE, b"")
        for peer in list(self._peers.values()):
            # Also without a limit: what is not acknowledged shows that a host is lost.
            if not peer.out:
                peer.send(alive)
            peer_sockets.spare_stopped_reader(peer.sock)
            if was_stopped:
                peer.heard = now
            elif self._limit_s and now - peer.heard > self._limit_s:
                self._drop(
                    peer, f"has not answered for {self._limit_s:g} s: it is stopped or hangs"
                )

    def _watch(self, peer: _Peer) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if peer.events != wanted:
            self._selector.modify(peer.sock, wanted, peer)
            peer.events = wanted

    def _serve(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.send(b"")
        if events & selectors.EVENT_READ:
            end = peer.read()
            end = self._deliver_all(peer) or end
            if end is not None and not self._stopping:
                self._drop(peer, end)

    def _deliver_all(self, peer: _Peer) -> str | None:
        """Deliver what has arrived; return why the connection cannot go on, if so."""
        frames = peer.frames()
        while not self._stopping:
            try:
                header, payload = next(frames)
            except StopIteration:
                break
            except ValueError as error:
                return f"has sent what is no message: {error}"
            if header != _ALIVE:
                self._deliver(peer.rank, header, payload)
        return None

    def _drop(self, peer: _Peer, why: str) -> None:
        if self._peers.pop(peer.rank, None) is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()
            self._lost(peer.rank, why)

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.sock.close()
        self._peers.clear()
        self._selector.close()
        for name in ("_wake_in", "_wake_out"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)

    # Meeting

    def _gather(
        self, world: World, store: Store, hello: dict[str, Any], deadline: float
    ) -> list[dict[str, Any]]:
        secret = secrets.token_bytes(peer_sockets.SECRET_BYTES)
        meeting = store.add("meetings", 1)
        listeners = peer_sockets.listen(_addresses(world))
        try:
            places = [listener.getsockname()[:2] for listener in listeners]
            store.set("control", json.dumps([places, secret.hex(), meeting]))
            expected = set(range(1, world.size))
            socks = peer_sockets.accept_peers(listeners, secret, expected, deadline)
        finally:
            for listener in listeners:
                listener.close()
        self._peers = {rank: _Peer(rank, sock) for rank, sock in socks.items()}
        missing = [str(rank) for rank in sorted(expected - socks.keys())]
        if missing:
            raise WorldError(
                f"hvd.init timed out waiting for rank{'s' * (len(missing) > 1)} "
                f"{', '.join(missing)} ({len(missing)} of {world.size} ranks missing)"
            )
        everyone = [hello]
        for rank in range(1, world.size):
            try:
                (person,) = self._peers[rank].receive(deadline)
                everyone.append(person)
            except (OSError, ValueError) as error:
                raise WorldError(f"rank {rank} left during hvd.init: {error}") from None
        for peer in self._peers.values():
            peer.send(_frame(everyone, b""))
        self.store = PrefixStore(str(meeting), store)
        return everyone

    def _join(
        self, world: World, store: Store, hello: dict[str, Any], deadline: float
    ) -> list[dict[str, Any]]:
        why = ""
        pause_s = 0.005
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                store.wait(["control"], timedelta(seconds=max(0.1, left_s)))
                places, secret, meeting = json.loads(store.get("control"))
            except DistError:
                raise WorldError(f"{world} timed out waiting for rank 0 in hvd.init") from None
            for host, port in places:
                try:
                    timeout_s = max(0.1, min(_ANSWER_S, deadline - time.monotonic()))
                    place = (host, port)
                    sock = peer_sockets.connect(place, bytes.fromhex(secret), self._rank, timeout_s)
                except OSError as error:
                    why = str(error)
                    continue
                peer = self._peers[0] = _Peer(0, sock)
                peer.send(_frame([hello], b""))
                try:
                    people = peer.receive(deadline)
                except (OSError, ValueError):
                    raise WorldError(
                        f"{world} timed out in hvd.init waiting for the other ranks, as rank 0 did"
                    ) from None
                self.store = PrefixStore(str(meeting), store)
                return people
            # What the key says may be of a start before, whose listener is closed.
            time.sleep(pause_s)
            pause_s = min(_RETRY_S, 2 * pause_s)
        tried = ", ".join(f"{host}:{port}" for host, port in places)
        raise WorldError(f"{world} could not reach rank 0 at {tried}: {why}")


class _Peer:
    """One connection: a buffer each way."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.events = selectors.EVENT_READ
        self.out = bytearray()
        self.heard = time.monotonic()
        """When something arrived last."""
        self._in = bytearray()
        self._lock = threading.Lock()
        self._error: OSError | None = None

    def send(self, frame: bytes) -> bool:
        """Send what the kernel takes, keep the rest in order; whether nothing is left."""
        with self._lock:
            if self.out:
                self.out += frame
                frame = bytes(self.out)
                self.out.clear()
            try:
                sent = self.sock.send(frame) if frame else 0
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._error = error  # reading will tell of it, but it is raised only once
                return True
            self.out += frame[sent:]
            return not self.out

    def read(self) -> str | None:
        """Read what is there; return how the connection has ended, if it has."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            data, self._error = b"", error
        self._in += data
        self.heard = time.monotonic()
        if data:
            return None
        if self._error is not None and peer_sockets.is_unreachable(self._error):
            return f"is unreachable: its host has not answered for {peer_sockets.LOST_S} s"
        return "has ended: its connection is closed"

    def frames(self) -> Iterator[tuple[Header, bytes]]:
        """Take the complete frames out of what was read, one by one. Raises ValueError for what is
        none.
        """
        while len(self._in) >= _SIZES.size:
            header_size, payload_size = _SIZES.unpack_from(self._in)
            if header_size + payload_size > _MOST_BYTES:
                raise ValueError(f"{header_size + payload_size} bytes")
            body = _SIZES.size + header_size
            if len(self._in) < body + payload_size:
                return
            header = _parse(self._in[_SIZES.size : body])
            payload = bytes(self._in[body : body + payload_size])
            del self._in[: body + payload_size]
            yield header, payload

    def receive(self, deadline: float) -> list[Any]:
        """Wait for one frame, while the socket still blocks."""
        while True:
            for header, _ in self.frames():
                return header  # what follows it stays where it is
            self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            data = self.sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("closed")
            self._in += data


def _parse(text: bytearray) -> Header:
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(header, list) or not header:
        raise ValueError(f"a JSON {type(header).__name__}")
    return header


def _frame(header: Header, payload: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) + len(payload) > _MOST_BYTES:
        raise ValueError(f"a message of {len(text) + len(payload)} bytes is over {_MOST_BYTES}")
    return b"".join((_SIZES.pack(len(text), len(payload)), text, payload))


def _addresses(world: World) -> list[str]:
    """Return the addresses that rank 0 listens at: those of the interface in use, where it is
    known, else all by which other hosts may reach this one.
    """
    if world.one_host:
        return ["127.0.0.1"]
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            request = struct.pack("256s", name[:15].encode())
            return [socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])]
    host = os.environ.get("MASTER_ADDR")  # where all others have reached the store
    if host and (source := peer_sockets.route_source(host)) is not None:
        return [source]
    addresses = [address for address in own_addresses(world) if _is_ip(address)]
    if not addresses:
        raise LaunchError("no address of this host is known; set GLOO_SOCKET_IFNAME or MASTER_ADDR")
    return addresses


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
