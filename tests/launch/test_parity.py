"""The same task under every launcher, as its user starts it, ends with the same parameters.

A row is a command of docs/clusters.md, a script of launchers/, or the command of a manifest, in
the environment that its scheduler or operator documents, with two ranks on this host.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.environments import EXHAUSTIVE
from tests.forkserver import warm
from tests.launch.test_manifests import command_of
from tests.launching import BIN, ROOT, program, run, succeed, variables
from tests.runs import run_json

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("launch-parity")

OPTIONS = "--seed 1 --epochs 1 --global-batch-size 64 --threads 1".split()
SCRIPTS = ROOT / "launchers"
# Flux, as far as launchers/flux.sh calls it: starts two ranks on this host.
FLUX = """
[ "$1" = resource ] && echo 1 && exit
while [ "$1" != bash ]; do shift; done
export FLUX_JOB_ID=f7 FLUX_JOB_SIZE=2 FLUX_JOB_NNODES=1
FLUX_TASK_RANK=1 FLUX_TASK_LOCAL_ID=1 "$@" &
FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0 "$@" && wait $!
"""


@dataclass(frozen=True)
class Row:
    """A command, and what run.json says of the run: its backend, launcher and, of Horovod, its
    controller.

    "{folder}" in the environment is a folder with a host file of two slots and the `flux` above.
    """

    command: str
    about: str
    env: str = ""


MODULE = f"{sys.executable} -W ignore -m"
ON_PATH = f"PATH={BIN}:/usr/bin:/bin"
KUBEFLOW = (
    "PET_NNODES=1 PET_NPROC_PER_NODE=2 PET_NODE_RANK=0 PET_MASTER_ADDR=localhost "
    f"PET_MASTER_PORT=29533 {ON_PATH}"
)
MPI_OPERATOR = (
    "OMPI_MCA_orte_default_hostfile={folder}/slots K_MPI_JOB_ROLE=launcher "
    f"OMPI_MCA_orte_keep_fqdn_hostnames=true {ON_PATH}"
)
PBS = f"PBS_NODEFILE={{folder}}/hosts PBS_JOBID=7.server PBS_O_WORKDIR={ROOT}"
LSF = "LSB_DJOB_HOSTFILE={folder}/hosts LSB_JOBID=7 LSB_DJOB_NUMPROC=2"
ON_FLUX = f"PATH={{folder}}:{BIN}:/usr/bin:/bin"

TORCHRUN = "torchrun --nproc-per-node 2 -m hvdtrain --backend ddp"
LAUNCH = f"{MODULE} torch.distributed.launch --nproc-per-node 2 -m hvdtrain --backend compat"
ROWS = {
    "mpirun": Row("mpirun -np 2 hvdtrain --backend compat", "compat openmpi"),
    "horovodrun --gloo": Row("horovodrun -np 2 --gloo hvdtrain", "horovod horovodrun gloo"),
    "horovodrun, ddp": Row("horovodrun -np 2 --gloo hvdtrain --backend ddp", "ddp horovodrun"),
    "torch.distributed.launch": Row(LAUNCH, "compat torchrun"),
    "hvdrun": Row(f"{MODULE} hvdtrain launch -np 2 hvdtrain --backend ddp", "ddp torchrun"),
    "torchrun.sh": Row(f"{SCRIPTS}/torchrun.sh", "ddp torchrun", "NP=2"),
    "horovodrun.sh": Row(f"{SCRIPTS}/horovodrun.sh", "horovod openmpi mpi", "NP=2"),
    "mpirun.sh": Row(f"{SCRIPTS}/mpirun.sh --backend ddp", "ddp openmpi", "NP=2"),
    "pbs.sh": Row(f"{SCRIPTS}/pbs.sh", "ddp torchrun", PBS),
    "lsf.sh": Row(f"{SCRIPTS}/lsf.sh", "ddp torchrun", LSF),
    "flux.sh": Row(f"{SCRIPTS}/flux.sh", "ddp env://", ON_FLUX),
    "trainjob.yaml": Row("0", "ddp torchrun", KUBEFLOW),
    "mpijob.yaml": Row("0", "horovod openmpi mpi", MPI_OPERATOR),
    "mpi-runtime.yaml": Row("1", "horovod openmpi mpi", MPI_OPERATOR),
}
IN_MAKE_TEST = {"mpirun", "horovodrun --gloo", "hvdrun"}
LIKE_OTHERS = {"horovodrun, ddp", "torch.distributed.launch", "lsf.sh", "mpi-runtime.yaml"}


def line_of(name: str, row: Row) -> list[str]:
    """Return the command of a row; of a manifest, with the ranks of this host instead of its."""
    if not name.endswith(".yaml"):
        return row.command.split()
    return ["2" if word == "8" else word for word in command_of(name, int(row.command))]


def train(line: list[str], run_dir: Path, *options: str, **env: str) -> dict[str, Any]:
    """Run a command line with a run directory and return its run.json."""
    succeed(run(warm([*line, *options, "--run-dir", run_dir]), timeout=250, env=env))
    about = run_json(run_dir)
    assert about["outcome"] == "finished"
    return about


@pytest.fixture(scope="module")
def torchrun_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What DDP under torchrun ends with: the hash that the others must have."""
    run_dir = tmp_path_factory.mktemp("parity") / "run"
    return str(train(TORCHRUN.split(), run_dir, *OPTIONS)["params_sha256"])


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    marks = [] if name in IN_MAKE_TEST else [EXHAUSTIVE]
    return [*marks, pytest.mark.slow] if name in LIKE_OTHERS else marks


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in ROWS])
def test_two_ranks_are_bitwise_equal(name: str, torchrun_hash: str, tmp_path: Path) -> None:
    row = ROWS[name]
    (tmp_path / "slots").write_text("localhost slots=2\n")
    (tmp_path / "hosts").write_text("localhost\nlocalhost\n")
    program(tmp_path / "flux", FLUX)
    env = variables(row.env.format(folder=tmp_path))
    about = train(line_of(name, row), tmp_path / "run", *OPTIONS, **env)
    backend, world = about["backend"], about["world"]
    found = [backend["name"], world["launcher"], backend.get("controller", "")]
    assert " ".join(found).strip() == row.about
    assert (world["size"], world["local_size"]) == (2, 2)
    assert about["params_sha256"] == torchrun_hash


@EXHAUSTIVE
def test_one_process_learns_the_digits(tmp_path: Path) -> None:
    """The default task with its default options, on real data."""
    about = train(["hvdtrain"], tmp_path / "run")
    assert about["backend"]["name"] == "single"
    assert about["metrics"]["accuracy"] > 0.97


@EXHAUSTIVE
@pytest.mark.slow
def test_eight_ranks(tmp_path: Path) -> None:
    about = train("horovodrun -np 8 hvdtrain".split(), tmp_path / "run", "--max-steps", "3")
    assert about["world"]["size"] == 8
    assert about["ledger"]["global_batch"] == 8 * 32


@EXHAUSTIVE
def test_two_jobs_at_once(tmp_path: Path) -> None:
    """On one host, of each kind, neither takes the other's rendezvous."""
    names = ["mpirun", "horovodrun --gloo"] * 2
    with ThreadPoolExecutor(len(names)) as pool:
        jobs = [
            pool.submit(
                train, line_of(n, ROWS[n]), tmp_path / str(i), "--seed", str(i), "--max-steps", "20"
            )
            for i, n in enumerate(names)
        ]
        hashes = [job.result()["params_sha256"] for job in jobs]
    assert len(set(hashes)) == len(names)
