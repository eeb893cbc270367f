"""Connecting to rank 0's store: which it is, and what the error says of unresolved names."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Callable

import pytest

from hvdtrain.errors import WorldError
from hvdtrain.job import rendezvous
from hvdtrain.job.world import World

WORLD = World(1, 2, 0, 1, 1, 2, "srun", "by hand")
UNKNOWN = socket.gaierror(-2, "Name or service not known")
REFUSED = ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        # All resolve later, as in a container that has just started.
        (
            lambda host, n: UNKNOWN if n == 1 else REFUSED,
            "node0:1, 10.0.0.1:1: [Errno 111] Connection refused",
        ),
        (
            lambda host, n: UNKNOWN if host == "node0" else REFUSED,
            "10.0.0.1:1: [Errno 111] Connection refused",
        ),
        (
            lambda host, n: UNKNOWN,
            "node0, 10.0.0.1 does not resolve; set MASTER_ADDR and MASTER_PORT",
        ),
    ],
    ids=["all resolve later", "one of two does not resolve", "none resolves"],
)
def test_a_host_that_does_not_resolve(
    answer: Callable[[str, int], OSError], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error after three rounds, where the n-th connection to a host gets an answer."""
    tries: Counter[str] = Counter()

    def connect(address: tuple[str, int], timeout: float) -> None:
        host = address[0]
        tries[host] += 1
        raise answer(host, tries[host])

    monkeypatch.setattr(rendezvous, "poll_until", lambda deadline, pause_s: range(3))
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.0)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(WorldError, match=f"{re.escape(end)}$"):
        rendezvous._connect(WORLD, [("node0", 1), ("10.0.0.1", 1)], "", time.monotonic())
    assert tries == {"node0": 3, "10.0.0.1": 3}


def test_the_store_of_another_job_is_passed_over() -> None:
    deadline = time.monotonic() + 60
    theirs, mine = (rendezvous._serve(0, deadline) for _ in range(2))
    rendezvous._put_proof(theirs, "theirs")
    rendezvous._put_proof(mine, "mine")
    places = [("localhost", store.port) for store in (theirs, mine)]
    assert rendezvous._connect(WORLD, places, "mine", deadline).port == mine.port
