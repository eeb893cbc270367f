"""World: who this process is, read from what its launcher put into the environment.

`detect(env)` is a pure function of a mapping: nothing is imported, started or written. A launcher
is a row of `LAUNCHERS`. A partial row, or two rows that contradict each other, is an error that
names the variables; it is never a silent world of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import LaunchError


@dataclass(frozen=True)
class World:
    """The facts of one process among `size`.

    `cross_rank` and `cross_size` number the hosts; horovodrun counts only those that have this
    local rank. Open MPI, MPICH and MVAPICH do not tell them; there they follow from equally filled
    hosts in rank order, which is what these launchers do by default.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    launcher: str = "none"
    source: str = "no launcher's variables are set"
    """Which variables, with their values, these facts were read from."""

    def __str__(self) -> str:
        return f"rank {self.rank}/{self.size}"

    @property
    def started_by(self) -> str:
        """How messages name the launcher. `horovodrun --mpi` sets nothing that would tell it from
        the mpirun that it becomes.
        """
        names = {"none": "no launcher", "openmpi": "mpirun (Open MPI, also by horovodrun --mpi)"}
        return names.get(self.launcher, self.launcher)

    @property
    def one_host(self) -> bool:
        """Whether all ranks run on one host."""
        return self.local_size == self.size


@dataclass(frozen=True)
class Launcher:
    """One row: the variables in which a launcher says who a process is."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    cross_rank: str = ""
    cross_size: str = ""
    required: tuple[str, ...] = ()
    """Variables that this launcher also always sets, so that one missing is a partial environment.
    """
    proof: str = ""
    """A variable that users who set the others by hand do not set."""
    agents: bool = False
    """It may start one agent per host, which then starts the ranks (`srun torchrun ...`), or the
    daemons of another launcher, so that its own rank and size may be those of the agents.
    """
    is_mpi: bool = False
    shares_terminal: bool = False
    """The ranks write to the user's own terminal. Others forward lines, though some (Open MPI) by
    way of a pseudo-terminal, which looks like one."""

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that make a process one of this launcher's."""
        return (self.rank, self.size, self.local_rank, self.local_size)


# Innermost first: the one that can run inside another comes before it. torchrun is started by
# mpirun or srun (one agent a host), horovodrun and mpirun by srun. MVAPICH may be started by Hydra,
# which also sets MPICH's variables.
LAUNCHERS = (
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        required=("MASTER_ADDR", "MASTER_PORT"),
        proof="TORCHELASTIC_RUN_ID",
        shares_terminal=True,
    ),
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        required=("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
    ),
    Launcher(  # horovodrun --mpi looks like this too, and sets nothing of its own
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        agents=True,
        is_mpi=True,
    ),
    Launcher(
        "mvapich",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        agents=True,
        is_mpi=True,
    ),
    Launcher(  # Hydra: MPICH and Intel MPI
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        agents=True,
        is_mpi=True,
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_NNODES",
        required=("SLURM_NODEID",),
        agents=True,
    ),
)

_SRUN = LAUNCHERS[-1]

_MOST_DIGITS = 9  # of a rank or a size

# Slurm numbers the steps that are no `srun` of the user's (the pending, interactive, batch and
# extern step) from here.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0


def detect(env: Mapping[str, str] | None = None) -> World:
    """Say who this process is. Not collective; reads only `env` (`os.environ` when None).

    Raises LaunchError where a launcher's variables are partial, contradictory or not numbers.
    """
    env = os.environ if env is None else env
    found = [world for row in LAUNCHERS if (world := _read(row, env)) is not None]
    if not found:
        return World()
    inner = found[0]
    for outer in found[1:]:
        if not _consistent(inner, outer):
            raise LaunchError(
                f"two launchers disagree about this process: {inner.source}, but {outer.source}; "
                f"unset the variables that are left over from another job, or start one "
                f"{inner.launcher} per host under {outer.launcher}"
            )
    return inner


def is_mpi(world: World) -> bool:
    """Whether an MPI launcher started this process, so that MPI_Init joins it to the others."""
    return any(row.is_mpi for row in LAUNCHERS if row.name == world.launcher)


def shares_terminal(world: World) -> bool:
    """Whether what looks like a terminal to this process is the user's."""
    rows = [row for row in LAUNCHERS if row.name == world.launcher]
    return all(row.shares_terminal for row in rows)


def rank_variable(world: World, env: Mapping[str, str] | None = None) -> str | None:
    """The `NAME=value` by which the ranks that a real launcher starts differ from its own process;
    None where none has started this one.
    """
    env = os.environ if env is None else env
    for row in LAUNCHERS:
        if row.name == world.launcher and row.rank in env and (not row.proof or row.proof in env):
            return f"{row.rank}={env[row.rank]}"
    return None


