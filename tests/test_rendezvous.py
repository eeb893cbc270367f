"""Connecting to rank 0's store: what the error says of names that did not resolve."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from hvdtrain import rendezvous
from hvdtrain.errors import WorldError
from hvdtrain.world import World

WORLD = World(1, 2, 0, 1, 1, 2, "srun", "by hand")
UNKNOWN = socket.gaierror(-2, "Name or service not known")
REFUSED = ConnectionRefusedError(111, "Connection refused")


def failure(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, int], OSError]) -> str:
    """Return the error after three rounds, where the n-th connection to a host gets an answer."""
    tries: dict[str, int] = {}

    def connect(address: tuple[str, int], timeout: float) -> None:
        host = address[0]
        tries[host] = tries.get(host, 0) + 1
        raise answer(host, tries[host])

    monkeypatch.setattr(rendezvous, "poll_until", lambda deadline, pause_s: range(3))
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.0)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(WorldError) as raised:
        rendezvous._connect(WORLD, [("node0", 1), ("10.0.0.1", 1)], None, time.monotonic())
    assert tries == {"node0": 3, "10.0.0.1": 3}
    return str(raised.value)


def test_a_name_that_resolves_later_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All did not resolve at first, as in a container that has just started."""
    text = failure(monkeypatch, lambda host, n: UNKNOWN if n == 1 else REFUSED)
    assert text.endswith("node0:1, 10.0.0.1:1: [Errno 111] Connection refused")


def test_one_host_of_two_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is the reason."""
    text = failure(monkeypatch, lambda host, n: UNKNOWN if host == "node0" else REFUSED)
    assert text.endswith("10.0.0.1:1: [Errno 111] Connection refused")


def test_no_host_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    text = failure(monkeypatch, lambda host, n: UNKNOWN)
    assert text.endswith("node0, 10.0.0.1 does not resolve; set MASTER_ADDR and MASTER_PORT")
