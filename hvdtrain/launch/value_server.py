"""An HTTP server from which the ranks of a job read values, and to which they write others.

Used by `elastic_server`, and by `function_call` for calls and results. Both ends prove by HMAC that
they have the secret, which the ranks have from their supervisors and which is never sent here;
`elastic_world.request` is the other end. One thread per connection. Imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hvdtrain.job.elastic_world import PROOF_HEADER, proof

_REQUEST_S = 10.0  # until a request has arrived
_TRANSFER_S = 600.0


class ValueServer(ThreadingHTTPServer):
    """Serves `values` at a free port until `stop`: of this address, else of all interfaces."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: str = "", max_bytes: int | None = None) -> None:
        is_ipv6 = ":" in address or (not address and socket.has_dualstack_ipv6())
        self.address_family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        super().__init__((address, 0), _Handler)
        self.max_bytes = max_bytes
        self.secret = secrets.token_hex(32)
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        """By path, in the order of arrival."""
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, daemon=True, name="value-server").start()

    def server_bind(self) -> None:
        """Bind the port for IPv4 as well as for IPv6."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get(self, path: str) -> tuple[int, bytes] | None:
        """Return HTTP's status and the body of a response; None closes the connection."""
        with self.lock:
            value = self.values.get(path)
        return (404, b"") if value is None else (200, value)

    def put(self, path: str, value: bytes) -> int:
        """Store a value; return HTTP's status."""
        with self.lock:
            self.values[path] = value
        return 200

    def below(self, folder: str) -> dict[str, bytes]:
        """Return the values whose paths begin with `folder` and "/", by the rest of their paths, in
        the order of arrival.
        """
        with self.lock:
            paths = [path for path in self.values if path.startswith(f"{folder}/")]
            return {path[len(folder) + 1 :]: self.values[path] for path in paths}

    def stop(self) -> None:
        """Stop serving, and close the port."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: ValueServer

    def do_GET(self) -> None:
        """Return a value."""
        if self._is_proven() and (response := self.server.get(self.path.strip("/"))) is not None:
            self._reply(*response)

    def do_PUT(self) -> None:
        """Store a value."""
        size, most = self.headers.get("Content-Length", ""), self.server.max_bytes
        if not self._is_proven():
            return
        if not size.isdigit() or (most is not None and int(size) > most):
            self._reply(413)
            return
        value = self.rfile.read(int(size))
        if hashlib.sha256(value).hexdigest() != self._given()[1]:  # or its rank has died meanwhile
            self._reply(400)
            return
        self._reply(self.server.put(self.path.strip("/"), value))

    def _given(self) -> list[str]:
        """Return what the request proves: its nonce, the digest of its body, and the HMAC."""
        given = self.headers.get(PROOF_HEADER, "").split(" ")
        return given if len(given) == 3 else ["", "", ""]

    def _is_proven(self) -> bool:
        """Return whether the sender has the secret; reply 403 if not. Reads no body."""
        nonce, digest, given = self._given()
        path = self.path.strip("/")
        wanted = proof(self.server.secret, nonce, self.command, path, digest)
        is_proven = hmac.compare_digest(given.encode(), wanted.encode())
        if not is_proven:
            self._reply(403)
        return is_proven

    def _reply(self, code: int, body: bytes = b"") -> None:
        self.connection.settimeout(_TRANSFER_S)  # that of a socket is for all of `body`
        digest = hashlib.sha256(body).hexdigest()
        parts = self._given()[0], "response", self.path.strip("/"), digest
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header(PROOF_HEADER, proof(self.server.secret, *parts))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
