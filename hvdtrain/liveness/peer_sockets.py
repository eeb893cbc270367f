"""TCP connections between ranks: authentication, message frames, and detection of a lost host.

`peers` uses it.

Any program that reaches the address can connect to the port. So no message is parsed before its
sender has proved that it has the job's secret, which is not sent: each end sends an HMAC over both
nonces. Those of client and server differ, so none can be reflected. The greeting has a fixed
size, and a connection that does not authenticate takes one descriptor for a few seconds at most:

    client                                          server
      |<--- nonce ------------------------------------|   32 bytes
      |---- rank, nonce, HMAC as client ------------->|   68 bytes
      |<--- HMAC as server ---------------------------|   32 bytes
      |<=== frames: sizes, JSON list, raw bytes =====>|   nothing in them is ever executed

Both HMACs include the session, a random text that the server publishes with its addresses: a
connection to another server of the same job fails.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import json
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from hvdtrain.job import elastic_world, job_secret
from hvdtrain.job.job_secret import TAG_BYTES

LOST_S = 10
"""Seconds without an acknowledgement from a host after which a connection to it fails."""
_NONCE_BYTES = 32
_SIOCOUTQ, _SIOCOUTQNSD = 0x5411, 0x894B  # linux/sockios.h: bytes unacknowledged, bytes unsent
_TCPI_PROBES = 3  # linux/tcp.h: the byte of tcp_info that counts unanswered probes
_RANK = struct.Struct("<I")
_GREETING = struct.Struct(f"<I{_NONCE_BYTES}s{TAG_BYTES}s")  # rank, nonce, HMAC
_HANDSHAKE_S = 10.0
_MAX_PENDING = 128
Header = list[Any]
_SIZES = struct.Struct("<II")  # of a frame: bytes of its JSON list, and of its payload
_READ_BYTES = 1 << 18
_MAX_FRAME_BYTES = 1 << 28  # a plan of 100,000 parameters takes a tenth of it
_UNREACHABLE = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
)


class InvalidMessage(ValueError):
    """A rank has sent what no rank of this version sends. `peers` drops its connection."""


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Listen on a free port of each address. Raises OSError if no address can be bound."""
    listeners: list[socket.socket] = []
    why: OSError | None = None
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listeners.append(socket.create_server((address, 0), family=family, backlog=1024))
        except OSError as error:
            why = error
    if why is not None and not listeners:
        raise why
    return listeners


def accept_peers(
    listeners: Sequence[socket.socket], session: bytes, expected: set[int], deadline: float
) -> dict[int, socket.socket]:
    """Return the authenticated connections of the expected peers, by rank.

    Returns early with all of them, else at the deadline with those that arrived. If a peer connects
    twice, it has retried: the later connection counts. Every error closes one connection only.
    Raises WorldError if an elastic job has lost a rank meanwhile.
    """
    accepted: dict[int, socket.socket] = {}
    pending: _Pending = {}
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        try:
            while expected - accepted.keys() and (now := time.monotonic()) < deadline:
                elastic_world.check_generation()
                for key, _ in selector.select(min(0.5, deadline - now)):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock in listeners:
                        _accept(sock, selector, pending)
                    elif sock in pending:
                        selector.unregister(sock)
                        _, nonce = pending.pop(sock)
                        rank = _authenticate(sock, session, nonce, expected)
                        if rank is None:
                            sock.close()
                        else:
                            if rank in accepted:
                                accepted[rank].close()
                            accepted[rank] = sock
                _drop_pending(selector, pending, _MAX_PENDING + len(expected))
        except BaseException:
            for sock in accepted.values():
                sock.close()
            raise
        finally:
            for sock in pending:
                sock.close()
    return accepted


_Pending = dict[socket.socket, tuple[float, bytes]]
"""Connections without a greeting yet, the oldest first: the deadline, and the nonce they got."""


def _accept(listener: socket.socket, selector: selectors.BaseSelector, pending: _Pending) -> None:
    """Add a new connection to `pending`; it becomes readable when its greeting is complete."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        sock, _ = listener.accept()
    except OSError:
        _drop_pending(selector, pending, len(pending) - 1)  # the descriptors may be used up
        time.sleep(0.01)
        return
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _GREETING.size)
        sock.send(nonce)
    except OSError:  # the other end has closed it already
        sock.close()
        return
    pending[sock] = time.monotonic() + _HANDSHAKE_S, nonce
    selector.register(sock, selectors.EVENT_READ)


def _drop_pending(selector: selectors.BaseSelector, pending: _Pending, most: int) -> None:
    """Close connections whose greeting is late, and the oldest ones if there are over `most`."""
    while pending:
        sock, (deadline, _) = next(iter(pending.items()))
        if len(pending) <= most and deadline > time.monotonic():
            return
        selector.unregister(sock)
        del pending[sock]
        sock.close()


def _proof(role: bytes, session: bytes, rank: int, server: bytes, client: bytes) -> bytes:
    """Return what proves the job's secret in one connection: the nonces are of both its ends."""
    return job_secret.tag("connection", role, session, _RANK.pack(rank), server, client)