def agent_keeps_store(world: World, env: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun's agent serves the store, from before the ranks start until they end."""
    env = os.environ if env is None else env
    return world.launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _read(row: Launcher, env: Mapping[str, str]) -> World | None:
    if row is _SRUN:
        if not _is_srun_task(env):
            return None
        env = _srun_facts(env)
    elif not any(name in env for name in row.variables):
        return None
    wanted = (*row.variables, *row.required)
    missing = [name for name in wanted if name not in env]
    if missing and row.name == "mpich" and _is_srun_task(env):
        return None  # `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE without Hydra's local ones
    if missing:
        present = [f"{name}={env[name]}" for name in wanted if name in env]
        raise LaunchError(
            f"an incomplete {row.name} environment: {', '.join(present)} set, but "
            f"{', '.join(missing)} missing; start the job with {row.name}, or set or unset them all"
        )
    rank, size, local_rank, local_size = (_number(env, name) for name in row.variables)
    cross_rank = rank // local_size if local_size else 0
    cross_size = -(-size // local_size) if local_size else 0
    if row.cross_rank in env and row.cross_size in env:
        cross_rank, cross_size = _number(env, row.cross_rank), _number(env, row.cross_size)
    told = [name for name in (*row.variables, row.cross_rank, row.cross_size) if name in env]
    source = ", ".join(f"{name}={env[name]}" for name in told)
    world = World(rank, size, local_rank, local_size, cross_rank, cross_size, row.name, source)
    possible = (
        0 <= rank < size
        and 0 <= local_rank < local_size <= size
        and 0 <= cross_rank < cross_size <= size
        and local_rank <= rank
    )
    if not possible:
        raise LaunchError(f"an impossible {row.name} environment: {source}")
    return world


def presume(env: Mapping[str, str] | None = None) -> World:
    """Guess who this process is where `detect` has raised LaunchError, so that the ranks of a host
    need not all say so. Not collective; never raises.

    The largest numbers of any launcher: one left over from another job says the same on every rank.
    """
    env = os.environ if env is None else env
    ranks, local_ranks = [0], [0]
    for row in LAUNCHERS:
        ranks.append(_number_or_zero(env, row.rank))
        local_ranks.append(_number_or_zero(env, row.local_rank))
    return World(max(ranks), max(ranks) + 1, max(local_ranks), max(local_ranks) + 1)


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    try:
        if len(text) <= _MOST_DIGITS:
            return int(text)
    except ValueError:
        pass
    raise LaunchError(f"{name}={text!r} is not a whole number of at most {_MOST_DIGITS} digits")


def _number_or_zero(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if len(text) <= _MOST_DIGITS and text.isascii() and text.isdigit() else 0


def _consistent(inner: World, outer: World) -> bool:
    """Whether `outer` can have started what `inner` describes.

    Either both number the same ranks, or `outer` is a world of one, or it started one agent per
    host.
    """
    if (inner.rank, inner.size) == (outer.rank, outer.size) or outer.size == 1:
        return True
    row = next(row for row in LAUNCHERS if row.name == outer.launcher)
    if not row.agents:
        return False
    if row is _SRUN and inner.launcher != "torchrun":
        return True  # mpirun and horovodrun reach other hosts by `srun`: these are their daemons'
    # Not the ranks: torchrun numbers its agents in the order in which they meet.
    return inner.cross_size == outer.size


# Slurm


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """Whether this is a task of a step, not the shell of `salloc` or `sbatch`, which has SLURM_*
    too, SLURM_PROCID included.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _SLURM_SPECIAL_STEPS


def _srun_facts(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of the srun row, taken from the step's own where Slurm sets them.

    SLURM_NTASKS and SLURM_TASKS_PER_NODE may be the allocation's. The tasks per node come as
    "2(x3),1": the local size is this node's entry.
    """
    facts = dict(env)
    for name, step_name in (
        ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
    ):
        if step_name in env:
            facts[name] = env[step_name]
    per_node = expand_tasks_per_node(facts.get("SLURM_TASKS_PER_NODE", ""))
    node = facts.get("SLURM_NODEID", "0")
    if per_node and node.isdigit() and int(node) < len(per_node):
        facts["SLURM_TASKS_PER_NODE"] = str(per_node[int(node)])
    return facts


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's "2(x3),1" into [2, 2, 2, 1]; an empty list where it is something else."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_slurm_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list: "gpu[03-05,9],login1" gives "gpu03"."""
    match = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", nodelist.strip())
    if match is None:
        raise LaunchError(f"cannot read the first host of SLURM_STEP_NODELIST={nodelist!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])
