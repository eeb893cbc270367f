"""The launcher table, with hand-written environments and with those of real launchers."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import LaunchError
from hvdtrain.job import world as world_module
from hvdtrain.job.slurm import first_host
from hvdtrain.job.world import (
    World,
    detect,
    guess_world,
    is_mpi,
    rank_variable,
    unused_allocation,
)
from tests.environments import other_mpi
from tests.forkserver import warm
from tests.launching import run

Env = dict[str, str]

ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    **ADDRESS,
}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPENMPI.items()}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
}
# The same four ranks on two hosts, by launchers that do not say which ranks share a host
ENV = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **ADDRESS}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
}
PALS = {
    "PALS_RANKID": "3",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
}
INCOMPLETE: dict[str, Env] = {"env://": ENV, "jsrun": JSRUN, "flux": FLUX}
ROWS: dict[str, Env] = {
    "torchrun": TORCHRUN,
    "horovodrun": HOROVODRUN,
    "openmpi": OPENMPI,
    "mvapich": MVAPICH,
    "mpich": MPICH,
    "pals": PALS,
    "srun": SRUN,
}
# Without these variables the launcher's row does not apply at all, rather than being partial.
EVIDENCE = {"srun": {"SLURM_STEP_ID"}, "torchrun": {"LOCAL_WORLD_SIZE"}}
# These can be computed from the rest.
COMPUTED = {
    "torchrun": {"GROUP_RANK", "GROUP_WORLD_SIZE"},
    "srun": {"SLURM_NNODES"},
    "env://": {"LOCAL_RANK"},
    "flux": {"FLUX_JOB_NNODES"},
}
# Alone, these are no evidence of the launcher: users set MASTER_* by hand, too.
NO_EVIDENCE = {
    "torchrun": {"GROUP_RANK", "GROUP_WORLD_SIZE"},
    "horovodrun": {"HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"},
}


def launched_with(env: Env) -> AbstractContextManager[object]:
    """Let this process have the environment of a launcher."""
    return patch.object(world_module, "launch_env", lambda: env)


def numbers(world: World) -> tuple[int, ...]:
    return (world.rank, world.size, world.local_rank, world.local_size)


@pytest.mark.parametrize("name", ROWS)
def test_every_launcher_is_read(name: str) -> None:
    world = detect(ROWS[name])
    assert numbers(world) == (3, 4, 1, 2)
    assert (world.cross_rank, world.cross_size, world.launcher) == (1, 2, name)
    assert not world.one_host
    assert is_mpi(world) == (name in ("openmpi", "mvapich", "mpich", "pals"))
    assert "=3" in world.source


@pytest.mark.parametrize("name", INCOMPLETE)
def test_launchers_that_do_not_name_the_hosts(name: str) -> None:
    world = detect(INCOMPLETE[name])
    assert (world.rank, world.size, world.local_rank, world.launcher) == (3, 4, 1, name)
    assert not world.is_complete
    assert not world.one_host
    one = {k: {"3": "0", "4": "1", "1": "0"}.get(v, v) for k, v in INCOMPLETE[name].items()}
    assert numbers(detect(one)) == (0, 1, 0, 1)  # one rank is on one host


@pytest.mark.parametrize("name", [*ROWS, *INCOMPLETE])
def test_a_missing_variable_is_named(name: str) -> None:
    row = {**ROWS, **INCOMPLETE}[name]
    for missing in sorted(row.keys() - EVIDENCE.get(name, set())):
        env = {key: value for key, value in row.items() if key != missing}
        if missing in COMPUTED.get(name, set()):
            assert numbers(detect(env))[:2] == (3, 4), missing
        else:
            with pytest.raises(LaunchError, match=f"incomplete {name}.*{missing} missing"):
                detect(env)


@pytest.mark.parametrize("name", [name for name in (*ROWS, *INCOMPLETE) if name != "srun"])
def test_a_variable_alone_is_never_a_world_of_one(name: str) -> None:
    names = {**ROWS, **INCOMPLETE}[name].keys() - NO_EVIDENCE.get(name, set())
    for alone in sorted(names - {"MASTER_ADDR", "MASTER_PORT", "FLUX_JOB_NNODES"}):
        with pytest.raises(LaunchError, match=f"incomplete .*{alone}="):
            detect({alone: "0"})


@pytest.mark.parametrize(
    "change",
    [
        "RANK=4",
        "RANK=-1",
        "WORLD_SIZE=0",
        "LOCAL_RANK=2",
        "LOCAL_RANK=-1",
        "LOCAL_WORLD_SIZE=0",
        "LOCAL_WORLD_SIZE=5",
        "RANK=0",  # with local rank 1, which cannot be above the rank
        "GROUP_RANK=2",
        "GROUP_RANK=-1",
        "GROUP_WORLD_SIZE=9",
        "WORLD_SIZE=",
        "WORLD_SIZE=x",
        "WORLD_SIZE=1.5",
        "WORLD_SIZE=0x1",
        "WORLD_SIZE=nan",
    ],
)
def test_impossible_numbers_are_refused(change: str) -> None:
    name, _, value = change.partition("=")
    is_number = value.lstrip("-").isdigit()
    said = f"impossible torchrun.*{change}" if is_number else f"{name}={value!r} is not a whole"
    with pytest.raises(LaunchError, match=said):
        detect({**TORCHRUN, name: value})


# Slurm


@pytest.mark.parametrize(
    ("rank", "node", "local", "local_size"),
    [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 2), (3, 1, 1, 2), (4, 2, 0, 1)],
)
def test_nodes_with_unequal_tasks(rank: int, node: int, local: int, local_size: int) -> None:
    """The numbers of the step count, not those of the allocation."""
    env = {
        **SRUN,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_STEP_NUM_NODES": "3",
    }
    world = detect(env)
    assert numbers(world) == (rank, 5, local, local_size)
    assert (world.cross_rank, world.cross_size) == (node, 3)


@pytest.mark.parametrize("step", [None, "", "4294967290", "4294967291", "4294967292", "4294967293"])
def test_a_shell_of_salloc_or_sbatch_is_no_launcher(step: str | None) -> None:
    env = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"}
    if step is not None:
        env["SLURM_STEP_ID"] = step
    assert detect(env) == World()


@pytest.mark.parametrize("text", ["2(x1)", "2(x", "x", ""])
def test_tasks_per_node_that_do_not_reach_this_node(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE="):
        detect({**SRUN, "SLURM_TASKS_PER_NODE": text})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[7,9]", "gpu7"),
        ("a,b[1-2]", "a"),
        ("gpu[01-02]-ib", "gpu01-ib"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes, "SLURM_STEP_NODELIST") == first


@pytest.mark.parametrize("nodes", ["", ",a", "[", "gpu[", "gpu[]"])
def test_a_node_list_that_is_none(nodes: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST"):
        first_host(nodes, "SLURM_STEP_NODELIST")


# Clusters: what each sets for a rank, by its documentation, and what `detect` makes of it. The
# table of docs/clusters.md has the same rows.

MPIJOB = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_set_default_slots": "4",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
PYTORCHJOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "1",
}
CLUSTERS = {
    "MPIJob, a rank": ({**MPIJOB, **OPENMPI}, "openmpi 3/4, local 1/2, host 1/2"),
    "MPIJob of Intel MPI": (
        {"I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile", "I_MPI_PERHOST": "2", **MPICH},
        "mpich 3/4, local 1/2, host 1/2",
    ),
    "TrainJob, torch, by torchrun": ({**PET, **TORCHRUN}, "torchrun 3/4, local 1/2, host 1/2"),
    "TrainJob, torch, by python": (PET, r"Kubeflow started this pod for torchrun .*torchrun -m hv"),
    "TrainJob, torch, one process": (
        {**PET, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"},
        "none 0/1, local 0/1, host 0/1",
    ),
    "TrainJob, torch, any number": (
        {**PET, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        r"for torchrun \(PET_NNODES=1, PET_NPROC_PER_NODE=auto",
    ),
    "TrainJob, mpi": ({**MPIJOB, **OPENMPI}, "openmpi 3/4, local 1/2, host 1/2"),
    "TrainJob, flux": (
        {**FLUX, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "5"},
        "flux 3/4, local 1/0, host 0/0",
    ),
    "PyTorchJob, by python": (PYTORCHJOB, "env:// 1/2, local 0/0, host 0/0"),
    "PyTorchJob, one process a pod": (
        {**PYTORCHJOB, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1"},
        "env:// 1/2, local 0/0, host 0/0",
    ),
    "PyTorchJob, several a pod": (
        {**PYTORCHJOB, "WORLD_SIZE": "8", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"},
        "PET_NPROC_PER_NODE=4.*: use torchrun",
    ),
    "Slurm": (SRUN, "srun 3/4, local 1/2, host 1/2"),
    "Slurm, RANK set by hand": (
        {**SRUN, "RANK": "3", "WORLD_SIZE": "4", **ADDRESS},
        "srun 3/4, local 1/2, host 1/2",
    ),
    "PALS": (
        {**PALS, "PMI_RANK": "3", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PALS_NODEID": "1"},
        "pals 3/4, local 1/2, host 1/2",
    ),
    "PALS without PMI": (
        {k: v for k, v in PALS.items() if k != "PMI_SIZE"},
        "incomplete pals.*PALS_RANKID=3.*PMI_SIZE missing; .*mpiexec -n 8 env PMI_SIZE=8 hvdtrain",
    ),
    "jsrun": (JSRUN, "jsrun 3/4, local 1/0, host 0/0"),
    "jsrun, Spectrum MPI": ({**JSRUN, **OPENMPI}, "openmpi 3/4, local 1/2, host 1/2"),
    "jsrun, in part": ({"JSM_NAMESPACE_LOCAL_RANK": "1"}, "start the job with jsrun"),
    "Flux": (FLUX, "flux 3/4, local 1/0, host 0/0"),
    "Flux on one host": (
        {**FLUX, "FLUX_TASK_LOCAL_ID": "3", "FLUX_JOB_NNODES": "1"},
        "flux 3/4, local 3/4, host 0/1",
    ),
    "SageMaker, torchrun": ({"SM_HOSTS": '["a"]', **TORCHRUN}, "torchrun 3/4, local 1/2, host 1/2"),
    "SageMaker, mpirun": ({"SM_HOSTS": '["a"]', **OPENMPI}, "openmpi 3/4, local 1/2, host 1/2"),
    "AzureML": ({**ENV, "NODE_RANK": "1"}, "env:// 3/4, local 1/0, host 0/0"),
    "PBS, no launcher": ({"PBS_NODEFILE": "/x", "PBS_JOBID": "1"}, "none 0/1, local 0/1, host 0/1"),
    "LSF, no launcher": ({"LSB_DJOB_HOSTFILE": "/x"}, "none 0/1, local 0/1, host 0/1"),
    "Grid Engine": ({"PE_HOSTFILE": "/x", "NSLOTS": "8"}, "none 0/1, local 0/1, host 0/1"),
    "no launcher, leftovers": (
        {"MASTER_ADDR": "left", "MASTER_PORT": "1", "SLURM_CONF": "x"},
        "none 0/1, local 0/1, host 0/1",
    ),
    "a Slurm step alone": ({"SLURM_STEP_ID": "0"}, "SLURM_PROCID"),
}


def agent(launcher: str, rank: int, size: int) -> Env:
    """Return the variables of the agent on one host, with one agent per host."""
    if launcher == "openmpi":
        return dict(zip(OPENMPI, (str(rank), str(size), "0", "1"), strict=True))
    return {
        **SRUN,
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": "0",
        "SLURM_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_NODEID": str(rank),
        "SLURM_NNODES": str(size),
    }


def by_hand(rank: int, size: int) -> Env:
    """Return what users set by hand for the ranks that a task starts."""
    return {**ADDRESS, "RANK": str(rank), "WORLD_SIZE": str(size)}


OF_ANOTHER_JOB = {**TORCHRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}
OF_ANOTHER_JOB |= dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
# One launcher inside another. torchrun numbers its agents in the order of their arrival, so any
# agent may be group 1; after the loss of a host (--nnodes 1:3) there are fewer than tasks of srun.
NESTED: dict[str, tuple[Env, str]] = {
    **{
        f"torchrun by agent {node} of {outer}": (
            {**TORCHRUN, **agent(outer, node, 2)},
            "torchrun 3/4",
        )
        for outer in ("openmpi", "srun")
        for node in (0, 1)
    },
    "torchrun goes on without a lost agent": ({**TORCHRUN, **agent("srun", 2, 3)}, "torchrun 3/4"),
    **{
        f"torchrun's own beside a stray {' '.join(stray)}": (
            {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", **stray},
            "torchrun 3/4",
        )
        for stray in (
            {"PMI_RANK": "0"},
            {"PMI_RANK": "0", "PMI_SIZE": "1"},  # of a shell that srun --mpi=pmi2 started
            {"OMPI_COMM_WORLD_SIZE": "8"},
            {"HOROVOD_RANK": "", "HOROVOD_SIZE": "x"},
        )
    },
    "by hand beside a stray PMI_RANK": ({**TORCHRUN, "PMI_RANK": "0"}, "incomplete mpich"),
    "torchrun and mpirun agree": ({**TORCHRUN, **OPENMPI}, "torchrun 3/4"),
    "mvapich by Hydra": ({**MVAPICH, **MPICH}, "mvapich 3/4"),
    "srun with PMI2": ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, "srun 3/4"),
    # mpirun starts a daemon on each other host by srun: here one, as there are two hosts.
    **{
        f"{inner} in a Slurm step, {node}": (
            {**ROWS[inner], **agent("srun", node, size)},
            f"{inner} 3/4",
        )
        for inner in ("openmpi", "mpich", "horovodrun")
        for node, size in ((0, 1), (1, 2))
    },
    "a task of srun spawns ranks": ({**agent("srun", 1, 2), **by_hand(5, 8)}, " 5/8"),
    "a task of mpirun spawns ranks": ({**agent("openmpi", 1, 2), **by_hand(5, 8)}, " 5/8"),
    # srun -m cyclic: tasks 0 and 2 are on host 0, 1 and 3 on host 1; the script numbers by host.
    "tasks numbered host by host": (
        {**SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", **by_hand(2, 4)},
        " 2/4",
    ),
    "a leftover rank of one": ({**SRUN, **by_hand(0, 1)}, "RANK=0, WORLD_SIZE=.*SLURM_PROCID=3"),
    "a leftover rank of four": ({**SRUN, **by_hand(0, 4)}, "RANK=0, WORLD_SIZE=.*SLURM_PROCID=3"),
    "a leftover of a larger world below mpirun": (
        {**OPENMPI, **by_hand(0, 8)},
        "RANK=0, WORLD_SIZE=8.*OMPI_COMM_WORLD_RANK=3",
    ),
    "a lone leftover rank": ({**OPENMPI, "RANK": "0"}, "incomplete env://.*RANK=0 set.*WORLD_SIZE"),
    # srun -N 2 --ntasks-per-node 2 torchrun --nnodes 2 --nproc-per-node 4: four agents, of which
    # two form a world.
    "an agent for each rank": (
        {**TORCHRUN, **SRUN, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
        "two launchers disagree",
    ),
    **{
        f"leftovers of torchrun below {outer}": (
            {**ROWS[outer], **OF_ANOTHER_JOB},
            f"RANK=0, WORLD_SIZE=8.*{rank}=3.*unset",
        )
        for outer, rank in (
            ("openmpi", "OMPI_COMM_WORLD_RANK"),
            ("mpich", "PMI_RANK"),
            ("mvapich", "MV2_COMM_WORLD_RANK"),
            ("srun", "SLURM_PROCID"),
            ("horovodrun", "HOROVOD_RANK"),
        )
    },
}


@pytest.mark.parametrize("name", [*CLUSTERS, *NESTED])
def test_what_is_made_of_an_environment(name: str) -> None:
    env, expected = {**CLUSTERS, **NESTED}[name]
    try:
        w = detect(env)
        place = f"local {w.local_rank}/{w.local_size}, host {w.cross_rank}/{w.cross_size}"
        found = f"{w.launcher} {w.rank}/{w.size}, {place}"
    except LaunchError as error:
        found = str(error)
    assert re.search(expected, found), found


def test_variables_set_by_hand_name_no_process_to_watch() -> None:
    """The shell that set them may end first. Other launchers' processes are watched."""
    for env, variable in ((ENV, None), (FLUX, "FLUX_TASK_RANK=3")):
        with launched_with(env):
            assert rank_variable(detect()) == variable


