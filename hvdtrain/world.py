"""World: a process's rank, size and host, read from its launcher's environment variables.

Every command and every backend starts from `detect(env)`. It is a pure function of a mapping:
nothing is imported, started or written. A launcher is a row of `LAUNCHERS`. A partial row, or two
rows that contradict each other, is an error that names the variables, never a silent world of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import LaunchError


@dataclass(frozen=True)
class World:
    """The place of one process among the `size` ranks of a job.

    `cross_rank` and `cross_size` number the hosts; horovodrun counts only those that have this
    local rank. Open MPI, MPICH and MVAPICH do not set them: they are then computed for equally
    filled hosts in rank order, the default of these launchers.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    launcher: str = "none"
    source: str = "no launcher's variables are set"
    """The variables, with their values, that the fields were read from."""

    def __str__(self) -> str:
        return f"rank {self.rank}/{self.size}"

    @property
    def started_by(self) -> str:
        """The launcher's name in messages. `horovodrun --mpi` sets no variable that distinguishes
        it from the mpirun that it executes.
        """
        names = {"none": "no launcher", "openmpi": "mpirun (Open MPI, also by horovodrun --mpi)"}
        return names.get(self.launcher, self.launcher)

    @property
    def one_host(self) -> bool:
        """Whether all ranks run on one host."""
        return self.local_size == self.size


@dataclass(frozen=True)
class Launcher:
    """One row: the environment variables that a launcher sets for each rank."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    cross_rank: str = ""
    cross_size: str = ""
    required: tuple[str, ...] = ()
    """Further variables that this launcher always sets: without one, the environment is partial."""
    proof: str = ""
    """A variable that the launcher sets, and users who set the others by hand do not."""
    starts_agents: bool = False
    """Whether it may start one agent per host, which then starts the ranks (`srun torchrun ...`),
    or the daemons of another launcher. Its own rank and size are then those of the agents.
    """
    is_mpi: bool = False
    shares_terminal: bool = False
    """Whether the ranks write to the user's own terminal. Other launchers forward lines, some (Open
    MPI) through a pseudo-terminal, for which isatty() is true as well.
    """

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that identify a rank of this launcher."""
        return (self.rank, self.size, self.local_rank, self.local_size)


def _names(prefix: str) -> tuple[str, str, str, str]:
    """Return the variables of rank, size, local rank and local size that start with `prefix`."""
    return f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"


# Innermost first: a launcher that can run inside another comes before it. torchrun is started by
# mpirun or srun (one agent per host), horovodrun and mpirun by srun. MVAPICH may be started by
# Hydra, which also sets MPICH's variables.
LAUNCHERS = (
    Launcher(
        "torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        cross_rank="GROUP_RANK",
        cross_size="GROUP_WORLD_SIZE",
        required=("MASTER_ADDR", "MASTER_PORT"),
        proof="TORCHELASTIC_RUN_ID",
        shares_terminal=True,
    ),
    Launcher(
        "horovodrun",
        *_names("HOROVOD_"),
        cross_rank="HOROVOD_CROSS_RANK",
        cross_size="HOROVOD_CROSS_SIZE",
        required=("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
    ),
    # Also horovodrun --mpi, which sets no variable of its own
    Launcher("openmpi", *_names("OMPI_COMM_WORLD_"), starts_agents=True, is_mpi=True),
    Launcher("mvapich", *_names("MV2_COMM_WORLD_"), starts_agents=True, is_mpi=True),
    Launcher(  # Hydra: MPICH and Intel MPI
        "mpich",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        starts_agents=True,
        is_mpi=True,
    ),
    Launcher(
        "srun",
        rank="SLURM_PROCID",
        size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_TASKS_PER_NODE",
        cross_rank="SLURM_NODEID",
        cross_size="SLURM_NNODES",
        required=("SLURM_NODEID",),
        starts_agents=True,
    ),
)

_SRUN = LAUNCHERS[-1]

_MAX_DIGITS = 9  # in a rank or a size; more are certainly a mistake

# Slurm's step ids from here on are not those of a user's `srun`: they are the pending, interactive,
# batch and extern steps.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0


def detect(env: Mapping[str, str] | None = None) -> World:
    """Return the World of this process. Not collective; reads only `env` (`os.environ` when None).

    Raises LaunchError if a launcher's variables are partial, contradictory or not numbers.
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
    """Return whether an MPI launcher started this process, so that MPI_Init joins its peers."""
    return any(row.is_mpi for row in LAUNCHERS if row.name == world.launcher)


def shares_terminal(world: World) -> bool:
    """Return whether a stdout for which isatty() is true is the user's own terminal."""
    rows = [row for row in LAUNCHERS if row.name == world.launcher]
    return all(row.shares_terminal for row in rows)


def rank_variable(world: World, env: Mapping[str, str] | None = None) -> str | None:
    """Return the `NAME=value` that a launcher sets in its ranks but not in its own process; None if
    no launcher started this process.
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
    """Return the World that one launcher's variables describe; None if it has set none of them."""
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
    # For launchers that set no cross variables: equally filled hosts, in rank order.
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


def guess_world(env: Mapping[str, str] | None = None) -> World:
    """Guess the World of this process after `detect` raised LaunchError, so that not every rank of
    a host has to print the error. Not collective; never raises.

    Take the largest rank of any launcher: variables left over from another job are equal on all
    ranks.
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
        if len(text) <= _MAX_DIGITS:
            return int(text)
    except ValueError:
        pass
    raise LaunchError(f"{name}={text!r} is not a whole number of at most {_MAX_DIGITS} digits")


def _number_or_zero(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit() else 0


def _consistent(inner: World, outer: World) -> bool:
    """Return whether the launcher of `outer` can have started the process that `inner` describes.

    Either both number the same ranks, or `outer` is a world of one, or it started one agent per
    host.
    """
    if (inner.rank, inner.size) == (outer.rank, outer.size) or outer.size == 1:
        return True
    row = next(row for row in LAUNCHERS if row.name == outer.launcher)
    if not row.starts_agents:
        return False
    if row is _SRUN and inner.launcher != "torchrun":
        return True  # mpirun and horovodrun start daemons by `srun`: `outer` is a daemon's
    # Ranks cannot be compared: torchrun numbers its agents in the order of their arrival.
    return inner.cross_size == outer.size


# Slurm


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """Return whether this is a task of a job step. The shell of `salloc` or `sbatch` has SLURM_*
    variables too, SLURM_PROCID included.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _SLURM_SPECIAL_STEPS


def _srun_facts(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `env` in which the job step's values replace those of the allocation, and
    SLURM_TASKS_PER_NODE is this node's number.

    Slurm's own value has the form "2(x3),1", with an entry for each node.
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
    """Expand Slurm's "2(x3),1" into [2, 2, 2, 1]; an empty list for any other text."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: "gpu[03-05,9],login1" gives "gpu03".

    Raises LaunchError for text in another format.
    """
    match = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", nodelist.strip())
    if match is None:
        raise LaunchError(f"cannot read the first host of SLURM_STEP_NODELIST={nodelist!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])
