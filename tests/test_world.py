"""The launcher table, with hand-written environments. tests/launch/test_world.py has real ones."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import LaunchError
from hvdtrain.world import (
    World,
    detect,
    expand_tasks_per_node,
    first_slurm_host,
    guess_world,
    is_mpi,
)
from tests.launching import run

Env = dict[str, str]

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
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
ROWS: dict[str, Env] = {
    "torchrun": TORCHRUN,
    "horovodrun": HOROVODRUN,
    "openmpi": OPENMPI,
    "mvapich": MVAPICH,
    "mpich": MPICH,
    "srun": SRUN,
}
# Without these variables the launcher's row does not apply at all, rather than being partial.
EVIDENCE = {"srun": {"SLURM_STEP_ID"}}
# Alone, these are no evidence of the launcher: users set MASTER_* by hand, too, and the others can
# be computed from the rest.
OPTIONAL = {
    "torchrun": {"MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE"},
    "horovodrun": {"HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"},
    "srun": {"SLURM_NNODES"},
}


def numbers(world: World) -> tuple[int, ...]:
    return (world.rank, world.size, world.local_rank, world.local_size)


@pytest.mark.parametrize("name", ROWS)
def test_every_launcher_is_read(name: str) -> None:
    world = detect(ROWS[name])
    assert numbers(world) == (3, 4, 1, 2)
    assert (world.cross_rank, world.cross_size, world.launcher) == (1, 2, name)
    assert not world.one_host
    assert is_mpi(world) == (name in ("openmpi", "mvapich", "mpich"))
    assert "=3" in world.source


def test_no_launcher_is_a_world_of_one() -> None:
    world = detect({"PATH": "/bin", "MASTER_ADDR": "left", "MASTER_PORT": "1", "SLURM_CONF": "x"})
    assert world == World(0, 1, 0, 1, 0, 1, "none")


@pytest.mark.parametrize("name", ROWS)
def test_a_missing_variable_is_named(name: str) -> None:
    for missing in sorted(ROWS[name].keys() - EVIDENCE.get(name, set())):
        env = {key: value for key, value in ROWS[name].items() if key != missing}
        needed = missing not in OPTIONAL.get(name, set()) or (name, missing) in {
            ("torchrun", "MASTER_ADDR"),
            ("torchrun", "MASTER_PORT"),
            ("horovodrun", "HOROVOD_CROSS_RANK"),
            ("horovodrun", "HOROVOD_CROSS_SIZE"),
        }
        if needed:
            with pytest.raises(LaunchError, match=f"incomplete {name}.*{missing} missing"):
                detect(env)
        else:
            assert numbers(detect(env)) == (3, 4, 1, 2), missing


@pytest.mark.parametrize("name", [name for name in ROWS if name != "srun"])
def test_a_variable_alone_is_never_a_world_of_one(name: str) -> None:
    for alone in sorted(ROWS[name].keys() - OPTIONAL.get(name, set())):
        with pytest.raises(LaunchError, match=f"incomplete {name}.*{alone}="):
            detect({alone: "0"})


def test_a_slurm_step_alone_is_never_a_world_of_one() -> None:
    with pytest.raises(LaunchError, match="SLURM_PROCID"):
        detect({"SLURM_STEP_ID": "0"})


@pytest.mark.parametrize("bad", ["", "x", "1.5", "0x1", "nan"])
def test_not_a_number_is_named(bad: str) -> None:
    with pytest.raises(LaunchError, match="WORLD_SIZE=.*not a whole number"):
        detect({**TORCHRUN, "WORLD_SIZE": bad})


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "-4"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "5"},
        {"RANK": "0"},  # with local rank 1, which cannot be above the rank
        {"GROUP_RANK": "2"},
        {"GROUP_RANK": "-1"},
        {"GROUP_WORLD_SIZE": "9"},
    ],
)
def test_impossible_numbers_are_refused(change: Env) -> None:
    (name, value) = next(iter(change.items()))
    with pytest.raises(LaunchError, match=f"impossible torchrun.*{name}={value}"):
        detect({**TORCHRUN, **change})


# Slurm


def test_the_step_counts_not_the_allocation() -> None:
    env = {
        **SRUN,
        "SLURM_NTASKS": "16",
        "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_NNODES": "8",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NUM_NODES": "2",
    }
    assert numbers(detect(env)) == (3, 4, 1, 2)
    assert detect(env).cross_size == 2


@pytest.mark.parametrize(
    ("rank", "node", "local", "local_size"),
    [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 2), (3, 1, 1, 2), (4, 2, 0, 1)],
)
def test_nodes_with_unequal_tasks(rank: int, node: int, local: int, local_size: int) -> None:
    env = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_ID": "3",
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


def test_srun_with_pmi2() -> None:
    world = detect({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (world.launcher, world.rank) == ("srun", 3)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2]), ("", []), ("2(x", []), ("a", [])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["2(x1)", "x", ""])
def test_tasks_per_node_that_do_not_reach_this_node(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE="):
        detect({**SRUN, "SLURM_TASKS_PER_NODE": text})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu03", "gpu03"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("a,b[1-2]", "a"),
        ("gpu[01-02]-ib", "gpu01-ib"),
        ("rack[1-2]node[3,5]", "rack1node3"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_first_slurm_host(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",a", "[", "gpu[", "gpu[]"])
def test_a_node_list_that_is_none(nodes: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST"):
        first_slurm_host(nodes)


# One launcher inside another


def agent(launcher: str, rank: int, size: int) -> Env:
    """Return the variables of the agent on one host, with one agent per host."""
    openmpi = dict(zip(OPENMPI, (str(rank), str(size), "0", "1"), strict=True))
    srun = {
        **SRUN,
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": "0",
        "SLURM_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_NODEID": str(rank),
        "SLURM_NNODES": str(size),
    }
    return {"openmpi": openmpi, "srun": srun}[launcher]


@pytest.mark.parametrize("outer", ["openmpi", "srun"])
@pytest.mark.parametrize("node", [0, 1])
def test_torchrun_by_one_agent_a_host(outer: str, node: int) -> None:
    # torchrun numbers its agents in the order of their arrival, so either node may be group 1.
    assert detect({**TORCHRUN, **agent(outer, node, 2)}).launcher == "torchrun"


@pytest.mark.parametrize("inner", ["openmpi", "mpich", "horovodrun"])
def test_an_mpirun_inside_a_slurm_step(inner: str) -> None:
    # mpirun starts a daemon on each other host by srun: here one, as there are two hosts.
    assert detect({**ROWS[inner], **agent("srun", 0, 1)}).launcher == inner
    assert detect({**ROWS[inner], **agent("srun", 1, 2)}).launcher == inner


def test_mvapich_by_hydra() -> None:
    assert detect({**MVAPICH, **MPICH}).launcher == "mvapich"


@pytest.mark.parametrize("outer", ["openmpi", "mpich", "mvapich", "srun", "horovodrun"])
def test_leftovers_of_another_job_are_named(outer: str) -> None:
    left = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    left.update({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"})
    own_rank = next(name for name in ROWS[outer] if name.endswith(("RANK", "PROCID")))
    with pytest.raises(LaunchError, match=f"RANK=0, WORLD_SIZE=8.*{own_rank}=3") as caught:
        detect({**ROWS[outer], **left})
    assert "unset" in str(caught.value)


def test_a_lone_leftover_rank_is_named() -> None:
    with pytest.raises(LaunchError, match="incomplete torchrun.*RANK=0 set.*WORLD_SIZE"):
        detect({**OPENMPI, "RANK": "0"})


def test_the_same_ranks_twice_are_no_contradiction() -> None:
    assert detect({**TORCHRUN, **OPENMPI}).launcher == "torchrun"


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
    assert numbers(guess_world(env))[::2] == numbers(expected)[::2]


class Recorded(Mapping[str, str]):
    """A mapping that is no dict: `detect` must need no more than a Mapping."""

    def __init__(self, values: Env) -> None:
        self._values = values

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def test_detect_reads_only_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**OPENMPI, "SLURM_STEP_ID": "0", "RANK": "7"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert detect(Recorded({})) == World()
    assert numbers(detect(Recorded(SRUN))) == (3, 4, 1, 2)
    assert dict(os.environ) == before


# Who reports a LaunchError: see hvdtrain.failure


@pytest.mark.parametrize("local", [0, 1])
def test_guess_world_tells_the_ranks_of_a_host_apart(local: int) -> None:
    mine = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": str(local)}
    for left in ({"RANK": "0"}, {"RANK": "x"}, {"LOCAL_RANK": "-3"}, {"LOCAL_RANK": "0"}):
        assert guess_world({**mine, **left}).local_rank == local
    assert guess_world({}).local_rank == 0


@pytest.mark.parametrize("module", ["world", "errors", "cli", "cli.train", "failure", ""])
def test_importing_brings_no_torch(module: str) -> None:
    name = f"hvdtrain.{module}".rstrip(".")
    code = f"import sys, {name}; sys.exit('torch' in sys.modules or 'mpi4py' in sys.modules)"
    finished = run([sys.executable, "-c", code])
    assert finished.code == 0, finished.output
