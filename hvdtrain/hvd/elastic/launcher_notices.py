"""Notices of the elastic launcher: hosts that come and go. Used by the notification manager.

    hvdrun       <- rank 0 polls "GET /hosts/update" each second: "timestamp,kind", or nothing
    horovodrun   -> connects to the port that each rank registers by "PUT /worker_addresses/...",
                    and sends a pickled request, signed by HMAC-SHA256 with the registered key

Horovod's requests are read by an unpickler that knows only their three classes: nothing of
Horovod's is imported, which may be hidden by its alias.
"""

from __future__ import annotations

import base64
import hmac
import io
import logging
import os
import pickle
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from hvdtrain.job import elastic_world
from hvdtrain.job.elastic_world import HostUpdateResult

Report = Callable[[float, HostUpdateResult], None]

_log = logging.getLogger("hvdtrain")
_POLL_S = 1.0
_READ_S = 10.0
_MAX_BYTES = 1 << 16
_NETWORK = "horovod.runner.common.util.network"
_WORKER = "horovod.runner.elastic.worker"
_SERVICE = "worker notification service"


def receive(report: Report) -> None:
    """Call `report` from a thread for each notice of the launcher. Not collective."""
    if elastic_world.by_hvdrun():
        threading.Thread(target=_poll, args=(report,), daemon=True, name="elastic").start()
        return
    server = _Server(report, os.environ.get("HOROVOD_GLOO_IFACE"))
    threading.Thread(target=server.serve_forever, daemon=True, name="elastic").start()
    worker = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    registration = base64.b64encode(pickle.dumps((server.places(), server.key)))
    try:
        elastic_world.request(f"worker_addresses/{worker}", registration)
    except OSError as error:
        _log.warning("elastic: horovodrun sends no notice of hosts to this rank: %s", error)


def _poll(report: Report) -> None:
    latest = 0.0
    while True:
        time.sleep(_POLL_S)
        if os.environ.get("HOROVOD_RANK") != "0":
            continue
        with suppress(OSError, ValueError):  # the launcher ends; `launcher_watch` says so
            if answer := elastic_world.request("hosts/update"):
                timestamp, _, kind = answer.decode().partition(",")
                if float(timestamp) > latest:
                    latest = float(timestamp)
                    report(latest, HostUpdateResult(int(kind)))


class _Server(socketserver.ThreadingTCPServer):
    """Receives the requests of Horovod's driver."""

    daemon_threads = True

    def __init__(self, report: Report, interface: str | None) -> None:
        super().__init__(("", 0), _Handler)
        self.report = report
        self.key = secrets.token_bytes(32)
        self._interface = interface

    def places(self) -> dict[str, list[tuple[str, int]]]:
        """Return this host's IPv4 addresses and the port, by interface."""
        port = int(self.server_address[1])
        return {
            name: [(a.address, port) for a in addresses if a.family == socket.AF_INET]
            for name, addresses in psutil.net_if_addrs().items()
            if self._interface in (None, name)
        }


class _Handler(socketserver.StreamRequestHandler):
    timeout = _READ_S

    def handle(self) -> None:
        """Answer one request. A message without a valid digest is dropped before it is read."""
        server = self.server
        assert isinstance(server, _Server)
        with suppress(OSError, struct.error, pickle.UnpicklingError):
            digest, (length,) = self.rfile.read(32), struct.unpack("i", self.rfile.read(4))
            if not 0 <= length <= _MAX_BYTES:
                return
            message = self.rfile.read(length)
            if not hmac.compare_digest(digest, _digest(server.key, message)):
                return
            request = _Unpickler(io.BytesIO(message)).load()
            if isinstance(request, _HostsUpdated):
                server.report(float(request.timestamp), HostUpdateResult(request.res))
                answer = _pickled("AckResponse")
            else:
                source = self.client_address[0]
                answer = _pickled("PingResponse", service_name=_SERVICE, source_address=source)
            head = _digest(server.key, answer) + struct.pack("i", len(answer))
            self.wfile.write(head + answer)


class _HostsUpdated:
    """Horovod's HostsUpdatedRequest."""

    timestamp: float = 0.0
    res: int = 0


class _Ping:
    """Horovod's PingRequest."""


class _Unpickler(pickle.Unpickler):
    """Knows the classes of Horovod's requests, and no others."""

    _CLASSES = {
        (_WORKER, "HostsUpdatedRequest"): _HostsUpdated,
        (_WORKER, "HostUpdateResult"): HostUpdateResult,
        (_NETWORK, "PingRequest"): _Ping,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that stands for Horovod's. Raises UnpicklingError for any other."""
        if (module, name) not in self._CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is in no request of Horovod's")
        return self._CLASSES[module, name]


def _pickled(name: str, **fields: str) -> bytes:
    """Return the pickle of an instance of a class of Horovod's, which need not be installed."""
    state = pickle.dumps(fields, 2)[2:-1]  # without the marks of begin and end
    return b"\x80\x02c" + f"{_NETWORK}\n{name}\n".encode() + b")\x81" + state + b"b."


def _digest(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
