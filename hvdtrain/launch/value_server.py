"""An HTTP server from which the ranks of a job read values, and to which they write others.

Used by `elastic_server`, and by `function_call` for calls and results. Both ends prove by HMAC that
they have the secret, which the ranks have from their supervisors and which is never sent here;
`elastic_world.request` is the other end. One thread per connection. Imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hvdtrain.job.elastic_world import PROOF_HEADER, proof

_REQUEST_S = 10.0  # until a request has arrived
TRANSFER_S = 600.0
SERVER = "HVDTRAIN_CALL_SERVER"
"""The variable of a rank with the address, port and secret of a server, as JSON."""


class ValueServer(ThreadingHTTPServer):
    """Serves `values` at a free port until `stop`: of this address, else of all interfaces."""

    daemon_threads = True

    def __init__(self, address: str = "", max_bytes: float = math.inf) -> None:
        super().__init__((address, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        is_ipv6 = ":" in address or (not address and socket.has_dualstack_ipv6())
        self.socket = socket.create_server(
            (address, 0),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=is_ipv6,
        )
        self.max_bytes = max_bytes
        self.secret = secrets.token_hex(32)
        self.values: dict[str, bytes] = {}
        """By path, in the order of arrival."""
        self.port = int(self.socket.getsockname()[1])
        threading.Thread(target=self.serve_forever, daemon=True, name="value-server").start()

    def get(self, path: str) -> tuple[int, bytes] | None:
        """Return HTTP's status and the body of a response; None closes the connection."""
        value = self.values.get(path)
        return (404, b"") if value is None else (200, value)

    def put(self, path: str, value: bytes) -> int:
        """Store a value; return HTTP's status."""
        self.values[path] = value
        return 200

    def below(self, folder: str) -> dict[str, bytes]:
        """Return the values whose paths begin with `folder` and "/", by the rest of their paths, in
        the order of arrival.
        """
        values, start = self.values.copy(), f"{folder}/"  # other threads store values meanwhile
        return {path.removeprefix(start): values[path] for path in values if path.startswith(start)}

    def stop(self) -> None:
        """Stop serving, and close the port."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: ValueServer

    def do_GET(self) -> None:
        """Return a value, or store one."""
        path, parts = self.path.strip("/"), self.headers.get(PROOF_HEADER, "").split(" ")
        nonce, digest, given = parts if len(parts) == 3 else ("", "", "")
        wanted = proof(self.server.secret, nonce, self.command, path, digest)
        is_proven = hmac.compare_digest(given.encode(), wanted.encode())
        response = self._response(path, digest) if is_proven else (403, b"")
        if response is None:
            return
        code, body = response
        self.connection.settimeout(TRANSFER_S)  # that of a socket is for all of `body`
        own_digest = hashlib.sha256(body).hexdigest()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        own_proof = proof(self.server.secret, nonce, "response", path, own_digest)
        self.send_header(PROOF_HEADER, own_proof)
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def _response(self, path: str, digest: str) -> tuple[int, bytes] | None:
        """Return HTTP's status and the body of a response. `digest` is that of the request."""
        if self.command == "GET":
            return self.server.get(path)
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > self.server.max_bytes:
            return 413, b""
        value = self.rfile.read(int(size))
        if hashlib.sha256(value).hexdigest() != digest:  # or its rank has died meanwhile
            return 400, b""
        return self.server.put(path, value), b""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