def _authenticate(
    sock: socket.socket, session: bytes, nonce: bytes, expected: set[int]
) -> int | None:
    """Answer a correct greeting and return the peer's rank; return None for any other."""
    try:
        rank, theirs, proof = _GREETING.unpack(sock.recv(_GREETING.size))
        wanted = _proof(b"client", session, rank, nonce, theirs)
        if not hmac.compare_digest(proof, wanted) or rank not in expected:
            return None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        sock.send(_proof(b"server", session, rank, nonce, theirs))
        configure(sock)
    except (OSError, struct.error):  # it is closed, maybe before its greeting was complete
        return None
    return int(rank)


def connect(place: tuple[str, int], session: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Connect as peer `rank`. Raises OSError unless the server proves the secret in time."""
    deadline = time.monotonic() + timeout_s
    sock = socket.create_connection(place, timeout_s)
    try:
        theirs, nonce = _receive(sock, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
        proof = _proof(b"client", session, rank, theirs, nonce)
        sock.sendall(_GREETING.pack(rank, nonce, proof))
        wanted = _proof(b"server", session, rank, theirs, nonce)
        if not hmac.compare_digest(_receive(sock, TAG_BYTES, deadline), wanted):
            raise ConnectionRefusedError(f"{place[0]}:{place[1]} is not a rank of this job")
        configure(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _receive(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data


def configure(sock: socket.socket) -> None:
    """Make a socket blocking, send small messages without delay, and detect the loss of a host.

    Keepalive alone does not detect it: the kernel sends no probe while data are unacknowledged, and
    retransmits these for a quarter of an hour.
    """
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {
        "TCP_KEEPIDLE": LOST_S // 2,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": LOST_S * 1000,
    }.items():
        if hasattr(socket, option):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def spare_stopped_reader(sock: socket.socket) -> None:
    """Disable TCP_USER_TIMEOUT while the peer's receive window is closed. Call it every second.

    A stopped process (SIGSTOP) does not read, so its window closes. Its host answers the window
    probes, but Linux counts the time towards TCP_USER_TIMEOUT all the same. With the link down the
    data remain unsent as well, but then the probes stay unanswered.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    with suppress(OSError):
        queued, unsent = (
            int.from_bytes(fcntl.ioctl(sock, request, bytes(4)), sys.byteorder)
            for request in (_SIOCOUTQ, _SIOCOUTQNSD)
        )
        probes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[_TCPI_PROBES]
        # Nothing is in flight, but there are data to send: the window is closed.
        timeout_s = 0 if unsent and unsent == queued and probes <= 1 else LOST_S
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_s * 1000)


class Connection:
    """A non-blocking connection to a rank, with a buffer for each direction."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.rank = rank
        self.sock = sock
        self.unsent = bytearray()
        self.last_received = time.monotonic()
        self._received = bytearray()
        self._lock = threading.Lock()
        self._error: OSError | None = None

    def send(self, frame: bytes) -> bool:
        """Send what the kernel takes, and keep the rest in order; return whether all is sent."""
        with self._lock:
            if self.unsent:
                self.unsent += frame
            try:
                with memoryview(self.unsent or frame) as data:  # no copy of what is left
                    sent = self.sock.send(data) if data else 0
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._error = error  # kept: the system raises it once, then recv returns b""
                return True
            if self.unsent:
                del self.unsent[:sent]
            else:
                self.unsent += frame[sent:]
            return not self.unsent

    def read(self) -> bool:
        """Read what has arrived; return whether the connection is still open."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError as error:
            data, self._error = b"", error
        self._received += data
        self.last_received = time.monotonic()
        return bool(data)

    @property
    def is_unreachable(self) -> bool:
        """Whether the connection failed because the other host does not answer."""
        return self._error is not None and self._error.errno in _UNREACHABLE

    def frames(self) -> Iterator[tuple[Header, bytes]]:
        """Remove and yield the complete frames that have arrived.

        Raises InvalidMessage for bytes that are no frame.
        """
        while len(self._received) >= _SIZES.size:
            header_size, payload_size = _SIZES.unpack_from(self._received)
            if header_size + payload_size > _MAX_FRAME_BYTES:
                raise InvalidMessage(f"{header_size + payload_size} bytes")
            body = _SIZES.size + header_size
            if len(self._received) < body + payload_size:
                return
            header = parse(self._received[_SIZES.size : body])
            if not isinstance(header, list) or not header:
                raise InvalidMessage(f"a JSON {type(header).__name__}")
            payload = bytes(self._received[body : body + payload_size])
            del self._received[: body + payload_size]
            yield header, payload


def encode(header: Header, payload: bytes) -> bytes:
    """Return a frame. Raises ValueError if it is too large."""
    text = json.dumps(header, separators=(",", ":")).encode()
    num_bytes = len(text) + len(payload)
    if num_bytes > _MAX_FRAME_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes is over {_MAX_FRAME_BYTES}")
    return b"".join((_SIZES.pack(len(text), len(payload)), text, payload))


def parse(text: bytes | bytearray) -> Any:
    """Return the value of a JSON text. Raises InvalidMessage."""
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidMessage("too deeply nested") from None
    except ValueError as error:
        raise InvalidMessage(str(error)) from None
