"""Jobs under MPIs of another make or version, and with a library that is not the launcher's."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.environments import OTHER_MPIS, other_mpi
from tests.launch.test_failure import FAILING, GOOD, check_orphans_end, settings
from tests.launching import Finished, run, succeed
from tests.runs import run_json

pytestmark = [pytest.mark.xdist_group("launch-other-mpis"), pytest.mark.exhaustive]


def run_under(name: str, line: str) -> Finished:
    """Run the ranks of a line under an MPI, with its Python."""
    mpi, packages = other_mpi(name)
    words = [mpi / "python" if word == "python" else word for word in line.split()]
    return run([mpi / "mpiexec", *words], env=packages)


@pytest.mark.parametrize("name", OTHER_MPIS)
def test_training(name: str, tmp_path: Path) -> None:
    options = f"--task digits --epochs 1 --threads 1 --run-dir {tmp_path}/run"
    succeed(run_under(name, f"-n 2 {GOOD} {options}"))
    record = run_json(tmp_path / "run")
    world = record["world"]
    assert (world["launcher"], world["size"], world["local_size"]) == (name.rstrip("5"), 2, 2)
    assert record["outcome"] == "finished"


@pytest.mark.parametrize("name", OTHER_MPIS)
def test_one_rank_fails(name: str, tmp_path: Path) -> None:
    finished = run_under(name, f"-n 2 python {FAILING} ddp raise 1 {tmp_path}/mark")
    assert finished.code != 0
    assert finished.output.count("Traceback (most recent call last)") == 1, finished.output
    assert finished.lines("[rank 1/2] failed:")


@pytest.mark.parametrize("name", OTHER_MPIS)
def test_one_rank_never_comes(name: str) -> None:
    finished = run_under(name, f"-n 1 {GOOD} : -n 1 {GOOD} --epochs -1")
    assert finished.code != 0
    (only,) = finished.lines("error: ")
    assert "--epochs -1" in only


def test_a_killed_mpirun_of_open_mpi_5_leaves_no_shared_memory(tmp_path: Path) -> None:
    """Its ranks end, and delete the files that it would have deleted."""
    mpi, packages = other_mpi("openmpi5")
    waits = ["-m", "hvdtrain", "--backend", "ddp", *settings(tmp_path, "loop", "wait", -1)]
    command = [str(mpi / "mpirun"), "-n", "2", str(mpi / "python"), *map(str, waits)]
    check_orphans_end(command, tmp_path / "mark", signal.SIGKILL, packages)


def test_mpich_with_an_open_mpi_library(tmp_path: Path) -> None:
    mpiexec = other_mpi("mpich")[0] / "mpiexec"
    line = f"-n 2 {sys.executable} -m hvdtrain --backend ddp --run-dir {tmp_path}/run"
    finished = run([mpiexec, *line.split()])
    assert finished.code == 2, finished.output
    (only,) = finished.lines("error: ")
    assert re.search(r"mpich started rank \d of 2", only)  # rank 0, unless it is seconds late
    assert "Open MPI" in only
    assert "Traceback" not in finished.output
    assert not (tmp_path / "run").exists()
