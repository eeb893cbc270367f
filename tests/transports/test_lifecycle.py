"""What groups of shm leave behind. How they end with a lost rank: tests/death."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments import own_namespaces, require, rows
from tests.forkserver import warm
from tests.launch.test_failure import line
from tests.launching import run, succeed
from tests.transports.jobs import run_scenario


@pytest.mark.parametrize(
    ("launcher", "transport"),
    rows("""
    torchrun | shm | rest
    hvdrun   | shm
    mpirun   | shm | rest
    mpirun   | mpi4py
    """),
)
@pytest.mark.parametrize("late", [0, 1])
def test_groups_again(tmp_path: Path, launcher: str, transport: str, late: int) -> None:
    module = ["-m", "tests.transports.lifecycle", transport, "groups_again"]
    succeed(run(warm(line(launcher, 2, *module, tmp_path, late)), timeout=100))


def test_what_ends_leaves_nothing(tmp_path: Path) -> None:
    answers, _ = run_scenario("groups_and_temporaries", tmp_path, timeout=110)
    for answer in answers:
        before, after = answer["before"], answer["after"]
        for what in ("descriptors", "maps", "threads"):
            assert after[what] <= before[what] + 8, answers
        assert after["mib"] <= before["mib"] + 64, answers


def test_too_small_shared_memory(tmp_path: Path) -> None:
    """As in containers, whose /dev/shm has 64 MB."""
    inside = own_namespaces('mount -t tmpfs -o size=4m none /dev/shm && exec "$@"')
    answers, output = run_scenario("small_memory", tmp_path, inside=[inside] * 2)
    assert not any(answer["moved"] for answer in answers)
    assert output.count("tensors are copied instead of shared") == 2, output


@pytest.mark.parametrize("pure", [0, 1])
def test_ranks_meet_in_c_if_all_can(pure: int, tmp_path: Path) -> None:
    inside = [["env", "HVDTRAIN_PURE_PYTHON=1"]] * pure + [["env"]] * (3 - pure)
    assert run_scenario("mixed", tmp_path, inside=inside)[0] == [{"in C": not pure}] * 3


def test_ranks_of_a_host_that_cannot_share_memory_say_so(tmp_path: Path) -> None:
    require(root=True)
    _, output = run_scenario("no_access", tmp_path)
    for rank in range(2):
        assert f"rank {rank} cannot map the memory of rank {1 - rank} ([Errno 13]" in output, output
    assert output.count("as if on two hosts, which is slower") == 2, output
