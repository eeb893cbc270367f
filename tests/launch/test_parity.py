"""The same task under every launcher, as its user starts it, ends with the same parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import warm
from tests.launching import run

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("launch-parity")

OPTIONS = "--seed 1 --epochs 2 --global-batch-size 64".split()

LINES = {
    "ddp, torchrun": "torchrun --nproc-per-node 2 -m hvdtrain --backend ddp",
    "ddp, torch.distributed.launch": f"{sys.executable} -W ignore -m torch.distributed.launch "
    "--nproc-per-node 2 -m hvdtrain --backend ddp",
    "ddp, mpirun": "mpirun -np 2 hvdtrain --backend ddp",
    "ddp, horovodrun": "horovodrun -np 2 --gloo hvdtrain --backend ddp",
    "horovod, horovodrun": "horovodrun -np 2 hvdtrain",
    "horovod, horovodrun --gloo": "horovodrun -np 2 --gloo hvdtrain",
    "horovod, horovodrun --mpi": "horovodrun -np 2 --mpi hvdtrain",
    "horovod, mpirun": "mpirun -np 2 hvdtrain --backend horovod",
    "compat, torchrun": "torchrun --nproc-per-node 2 -m hvdtrain --backend compat",
    "compat, mpirun": "mpirun -np 2 hvdtrain --backend compat",
    "compat, horovodrun": "horovodrun -np 2 --gloo hvdtrain --backend compat",
}

CONTROLLER = {
    "horovod, horovodrun --gloo": "gloo",
    "horovod, horovodrun --mpi": "mpi",
    "horovod, mpirun": "mpi",
}


def train(line: str, run_dir: Path, *options: str) -> dict[str, Any]:
    """Run a line with a run directory and return its run.json."""
    finished = run(warm([*line.split(), *options, "--run-dir", run_dir]), timeout=110)
    assert finished.code == 0, finished.output
    about: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return about


@pytest.fixture(scope="module")
def torchrun_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What DDP under torchrun ends with: the hash that the others must have."""
    run_dir = tmp_path_factory.mktemp("parity") / "run"
    return str(train(LINES["ddp, torchrun"], run_dir, *OPTIONS)["params_sha256"])


# Which controller or launcher module is taken makes no difference to what is computed.
ONLY_IN_ALL = (
    "ddp, torch.distributed.launch",
    "horovod, horovodrun",
    "horovod, horovodrun --mpi",
    "compat, mpirun",
    "compat, horovodrun",
)
ARMS = [
    pytest.param(arm, marks=pytest.mark.exhaustive if arm in ONLY_IN_ALL else ())
    for arm in list(LINES)[1:]
]


@pytest.mark.parametrize("arm", ARMS)
def test_two_ranks_are_bitwise_equal(arm: str, torchrun_hash: str, tmp_path: Path) -> None:
    about = train(LINES[arm], tmp_path / "run", *OPTIONS)
    assert about["backend"]["name"] == arm.partition(",")[0]
    assert about["backend"].get("controller") == CONTROLLER.get(
        arm, about["backend"].get("controller")
    )
    assert about["world"]["size"] == 2
    assert about["outcome"] == "finished"
    assert about["params_sha256"] == torchrun_hash


@pytest.mark.exhaustive
def test_one_process_learns_the_digits(tmp_path: Path) -> None:
    """The default task with its default options, on real data."""
    about = train("hvdtrain", tmp_path / "run")
    assert about["backend"]["name"] == "single"
    assert about["metrics"]["accuracy"] > 0.97


@pytest.mark.exhaustive
def test_eight_ranks(tmp_path: Path) -> None:
    about = train("horovodrun -np 8 hvdtrain", tmp_path / "run", "--max-steps", "3")
    assert about["world"]["size"] == 8
    assert about["ledger"]["global_batch"] == 8 * 32
    assert about["outcome"] == "finished"


@pytest.mark.exhaustive
def test_two_jobs_at_once(tmp_path: Path) -> None:
    """On one host, of each kind, neither takes the other's rendezvous."""
    from concurrent.futures import ThreadPoolExecutor

    lines = [LINES["ddp, mpirun"], LINES["horovod, horovodrun --gloo"]] * 2
    with ThreadPoolExecutor(len(lines)) as pool:
        jobs = [
            pool.submit(train, line, tmp_path / str(i), "--seed", str(i), "--max-steps", "20")
            for i, line in enumerate(lines)
        ]
        hashes = [job.result()["params_sha256"] for job in jobs]
    assert len(set(hashes)) == len(lines)
