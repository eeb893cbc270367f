"""The launcher table, with hand-written environments and with those of real launchers."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import LaunchError
from hvdtrain.job import world as world_module
from hvdtrain.job.world import (
    World,
    detect,
    guess_world,
    is_mpi,
    rank_variable,
    unused_allocation,
)
from tests.environments import rows
from tests.forkserver import warm
from tests.launching import run, succeed, variables

Env = dict[str, str]

# What each launcher sets for rank 3 of four ranks on two hosts, and sets of variables beside it
TABLE = """
ranks      | RANK=3 WORLD_SIZE=4 LOCAL_RANK=1
by-hand    | MASTER_ADDR=a MASTER_PORT=29500  # RANK and WORLD_SIZE follow
torchrun   | ranks LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 by-hand
horovodrun | HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 \
             HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2
openmpi    | OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
             OMPI_COMM_WORLD_LOCAL_SIZE=2
mvapich    | MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 \
             MV2_COMM_WORLD_LOCAL_SIZE=2
mpich      | PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2
pals       | PALS_RANKID=3 PMI_SIZE=4 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2
srun       | SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_TASKS_PER_NODE=2(x2) \
             SLURM_NODEID=1 SLURM_NNODES=2 SLURM_STEP_ID=0
env://     | ranks by-hand
jsrun      | JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1
flux       | FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 PMI_RANK=3 PMI_SIZE=4
MPIJob     | K_MPI_JOB_ROLE=launcher OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile \
             OMPI_MCA_orte_keep_fqdn_hostnames=true OMPI_MCA_orte_set_default_slots=4
PET        | PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1 PET_MASTER_PORT=29500 \
             PET_MASTER_ADDR=job-node-0-0.job
PyTorchJob | RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456
uneven     | srun SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_STEP_NUM_NODES=3
mpi-agent  | OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
daemon     | SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_TASKS_PER_NODE=1(x1) \
             SLURM_NODEID=0 SLURM_NNODES=1 SLURM_STEP_ID=0
srun-agent | SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_TASKS_PER_NODE=1(x2) SLURM_NNODES=2 \
             SLURM_STEP_ID=0
other-job  | torchrun WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 GROUP_WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 \
             GROUP_RANK=0
