"""Jobs under an MPI of another make, and with a library that is not the launcher's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import tests.mpich
from tests.launching import run

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("launch-mpich")

Line = list[str | Path]


@pytest.fixture(scope="module")
def mpich() -> Path:
    return tests.mpich.mpich()[0]


@pytest.fixture(scope="module")
def packages() -> dict[str, str]:
    """Variables that give the Python of that environment what ours has."""
    return tests.mpich.mpich()[1]


@pytest.mark.exhaustive
def test_training_under_mpich(tmp_path: Path, mpich: Path, packages: dict[str, str]) -> None:
    command: Line = [mpich / "mpiexec", "-n", "2", mpich / "python", "-m", "hvdtrain"]
    arguments = "--backend ddp --task digits --epochs 1 --threads 1 --run-dir".split()
    finished = run([*command, *arguments, tmp_path / "run"], env=packages)
    assert finished.code == 0, finished.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["world"]["launcher"], record["world"]["size"]) == ("mpich", 2)
    assert record["outcome"] == "finished"


@pytest.mark.exhaustive
def test_one_rank_fails_under_mpich(tmp_path: Path, mpich: Path, packages: dict[str, str]) -> None:
    failing = Path(__file__).with_name("failing.py")
    command: Line = [mpich / "mpiexec", "-n", "2", mpich / "python", failing]
    finished = run([*command, "ddp", "raise", "1", tmp_path / "mark"], env=packages)
    assert finished.code != 0
    assert finished.output.count("Traceback (most recent call last)") == 1, finished.output
    assert finished.lines("[rank 1/2] failed:")


@pytest.mark.exhaustive
def test_one_rank_never_comes_under_mpich(mpich: Path, packages: dict[str, str]) -> None:
    good: Line = [mpich / "python", "-m", "hvdtrain", "--backend", "ddp"]
    alone: Line = ["-n", "1", *good, ":", "-n", "1", *good, "--epochs", "-1"]
    finished = run([mpich / "mpiexec", *alone], env=packages)
    assert finished.code != 0
    (only,) = finished.lines("error: ")
    assert "--epochs -1" in only


@pytest.mark.exhaustive
def test_mpich_with_an_open_mpi_library(tmp_path: Path, mpich: Path) -> None:
    command: Line = [
        mpich / "mpiexec",
        "-n",
        "2",
        sys.executable,
        "-m",
        "hvdtrain",
        "--backend",
        "ddp",
    ]
    finished = run([*command, "--run-dir", tmp_path / "run"])
    assert finished.code == 2, finished.output
    (only,) = finished.lines("error: ")
    assert re.search(r"mpich started rank \d of 2", only)  # rank 0, unless it is seconds late
    assert "Open MPI" in only
    assert "Traceback" not in finished.output
    assert not (tmp_path / "run").exists()
