"""The same task under every launcher, as its user starts it, ends with the same parameters.

A row is a command of docs/clusters.md, a script of launchers/, or the command of a manifest, in
the environment that its scheduler or operator documents, with two ranks on this host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.environments import EXHAUSTIVE, rows
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
# A command, or the number of the part of a manifest that has it; what run.json says of the run: its
# backend, launcher and, of Horovod, its controller; and the environment, in which "{folder}" has a
# host file of two slots and the `flux` above.
ROWS = f"""
mpirun            | mpirun -np 2 hvdtrain --backend compat            | compat openmpi |
horovodrun --gloo | horovodrun -np 2 --gloo hvdtrain                  | horovod horovodrun gloo |
horovodrun, ddp   | horovodrun -np 2 --gloo hvdtrain --backend ddp    | ddp horovodrun | | slow
torch.distributed.launch | {MODULE} torch.distributed.launch --nproc-per-node 2 -m hvdtrain \
                           --backend compat                           | compat torchrun | | slow
hvdrun            | {MODULE} hvdtrain launch -np 2 hvdtrain --backend ddp | ddp torchrun |
torchrun.sh       | {SCRIPTS}/torchrun.sh             | ddp torchrun        | NP=2 | rest
horovodrun.sh     | {SCRIPTS}/horovodrun.sh           | horovod openmpi mpi | NP=2 | rest
mpirun.sh         | {SCRIPTS}/mpirun.sh --backend ddp | ddp openmpi         | NP=2 | rest
pbs.sh            | {SCRIPTS}/pbs.sh                  | ddp torchrun | \
                    PBS_NODEFILE={{folder}}/hosts PBS_JOBID=7.server PBS_O_WORKDIR={ROOT} | rest
lsf.sh            | {SCRIPTS}/lsf.sh                  | ddp torchrun | \
                    LSB_DJOB_HOSTFILE={{folder}}/hosts LSB_JOBID=7 LSB_DJOB_NUMPROC=2 | slow
flux.sh           | {SCRIPTS}/flux.sh | ddp env:// | PATH={{folder}}:{BIN}:/usr/bin:/bin | rest
trainjob.yaml     | 0                 | ddp torchrun        | {KUBEFLOW}     | rest
mpijob.yaml       | 0                 | horovod openmpi mpi | {MPI_OPERATOR} | rest
mpi-runtime.yaml  | 1                 | horovod openmpi mpi | {MPI_OPERATOR} | slow
"""


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
    torchrun = "torchrun --nproc-per-node 2 -m hvdtrain --backend ddp".split()
    return str(train(torchrun, run_dir, *OPTIONS)["params_sha256"])


@pytest.mark.parametrize(("name", "command", "about", "env"), rows(ROWS))
def test_two_ranks_are_bitwise_equal(
    name: str, command: str, about: str, env: str, torchrun_hash: str, tmp_path: Path
) -> None:
    line = command.split()
    if name.endswith(".yaml"):  # with the ranks of this host instead of its own
        line = ["2" if word == "8" else word for word in command_of(name, int(command))]
    (tmp_path / "slots").write_text("localhost slots=2\n")
    (tmp_path / "hosts").write_text("localhost\nlocalhost\n")
    program(tmp_path / "flux", FLUX)
    given = variables(env.format(folder=tmp_path))
    record = train(line, tmp_path / "run", *OPTIONS, **given)
    backend, world = record["backend"], record["world"]
    found = [backend["name"], world["launcher"], backend.get("controller", "")]
    assert " ".join(found).strip() == about
    assert (world["size"], world["local_size"]) == (2, 2)
    assert record["params_sha256"] == torchrun_hash


@EXHAUSTIVE
def test_one_process_learns_the_digits(tmp_path: Path) -> None:
    """The default task with its default options, on real data."""
    about = train(["hvdtrain"], tmp_path / "run")
    assert about["backend"]["name"] == "single"
    assert about["metrics"]["accuracy"] > 0.97
