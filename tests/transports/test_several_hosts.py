"""shm and mpi4py on two hosts, which are network namespaces: what they do, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.hosts import running_hosts
from tests.launch.test_rendezvous import two_hosts  # noqa: F401  a fixture
from tests.launching import BIN, run, succeed
from tests.transports.jobs import (
    ADDRESS,
    RANK,
    on_hosts,
    run_scenario,
)

Names = tuple[str, str]


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize("hosts", [[[0, 1], [2]], [[0, 2], [1, 3]]], ids=["uneven", "in turn"])
def test_every_collective(
    two_hosts: Names,  # noqa: F811
    hosts: list[list[int]],
    tmp_path: Path,
) -> None:
    inside = on_hosts(two_hosts, hosts)
    told, _ = run_scenario("table", tmp_path, 200, inside, **ADDRESS)
    assert told == [{"hosts": hosts}] * len(told)


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
def test_every_operation_of_ranks_that_then_leave_mpi(tmp_path: Path) -> None:
    """MPI reports a send as complete once the system has taken its data, and may keep its last
    packet until the next call of MPI. The small send buffer makes it do so nearly every time.
    """
    mpirun = [BIN / "mpirun", "-H", "a:1,b:1", "-np", 2, "-x", "TEST_TIMEOUT_S=20"]
    mpirun += ["--mca", "btl_tcp_sndbuf", 4096, *RANK, "mpi4py", "leaves_mpi_after_each", tmp_path]
    with running_hosts(2) as hosts:
        succeed(run(hosts.on_login(*mpirun), timeout=180))
