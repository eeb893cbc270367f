"""What the real launchers set, captured here and now, and a job under an MPI of another make."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tests.mpich
from hvdtrain.world import World, detect
from tests.launching import run

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("launch-world")

Line = list[str | Path]

DUMP = Path(__file__).with_name("dump_environment.py")
LAUNCHERS = {
    "torchrun": ("torchrun", "torchrun --standalone --nproc-per-node {n}"),
    "torch.distributed.launch": (
        "torchrun",
        "{python} -W ignore -m torch.distributed.launch --standalone --nproc-per-node {n}",
    ),
    "horovodrun --gloo": ("horovodrun", "horovodrun --gloo -np {n} {python}"),
    "horovodrun --mpi": ("openmpi", "horovodrun --mpi -np {n} {python}"),
    "mpirun": ("openmpi", "mpirun -np {n} {python}"),
}


def worlds(command: str, n: int, folder: Path) -> list[World]:
    """The worlds that the ranks of a launcher find, in rank order."""
    line: Line = [*command.format(n=n, python=sys.executable).split(), DUMP, folder]
    finished = run(line)
    assert finished.code == 0, finished.output
    found = [detect(json.loads(file.read_text())) for file in folder.glob("*.json")]
    return sorted(found, key=lambda world: world.rank)


def check(found: list[World], n: int, launcher: str) -> None:
    facts = [
        (w.rank, w.size, w.local_rank, w.local_size, w.cross_rank, w.cross_size) for w in found
    ]
    assert facts == [(rank, n, rank, n, 0, 1) for rank in range(n)]
    assert {world.launcher for world in found} == {launcher}
    assert all(world.one_host for world in found)


# Those that set what another one sets run in `make test-rest`.
LATER = ("torch.distributed.launch", "horovodrun --mpi")


@pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param(name, 3, marks=pytest.mark.exhaustive if name in LATER else ())
        for name in LAUNCHERS
    ]
    + [pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in LAUNCHERS],
)
def test_a_real_launcher(tmp_path: Path, name: str, n: int) -> None:
    launcher, command = LAUNCHERS[name]
    check(worlds(command, n, tmp_path), n, launcher)


@pytest.mark.exhaustive
def test_horovodrun_as_it_comes(tmp_path: Path) -> None:
    found = worlds("horovodrun -np 2 {python}", 2, tmp_path)
    assert found[0].launcher in ("horovodrun", "openmpi")  # by how Horovod was built
    check(found, 2, found[0].launcher)


def test_torchrun_by_mpirun(tmp_path: Path) -> None:
    command = "mpirun -np 1 torchrun --standalone --nproc-per-node 2"
    check(worlds(command, 2, tmp_path), 2, "torchrun")


def test_a_variable_left_over_from_another_job(tmp_path: Path) -> None:
    arguments: Line = ["-np", "2", sys.executable, DUMP, tmp_path]
    left = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert run(["mpirun", *arguments], env={**left, **address}).code == 0
    for file in tmp_path.glob("*.json"):
        with pytest.raises(Exception, match="WORLD_SIZE=1.*OMPI_COMM_WORLD_SIZE=2"):
            detect(json.loads(file.read_text()))


# MPICH


@pytest.fixture(scope="module")
def mpich() -> Path:
    return tests.mpich.mpich()[0]


@pytest.fixture(scope="module")
def packages() -> dict[str, str]:
    """Variables that give the Python of that environment what ours has."""
    return tests.mpich.mpich()[1]


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_mpich(tmp_path: Path, mpich: Path, n: int) -> None:
    check(worlds(f"{mpich}/mpiexec -n {{n}} {{python}}", n, tmp_path), n, "mpich")


def test_training_under_mpich(tmp_path: Path, mpich: Path, packages: dict[str, str]) -> None:
    command: Line = [mpich / "mpiexec", "-n", "2", mpich / "python", "-m", "hvdtrain"]
    arguments = "--backend ddp --task digits --epochs 1 --threads 1 --run-dir".split()
    finished = run([*command, *arguments, tmp_path / "run"], env=packages)
    assert finished.code == 0, finished.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["world"]["launcher"], record["world"]["size"]) == ("mpich", 2)
    assert record["outcome"] == "finished"


def test_one_rank_fails_under_mpich(tmp_path: Path, mpich: Path, packages: dict[str, str]) -> None:
    failing = Path(__file__).with_name("failing.py")
    command: Line = [mpich / "mpiexec", "-n", "2", mpich / "python", failing]
    finished = run([*command, "ddp", "raise", "1", tmp_path / "mark"], env=packages)
    assert finished.code != 0
    assert finished.output.count("Traceback (most recent call last)") == 1, finished.output
    assert finished.lines("[rank 1/2] failed:")


def test_one_rank_never_comes_under_mpich(mpich: Path, packages: dict[str, str]) -> None:
    good: Line = [mpich / "python", "-m", "hvdtrain", "--backend", "ddp"]
    alone: Line = ["-n", "1", *good, ":", "-n", "1", *good, "--epochs", "-1"]
    finished = run([mpich / "mpiexec", *alone], env=packages)
    assert finished.code != 0
    (only,) = finished.lines("error: ")
    assert "--epochs -1" in only


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
    assert "mpich started rank 0 of 2" in only
    assert "Open MPI" in only
    assert "Traceback" not in finished.output
    assert not (tmp_path / "run").exists()
