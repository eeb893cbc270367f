"""The control plane: a star of TCP sockets around rank 0, and the one thread that reads them.

Messages are frames of a JSON list and raw bytes: nothing that could run code is ever unpacked.
Sending never blocks: what the kernel does not take at once, the thread sends later. A closed
connection is how a rank that has died is noticed, within milliseconds.
"""

from __future__ import annotations

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

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from hvdtrain.errors import WorldError
from hvdtrain.rendezvous import own_addresses, store_hosts
from hvdtrain.world import World

_SIZES = struct.Struct("<II")
_READ_BYTES = 1 << 18
_TICK_S = 0.5

Header = list[Any]
Deliver = Callable[[int, Header, bytes], None]


class Control:
    """This rank's end of the star.

    `deliver(rank, header, payload)` and `lost(rank)` are called in the control thread, as is
    `tick()` every half second; `rank` is the sender. `people` is what every rank said in its hello.
    """

    def __init__(self, world: World, store: Store, hello: dict[str, Any], timeout_s: float) -> None:
        """Connect. Collective. Raises WorldError naming the ranks that did not come."""
        self._rank = world.rank
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
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)

    def start(
        self,
        deliver: Deliver,
        lost: Callable[[int], None],
        tick: Callable[[], None],
        begin: Callable[[], None],
    ) -> None:
        """Begin to deliver; `begin` is the first thing that the thread does."""
        self._deliver, self._lost, self._tick, self._begin = deliver, lost, tick, begin
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
        if threading.current_thread() is not self._thread:
            with suppress(OSError):  # it has been woken already, or has gone
                os.write(self._wake_out, b"\0")

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
        self._begin()
        for peer in list(self._peers.values()):
            self._deliver_all(peer)  # what came together with the greeting
        while not self._stopping:
            for peer in list(self._peers.values()):
                self._watch(peer)
            for key, events in self._selector.select(0 if self._own else _TICK_S):
                if key.data is None:
                    _drain(self._wake_in)
                else:
                    self._serve(key.data, events)
            while self._own and not self._stopping:
                header, payload = self._own.popleft()
                self._deliver(self._rank, header, payload)
            self._tick()

    def _watch(self, peer: _Peer) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if peer.events != wanted:
            self._selector.modify(peer.sock, wanted, peer)
            peer.events = wanted

    def _serve(self, peer: _Peer, events: int) -> None:
        alive = True
        if events & selectors.EVENT_WRITE:
            peer.send(b"")
        if events & selectors.EVENT_READ:
            alive = peer.read()
            self._deliver_all(peer)
            if self._stopping:
                return
        if not alive and self._peers.pop(peer.rank, None) is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()
            self._lost(peer.rank)

    def _deliver_all(self, peer: _Peer) -> None:
        for header, payload in peer.frames():
            self._deliver(peer.rank, header, payload)
            if self._stopping:
                return

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
        people = {0: hello}
        token = secrets.token_hex(16)
        with _listen() as listener:
            place = [own_addresses(world), listener.getsockname()[1], token]
            store.set("control", json.dumps(place))
            while len(people) < world.size:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    sock, _ = listener.accept()
                    peer = _Peer(-1, sock)
                    said, rank, person = peer.receive(min(deadline, time.monotonic() + 10))
                except TimeoutError:
                    if time.monotonic() < deadline:
                        continue
                    missing = [str(r) for r in range(world.size) if r not in people]
                    raise WorldError(
                        f"hvd.init waited in vain for {len(missing)} of {world.size} ranks: "
                        f"{', '.join(missing)}"
                    ) from None
                except (OSError, ValueError):
                    continue  # a stranger, or a rank that has ended: the deadline will tell
                if said != token or rank in people:
                    sock.close()
                    continue
                peer.rank = rank
                self._peers[rank] = peer
                people[rank] = person
        everyone = [people[rank] for rank in range(world.size)]
        for peer in self._peers.values():
            peer.send(_frame(everyone, b""))
        return everyone

    def _join(
        self, world: World, store: Store, hello: dict[str, Any], deadline: float
    ) -> list[dict[str, Any]]:
        try:
            store.wait(["control"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            hosts, port, token = json.loads(store.get("control"))
            # Where the store is, which has been reached, rank 0 usually is too.
            hosts = list(dict.fromkeys([*store_hosts(store), *hosts]))
        except DistError:
            raise WorldError(f"{world} waited in vain for rank 0 in hvd.init") from None
        why = ""
        while time.monotonic() < deadline:
            for host in hosts:
                try:
                    peer = _Peer(0, socket.create_connection((host, port), timeout=2))
                except OSError as error:
                    why = str(error)
                    continue
                peer.send(_frame([token, world.rank, hello], b""))
                try:
                    people = peer.receive(deadline)
                except (OSError, ValueError):
                    raise WorldError(
                        f"{world} waited in vain for the others in hvd.init, as rank 0 did"
                    ) from None
                self._peers[0] = peer
                return people
            time.sleep(0.05)
        raise WorldError(f"{world} could not reach rank 0 at {hosts} port {port}: {why}")


class _Peer:
    """One connection: a buffer each way."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.events = selectors.EVENT_READ
        self.out = bytearray()
        self._in = bytearray()
        self._lock = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that has lost its power sends no farewell: ask after it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

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
            except OSError:
                return True  # gone: reading will tell
            self.out += frame[sent:]
            return not self.out

    def read(self) -> bool:
        """Read what is there; False at the end of the connection."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._in += data
        return bool(data)

    def frames(self) -> Iterator[tuple[Header, bytes]]:
        """Take the complete frames out of what was read, one by one."""
        while len(self._in) >= _SIZES.size:
            header_size, payload_size = _SIZES.unpack_from(self._in)
            body = _SIZES.size + header_size
            if len(self._in) < body + payload_size:
                return
            header = json.loads(self._in[_SIZES.size : body])
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


def _frame(header: Header, payload: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_SIZES.pack(len(text), len(payload)), text, payload))


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError:
            pass  # IPv6 is compiled in, and switched off
    return socket.create_server(("", 0), backlog=1024)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