"""
SETS = {str(row.values[0]): str(row.values[1]) for row in rows(TABLE)}
ROWS = "torchrun horovodrun openmpi mvapich mpich pals srun".split()
INCOMPLETE = "env:// jsrun".split()  # they do not say which ranks share a host
MPI = "openmpi", "mvapich", "mpich", "pals"
# Without these variables the launcher's row does not apply at all, rather than being partial.
EVIDENCE = {"srun": "SLURM_STEP_ID", "torchrun": "LOCAL_WORLD_SIZE"}
# These can be computed from the rest.
COMPUTED = {
    "torchrun": "GROUP_RANK GROUP_WORLD_SIZE",
    "srun": "SLURM_NNODES",
    "env://": "LOCAL_RANK",
}
# Alone, these are no evidence of a launcher: users set MASTER_* by hand, too.
NO_EVIDENCE = (
    "GROUP_RANK GROUP_WORLD_SIZE HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE MASTER_ADDR MASTER_PORT"
)


def launched_with(env: Env) -> AbstractContextManager[object]:
    """Let this process have the environment of a launcher."""
    return patch.object(world_module, "launch_env", lambda: env)


def env_of(words: str) -> Env:
    """Return the variables of a text: each word is a NAME=VALUE, or names a set of them in TABLE; a
    later one counts.
    """
    env: Env = {}
    for word in words.split():
        env |= variables(word) if "=" in word else env_of(SETS[word])
    return env


def said_of(env: Env) -> str:
    """Return the launcher and the numbers that `detect` makes of an environment, or its error."""
    try:
        w = detect(env)
    except LaunchError as error:
        return str(error)
    place = f"local {w.local_rank}/{w.local_size}, host {w.cross_rank}/{w.cross_size}"
    return f"{w.launcher} {w.rank}/{w.size}, {place}"


@pytest.mark.parametrize("name", [*ROWS, *INCOMPLETE])
def test_a_missing_variable_is_named(name: str) -> None:
    row = env_of(name)
    for missing in row.keys() - EVIDENCE.get(name, "").split():
        said = said_of({key: value for key, value in row.items() if key != missing})
        if missing in COMPUTED.get(name, "").split():
            assert " 3/4, " in said, missing
        else:
            assert re.search(f"incomplete {name}.*{missing} missing", said), missing


@pytest.mark.parametrize("name", sorted({*ROWS, *INCOMPLETE} - {"srun"}))
def test_a_variable_alone_is_never_a_world_of_one(name: str) -> None:
    for alone in env_of(name).keys() - NO_EVIDENCE.split():
        assert re.search(f"incomplete .*{alone}=", said_of({alone: "0"})), alone


# Clusters: what each sets for a rank, by its documentation, and what `detect` makes of it. The
# table of docs/clusters.md has the same rows.

CLUSTERS = """
MPIJob openmpi | openmpi 3/4, local 1/2, host 1/2  # and the ranks of a TrainJob of MPI
I_MPI_HYDRA_HOST_FILE=/etc/mpi/hostfile I_MPI_PERHOST=2 mpich | mpich 3/4, local 1/2, host 1/2
# TrainJob, torch: by torchrun, by python, as one process, as any number
PET torchrun | torchrun 3/4, local 1/2, host 1/2
PET | Kubeflow started this pod for torchrun .*torchrun -m hv
PET PET_NNODES=1 PET_NPROC_PER_NODE=1 | none 0/1, local 0/1, host 0/1
PET PET_NNODES=1 PET_NPROC_PER_NODE=auto | torchrun .PET_NNODES=1, PET_NPROC_PER_NODE=auto
# PyTorchJob: by python, one process a pod, several a pod
PyTorchJob | env:// 1/2, local 0/0, host 0/0
PyTorchJob PET_NNODES=2 PET_NPROC_PER_NODE=auto PET_NODE_RANK=1 | env:// 1/2, local 0/0
PyTorchJob WORLD_SIZE=8 PET_NNODES=2 PET_NPROC_PER_NODE=4 | PER_NODE=4.*: use torchrun
srun | srun 3/4, local 1/2, host 1/2
srun by-hand RANK=3 WORLD_SIZE=4 | srun 3/4, local 1/2, host 1/2
pals PMI_RANK=3 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PALS_NODEID=1 | pals 3/4, local 1/2, host 1/2
PALS_RANKID=3 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 | \
    incomplete pals.*PALS_RANKID=3.*PMI_SIZE missing; .*mpiexec -n 8 env PMI_SIZE=8 hvdtrain
