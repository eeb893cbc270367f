"""shm and mpi4py on two hosts, which are network namespaces: what they do, and how they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.hosts import Hosts, running_hosts
from tests.launch.test_rendezvous import two_hosts  # noqa: F401  a fixture
from tests.launching import BIN, run, started, succeed
from tests.transports.jobs import (
    RANK,
    Answer,
    answers,
    run_scenario,
)

Names = tuple[str, str]
HOSTS = [[0, 1], [2, 3]]


def run_on(names: Names, hosts: list[list[int]], *what: object, **how: Any) -> list[Answer]:
    by_rank = {
        rank: ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME=hv{os.getpid()}{end}"]
        for ranks, name, end in zip(hosts, names, "ab", strict=True)
        for rank in ranks
    }
    inside = [by_rank[rank] for rank in sorted(by_rank)]
    address = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577"}
    scenario, folder, *arguments = what
    assert isinstance(folder, Path)
    how |= {"n": len(inside), "inside": inside, **address}
    return run_scenario(str(scenario), folder, *arguments, **how)[0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param([[0, 1], [2]], id="uneven", marks=pytest.mark.exhaustive),
        pytest.param([[0, 1], [2, 3]], id="in order", marks=pytest.mark.exhaustive),
        pytest.param([[0, 2], [1, 3]], id="in turn", marks=pytest.mark.exhaustive),
    ],
)
def test_every_collective(
    two_hosts: Names,  # noqa: F811
    hosts: list[list[int]],
    tmp_path: Path,
) -> None:
    for answer in run_on(two_hosts, hosts, "table", tmp_path, timeout=200):
        assert answer["hosts"] == hosts
        assert not answer["failed"], "\n".join(answer["failed"].values())


# mpi4py


@pytest.fixture(scope="module")
def ssh_hosts() -> Iterator[Hosts]:
    """a and b, on which mpirun can start ranks."""
    with running_hosts(2) as hosts:
        yield hosts


def under_mpirun(hosts: Hosts, *command: object) -> list[str]:
    return hosts.on_login(BIN / "mpirun", "-H", "a:1,b:1", "-np", 2, *command)


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
def test_every_operation_of_ranks_that_then_leave_mpi(ssh_hosts: Hosts, tmp_path: Path) -> None:
    """MPI reports a send as complete once the system has taken its data, and may keep its last
    packet until the next call of MPI. The small send buffer makes it do so nearly every time.
    """
    small = ["--mca", "btl_tcp_sndbuf", 4096, "-x", "TEST_TIMEOUT_S=20"]
    command = [*RANK, "mpi4py", "leaves_mpi_after_each", tmp_path]
    succeed(run(under_mpirun(ssh_hosts, *small, *command), timeout=180))
    assert answers(tmp_path, 2) == [{}, {}]


@pytest.mark.timeout(120)
@pytest.mark.exhaustive
def test_training_beside_a_busy_process(ssh_hosts: Hosts, tmp_path: Path) -> None:
    options = "--backend compat --epochs 1 --timeout 15 --run-dir".split()
    with started([sys.executable, "-c", "while True: pass"]):
        line = under_mpirun(ssh_hosts, "hvdtrain", *options, tmp_path)
        assert "compat over mpi" in succeed(run(line, timeout=90))