# Resource managers that only allocate


def test_an_allocation_of_several_slots_without_a_launcher_is_said(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\na\nb\n\n")
    pods = tmp_path / "pods"
    pods.write_text("worker-0.svc slots=8\nworker-1.svc\n")
    shell = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"}
    one_slot: list[Env] = [
        {},
        {"SLURM_TASKS_PER_NODE": "1"},
        {"PBS_NODEFILE": "/no/such/file"},
        {"NSLOTS": "1"},
    ]
    for env, said in (
        *((env, "^$") for env in one_slot),
        (shell, "Slurm has allocated 4 slots (SLURM_TASKS_PER_NODE=2(x2)), .*: srun hvdtrain"),
        ({"PBS_NODEFILE": str(file)}, f"PBS has allocated 3 slots .PBS_NODEFILE={file}.*hvdrun"),
        ({"LSB_DJOB_HOSTFILE": str(file), "LSB_DJOB_NUMPROC": "8"}, "LSF has allocated 8 slots"),
        ({"PE_HOSTFILE": str(file), "NSLOTS": "8"}, "Grid Engine has allocated 8 slots"),
        ({"OMPI_MCA_orte_default_hostfile": str(pods)}, "MPIJob has allocated 9.*mpirun hvdtrain"),
    ):
        with launched_with(env):
            assert detect() == World()
            assert re.search(said.replace("(", r"\(").replace(")", r"\)"), unused_allocation())


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
if before.launcher == "horovodrun":
    os.environ["HOROVOD_LOCAL_SIZE"] = os.environ["HOROVOD_SIZE"] = "2"
    print("elastic", detect().size)
"""


@pytest.mark.parametrize("launcher", ["none", "horovodrun"])
def test_variables_that_a_script_writes_after_init_change_nothing(launcher: str) -> None:
    zeros = {name: "1" if name.endswith("SIZE") else "0" for name in HOROVODRUN}
    env = zeros if launcher == "horovodrun" else {}
    finished = run(warm([sys.executable, "-c", LATER]), env=env)
    assert f"same 0 1 {launcher}" in finished.output, finished.output
    assert ("elastic 2" in finished.output) == (launcher == "horovodrun"), finished.output
    assert finished.code == 0, finished.output


# Properties


@st.composite
def worlds(draw: st.DrawFn) -> tuple[str, World, Env]:
    """Draw a launcher, one of its ranks on equally filled hosts, and that rank's environment."""
    name = draw(st.sampled_from(sorted(ROWS)))
    local_size, hosts = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    rank = draw(st.integers(0, local_size * hosts - 1))
    local, cross = rank % local_size, rank // local_size
    values = (rank, local_size * hosts, local, local_size, cross, hosts)
    env = dict(zip(ROWS[name], map(str, values), strict=False))
    env = {**ROWS[name], **env}
    if name == "srun":
        env["SLURM_TASKS_PER_NODE"] = draw(
            st.sampled_from(
                [f"{local_size}(x{hosts})", ",".join(itertools.repeat(str(local_size), hosts))]
            )
        )
    return name, World(*values, name), env


@settings(deadline=None)
@given(worlds())
def test_a_consistent_environment_round_trips(case: tuple[str, World, Env]) -> None:
    name, expected, env = case
    world = detect(env)
    assert numbers(world) == numbers(expected)
    assert (world.cross_rank, world.cross_size) == (expected.cross_rank, expected.cross_size)
    assert world.launcher == name
    with launched_with(env):
        assert numbers(guess_world())[::2] == numbers(expected)[::2]


# Who reports a LaunchError: see hvdtrain.liveness.failure


@pytest.mark.parametrize("local", [0, 1])
def test_guess_world_tells_the_ranks_of_a_host_apart(local: int) -> None:
    mine = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": str(local)}
    for left in ({"RANK": "0"}, {"RANK": "x"}, {"LOCAL_RANK": "-3"}, {"LOCAL_RANK": "0"}):
        with launched_with({**mine, **left}):
            assert guess_world().local_rank == local
    with launched_with({}):
        assert guess_world().local_rank == 0


IMPORTS = """
import importlib, sys
for name in ("job.world", "errors", "cli", "cli.train", "liveness.failure", ""):
    importlib.import_module(f"hvdtrain.{name}".rstrip("."))
    assert not {"torch", "mpi4py"} & set(sys.modules), name
"""


def test_importing_brings_no_torch() -> None:
    finished = run([sys.executable, "-c", IMPORTS])
    assert finished.code == 0, finished.output


PRINTED = """
import os
shown = {k: v for k, v in os.environ.items() if k.startswith(("PMI", "MPI_", "HYDRA", "OMPI"))}
os.write(1, f"{shown}\\n".encode())
"""


def test_mpich() -> None:
    """What the real launcher sets; test_parity.py and test_rendezvous.py start the others."""
    folder, _ = other_mpi("mpich")
    finished = run([folder / "mpiexec", "-n", "3", sys.executable, "-c", PRINTED])
    assert finished.code == 0, finished.output
    worlds = [detect(ast.literal_eval(line)) for line in finished.lines("{")]
    assert sorted(numbers(world) for world in worlds) == [(rank, 3, rank, 3) for rank in range(3)]
    assert {(world.launcher, world.one_host) for world in worlds} == {("mpich", True)}