jsrun | jsrun 3/4, local 1/0, host 0/0
jsrun openmpi | openmpi 3/4, local 1/2, host 1/2  # Spectrum MPI
JSM_NAMESPACE_LOCAL_RANK=1 | start the job with jsrun
# Flux: by launchers/flux.sh, without it, as one task, beside variables that are left over
flux env:// | env:// 3/4, local 1/0, host 0/0
flux | Flux started this process as one of several tasks .FLUX_TASK_RANK=3.*: flux run bash launch
flux FLUX_JOB_SIZE=1 FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0 | none 0/1, local 0/1, host 0/1
flux env:// RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 | two launchers disagree
flux env:// RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 | two launchers disagree
flux torchrun WORLD_SIZE=2 RANK=1 GROUP_WORLD_SIZE=1 GROUP_RANK=0 | two launchers disagree
SM_HOSTS=["a"] torchrun | torchrun 3/4, local 1/2, host 1/2  # SageMaker
SM_HOSTS=["a"] openmpi | openmpi 3/4, local 1/2, host 1/2
env:// NODE_RANK=1 | env:// 3/4, local 1/0, host 0/0  # AzureML
# PBS, LSF, Grid Engine and none, without a launcher
PBS_NODEFILE=/x PBS_JOBID=1 | none 0/1, local 0/1, host 0/1
LSB_DJOB_HOSTFILE=/x | none 0/1, local 0/1, host 0/1
PE_HOSTFILE=/x NSLOTS=8 | none 0/1, local 0/1, host 0/1
MASTER_ADDR=left MASTER_PORT=1 SLURM_CONF=x | none 0/1, local 0/1, host 0/1
# One rank is on one host.
env:// RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 | env:// 0/1, local 0/1, host 0/1
JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=1 JSM_NAMESPACE_LOCAL_RANK=0 | jsrun 0/1, local 0/1
"""
SLURM = """
# A step of five tasks on three nodes: its numbers count, not those of the allocation.
uneven SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 | srun 1/5, local 1/2, host 0/3
uneven SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 | srun 3/5, local 1/2, host 1/3
uneven SLURM_PROCID=4 SLURM_LOCALID=0 SLURM_NODEID=2 | srun 4/5, local 0/1, host 2/3
SLURM_STEP_ID=0 | SLURM_PROCID
# The shell of salloc or sbatch is no task.
srun SLURM_STEP_ID= | none 0/1, local 0/1, host 0/1
srun SLURM_STEP_ID=4294967290 | none 0/1, local 0/1, host 0/1
srun SLURM_STEP_ID=4294967291 | none 0/1, local 0/1, host 0/1
srun SLURM_STEP_ID=4294967292 | none 0/1, local 0/1, host 0/1
srun SLURM_STEP_ID=4294967293 | none 0/1, local 0/1, host 0/1
srun SLURM_TASKS_PER_NODE=2(x1) | SLURM_TASKS_PER_NODE=
srun SLURM_TASKS_PER_NODE=2(x | SLURM_TASKS_PER_NODE=
srun SLURM_TASKS_PER_NODE=x | SLURM_TASKS_PER_NODE=
srun SLURM_TASKS_PER_NODE= | SLURM_TASKS_PER_NODE=
"""
IMPOSSIBLE = """
torchrun RANK=4 | impossible torchrun.*RANK=4
torchrun RANK=-1 | impossible torchrun.*RANK=-1
torchrun RANK=0 | impossible torchrun.*RANK=0  # the local rank, 1, is above it
torchrun WORLD_SIZE=0 | impossible torchrun.*WORLD_SIZE=0
torchrun LOCAL_RANK=2 | impossible torchrun.*LOCAL_RANK=2
torchrun LOCAL_RANK=-1 | impossible torchrun.*LOCAL_RANK=-1
torchrun LOCAL_WORLD_SIZE=0 | impossible torchrun.*LOCAL_WORLD_SIZE=0
torchrun LOCAL_WORLD_SIZE=5 | impossible torchrun.*LOCAL_WORLD_SIZE=5
torchrun GROUP_RANK=2 | impossible torchrun.*GROUP_RANK=2
torchrun GROUP_RANK=-1 | impossible torchrun.*GROUP_RANK=-1
torchrun GROUP_WORLD_SIZE=9 | impossible torchrun.*GROUP_WORLD_SIZE=9
torchrun WORLD_SIZE= | WORLD_SIZE='' is not a whole
torchrun WORLD_SIZE=x | WORLD_SIZE='x' is not a whole
torchrun WORLD_SIZE=1.5 | WORLD_SIZE='1.5' is not a whole
torchrun WORLD_SIZE=0x1 | WORLD_SIZE='0x1' is not a whole
torchrun WORLD_SIZE=nan | WORLD_SIZE='nan' is not a whole
"""
# One launcher inside another. torchrun numbers its agents in the order of their arrival, so any
# agent may be group 1; after the loss of a host (--nnodes 1:3) there are fewer than tasks of srun.
NESTED = """
torchrun mpi-agent OMPI_COMM_WORLD_RANK=0 | torchrun 3/4
torchrun mpi-agent OMPI_COMM_WORLD_RANK=1 | torchrun 3/4
torchrun srun-agent SLURM_PROCID=0 SLURM_NODEID=0 | torchrun 3/4
torchrun srun-agent SLURM_PROCID=1 SLURM_NODEID=1 | torchrun 3/4
torchrun srun-agent SLURM_PROCID=2 SLURM_NODEID=2 SLURM_NTASKS=3 SLURM_NNODES=3 \
    SLURM_TASKS_PER_NODE=1(x3) | torchrun 3/4
# torchrun's own environment beside a stray one
torchrun TORCHELASTIC_RUN_ID=none PMI_RANK=0 | torchrun 3/4
torchrun TORCHELASTIC_RUN_ID=none PMI_RANK=0 PMI_SIZE=1 | torchrun 3/4  # of srun --mpi=pmi2
torchrun TORCHELASTIC_RUN_ID=none OMPI_COMM_WORLD_SIZE=8 | torchrun 3/4
torchrun TORCHELASTIC_RUN_ID=none HOROVOD_RANK= HOROVOD_SIZE=x | torchrun 3/4
torchrun PMI_RANK=0 | incomplete mpich  # by hand
torchrun openmpi | torchrun 3/4
mvapich mpich | mvapich 3/4  # by Hydra
srun PMI_RANK=3 PMI_SIZE=4 | srun 3/4
# mpirun starts a daemon on each other host by srun: here one, as there are two hosts.
openmpi srun-agent SLURM_PROCID=1 SLURM_NODEID=1 | openmpi 3/4
mpich srun-agent SLURM_PROCID=1 SLURM_NODEID=1 | mpich 3/4
horovodrun srun-agent SLURM_PROCID=1 SLURM_NODEID=1 | horovodrun 3/4
openmpi daemon | openmpi 3/4
mpich daemon | mpich 3/4
horovodrun daemon | horovodrun 3/4
# A task spawns ranks.
mpi-agent OMPI_COMM_WORLD_RANK=1 by-hand RANK=5 WORLD_SIZE=8 | env:// 5/8
srun-agent SLURM_PROCID=1 SLURM_NODEID=1 by-hand RANK=5 WORLD_SIZE=8 | env:// 5/8
# srun -m cyclic: tasks 0 and 2 are on host 0, 1 and 3 on host 1; the script numbers by host.
srun SLURM_PROCID=1 SLURM_LOCALID=0 by-hand RANK=2 WORLD_SIZE=4 | env:// 2/4
# Leftovers
srun by-hand RANK=0 WORLD_SIZE=1 | RANK=0, WORLD_SIZE=.*SLURM_PROCID=3
srun by-hand RANK=0 WORLD_SIZE=4 | RANK=0, WORLD_SIZE=.*SLURM_PROCID=3
openmpi by-hand RANK=0 WORLD_SIZE=8 | RANK=0, WORLD_SIZE=8.*OMPI_COMM_WORLD_RANK=3
openmpi RANK=0 | incomplete env://.*RANK=0 set.*WORLD_SIZE
# srun -N 2 --ntasks-per-node 2 torchrun --nnodes 2 --nproc-per-node 4: four agents, of which
# two form a world.
torchrun srun RANK=5 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 | two launchers disagree
openmpi other-job | RANK=0, WORLD_SIZE=8.*OMPI_COMM_WORLD_RANK=3.*unset
mpich other-job | RANK=0, WORLD_SIZE=8.*PMI_RANK=3.*unset
mvapich other-job | RANK=0, WORLD_SIZE=8.*MV2_COMM_WORLD_RANK=3.*unset
srun other-job | RANK=0, WORLD_SIZE=8.*SLURM_PROCID=3.*unset
horovodrun other-job | RANK=0, WORLD_SIZE=8.*HOROVOD_RANK=3.*unset
"""


@pytest.mark.parametrize(("words", "expected"), rows(CLUSTERS + SLURM + IMPOSSIBLE + NESTED))
def test_what_is_made_of_an_environment(words: str, expected: str) -> None:
    found = said_of(env_of(words))
    assert re.search(expected, found), found


def test_variables_set_by_hand_name_no_process_to_watch() -> None:
    """The shell that set them may end first. Other launchers' processes are watched."""
    for name, variable in (("env://", None), ("jsrun", "JSM_NAMESPACE_RANK=3")):
        with launched_with(env_of(name)):
            assert rank_variable(detect()) == variable


# Resource managers that only allocate


ALLOCATED = """
| ^$
SLURM_TASKS_PER_NODE=1 | ^$
PBS_NODEFILE=/no/such/file | ^$
NSLOTS=1 | ^$
srun SLURM_STEP_ID= | Slurm has allocated 4 slots .SLURM_TASKS_PER_NODE=2.x2.., .*run: srun hvdtrain
PBS_NODEFILE={folder}/hosts | PBS has allocated 3 slots .PBS_NODEFILE={folder}/hosts.*hvdrun
LSB_DJOB_HOSTFILE={folder}/hosts LSB_DJOB_NUMPROC=8 | LSF has allocated 8 slots
PE_HOSTFILE={folder}/hosts NSLOTS=8 | Grid Engine has allocated 8 slots
OMPI_MCA_orte_default_hostfile={folder}/pods | MPIJob has allocated 9.*run: mpirun hvdtrain
"""


@pytest.mark.parametrize(("words", "said"), rows(ALLOCATED))
def test_an_allocation_of_several_slots_without_a_launcher_is_said(
    words: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("a\na\nb\n\n")
    (tmp_path / "pods").write_text("worker-0.svc slots=8\nworker-1.svc\n")
    with launched_with(env_of(words.format(folder=tmp_path))):
        assert detect() == World()
        assert re.search(said.format(folder=tmp_path), unused_allocation())


# The launch environment: what scripts write into os.environ later


LATER = """
import os
import hvdtrain.hvd as hvd
from hvdtrain.job.world import detect
hvd.init()
before = detect()
os.environ |= {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "OMPI_COMM_WORLD_RANK": "1"}
os.environ |= {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
hvd.shutdown()
hvd.init()
assert detect() == before, detect()
print("same", hvd.rank(), hvd.size(), before.launcher)
os.environ["HOROVOD_LOCAL_SIZE"] = os.environ["HOROVOD_SIZE"] = "2"
print("elastic", detect().size)
"""


def test_variables_that_a_script_writes_after_init_change_nothing() -> None:
    """But for those by which elastic Horovod gives it a new rank."""
    env = {name: "1" if name.endswith("SIZE") else "0" for name in env_of("horovodrun")}
    output = succeed(run(warm([sys.executable, "-c", LATER]), env=env))
    assert "same 0 1 horovodrun\nelastic 2\n" in output


# Properties


@st.composite
def worlds(draw: st.DrawFn) -> tuple[str, World, Env]:
    """Draw a launcher, one of its ranks on equally filled hosts, and that rank's environment."""
    name = draw(st.sampled_from(sorted(ROWS)))
    local_size, hosts = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    rank = draw(st.integers(0, local_size * hosts - 1))
    local, cross = rank % local_size, rank // local_size
    values = (rank, local_size * hosts, local, local_size, cross, hosts)
    env = env_of(name)
    env |= zip(env, map(str, values), strict=False)
    if name == "srun":
        texts = f"{local_size}(x{hosts})", ",".join([str(local_size)] * hosts)
        env["SLURM_TASKS_PER_NODE"] = draw(st.sampled_from(texts))
    return name, World(*values, name), env


@settings(deadline=None)
@given(worlds())
def test_a_consistent_environment_round_trips(case: tuple[str, World, Env]) -> None:
    name, expected, env = case
    world = detect(env)
    assert replace(world, source=expected.source) == expected
    assert f"={world.rank}, " in world.source
    assert is_mpi(world) == (name in MPI)
    assert world.one_host == (world.cross_size == 1)
    with launched_with(env):
        guess = guess_world()
        assert (guess.rank, guess.local_rank) == (world.rank, world.local_rank)


# Who reports a LaunchError: see hvdtrain.liveness.failure


@pytest.mark.parametrize("local", [0, 1])
def test_guess_world_tells_the_ranks_of_a_host_apart(local: int) -> None:
    for left in ("RANK=0", "RANK=x", "LOCAL_RANK=-3", "LOCAL_RANK=0"):
        with launched_with(env_of(f"openmpi OMPI_COMM_WORLD_LOCAL_RANK={local} {left}")):
            assert guess_world().local_rank == local
    with launched_with(variables(f"FLUX_TASK_LOCAL_ID={local}")):
        assert guess_world().local_rank == local
