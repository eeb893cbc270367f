"""shm and mpi4py on two hosts, which are network namespaces: what they do, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.hosts import Hosts, running_hosts
from tests.launch.test_rendezvous import two_hosts  # noqa: F401  a fixture
from tests.launching import BIN, run, started, succeed
from tests.transports.jobs import (
    ADDRESS,
    RANK,
    answers,
    on_hosts,
    run_scenario,
)

Names = tuple[str, str]


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param([[0, 1], [2]], id="uneven"),
        pytest.param([[0, 1], [2, 3]], id="in order", marks=pytest.mark.slow),
        pytest.param([[0, 2], [1, 3]], id="in turn"),
    ],
)
def test_every_collective(
    two_hosts: Names,  # noqa: F811
    hosts: list[list[int]],
    tmp_path: Path,
) -> None:
    inside = on_hosts(two_hosts, hosts)
    how: dict[str, Any] = {"n": len(inside), "inside": inside, **ADDRESS}
    for answer in run_scenario("table", tmp_path, timeout=200, **how)[0]:
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
