"""The HTTP server of an elastic job: ranks ask for their place, rank 0 publishes its store.

Used by `elastic`; `hvdtrain.job.elastic_world` has the requests. Every request must have the
secret, which the ranks have from their supervisors. One thread per connection. Imports no torch.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hvdtrain.job.elastic_world import SECRET_HEADER

_REQUEST_S = 10.0
_MAX_BYTES = 1 << 16


class RankRequest:
    """A rank that waits for its place in the next generation."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._answered = threading.Event()
        self._text: str | None = None

    def answer(self, text: str) -> None:
        """Send `text` as the response to the request."""
        self._text = text
        self._answered.set()

    def drop(self) -> None:
        """Close the connection without a response: its rank has ended, or asks again."""
        self._answered.set()

    def wait(self) -> str | None:
        """Block until `answer` or `drop` is called; return the text, None if there is none."""
        self._answered.wait()
        return self._text


class ElasticServer(ThreadingHTTPServer):
    """Serves on all interfaces at a free port until `stop`. Its threads call `ask(request)`."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, ask: Callable[[RankRequest], object]) -> None:
        super().__init__(("", 0), _Handler)
        self.ask = ask
        self.secret = secrets.token_hex(32)
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.generation = 0
        self.is_broken = False
        """Whether the current generation has lost a rank."""
        self.update = ""
        """The change of hosts that rank 0 reads when it polls, as "timestamp,kind"; "" for none."""
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, daemon=True, name="elastic-server").start()

    def server_bind(self) -> None:
        """Bind the port for IPv4 as well as for IPv6."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def begin(self, generation: int) -> None:
        """Start a generation: drop the values of older ones, and clear both flags."""
        with self.lock:
            self.values.clear()
            self.generation, self.is_broken, self.update = generation, False, ""

    def stop(self) -> None:
        """Stop serving, and close the port."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: ElasticServer

    def do_GET(self) -> None:
        """Answer a request for a rank, or return a value."""
        server, path = self.server, self.path.strip("/")
        if not self._is_allowed():
            self._reply(403)
        elif path.startswith("rank_and_size/"):
            request = RankRequest(path.partition("/")[2])
            server.ask(request)
            text = request.wait()
            if text is not None:
                self._reply(200, text.encode())
        elif path == "hosts/update":
            self._reply(200, server.update.encode())
        elif self._is_over(path):
            self._reply(410)
        else:
            with server.lock:
                value = server.values.get(path)
            self._reply(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        """Store a value."""
        size = self.headers.get("Content-Length", "")
        if not self._is_allowed():
            self._reply(403)
        elif not size.isdigit() or int(size) > _MAX_BYTES:
            self._reply(413)
        else:
            value, path = self.rfile.read(int(size)), self.path.strip("/")
            is_over = self._is_over(path)
            if not is_over:
                with self.server.lock:
                    self.server.values[path] = value
            self._reply(410 if is_over else 200)

    def _is_allowed(self) -> bool:
        given = self.headers.get(SECRET_HEADER, "")
        return hmac.compare_digest(given.encode(), self.server.secret.encode())

    def _is_over(self, path: str) -> bool:
        """Return whether a store's key is of an old generation, or of one that has lost a rank."""
        server = self.server
        present = path == f"hvdtrain/store.{server.generation}" and not server.is_broken
        return path.startswith("hvdtrain/store") and not present

    def _reply(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
