"""Connecting to rank 0's store: which it is, and what the error says of unresolved names."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter

import pytest

from hvdtrain.errors import WorldError
from hvdtrain.job import rendezvous
from hvdtrain.job.world import World
from tests.environments import rows

WORLD = World(1, 2, 0, 1, 1, 2, "srun", "by hand")
UNKNOWN = socket.gaierror(-2, "Name or service not known")
REFUSED = ConnectionRefusedError(111, "Connection refused")


# In which round of three the names of two hosts resolve, and how the error ends
ROUNDS = """
2 2 | node0:1, 10.0.0.1:1: [Errno 111] Connection refused  # as a container that has just started
4 1 | 10.0.0.1:1: [Errno 111] Connection refused
4 4 | node0, 10.0.0.1 does not resolve; set MASTER_ADDR and MASTER_PORT
"""


@pytest.mark.parametrize(("rounds", "end"), rows(ROUNDS))
def test_a_host_that_does_not_resolve(
    rounds: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolves = dict(zip(("node0", "10.0.0.1"), map(int, rounds.split()), strict=True))
    tries: Counter[str] = Counter()

    def connect(address: tuple[str, int], timeout: float) -> None:
        host = address[0]
        tries[host] += 1
        raise UNKNOWN if tries[host] < resolves[host] else REFUSED

    monkeypatch.setattr(rendezvous, "poll_until", lambda deadline, pause_s: range(3))
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.0)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(WorldError, match=f"{re.escape(end)}$"):
        rendezvous._connect(WORLD, [(host, 1) for host in resolves], "", time.monotonic())
    assert tries == dict.fromkeys(resolves, 3)


def test_the_store_of_another_job_is_passed_over() -> None:
    deadline = time.monotonic() + 60
    theirs, mine = (rendezvous._serve(0, deadline) for _ in range(2))
    rendezvous._put_proof(theirs, "theirs")
    rendezvous._put_proof(mine, "mine")
    places = [("localhost", store.port) for store in (theirs, mine)]
    assert rendezvous._connect(WORLD, places, "mine", deadline).port == mine.port
