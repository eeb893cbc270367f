"""World: a process's rank, size and host, read from its launcher's environment variables.

Every command and every backend starts from `detect(env)`. It is a pure function of a mapping:
nothing is imported, started or written. A launcher is a row of `LAUNCHERS`. A partial row, two rows
that contradict each other, or a cluster's variables without a rank are an error that names the
variables, never a silent world of one. Some launchers do not say which ranks share a host: then
`rendezvous.complete_world` asks all ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.job import elastic_world
from hvdtrain.job.slurm import expand_tasks_per_node, facts_of_step, is_srun_task


@dataclass(frozen=True)
class World:
    """The place of one process among the `size` ranks of a job.

    `cross_rank` and `cross_size` number the hosts; horovodrun counts only those that have this
    local rank. Open MPI, MPICH and MVAPICH do not set them: they are then computed for equally
    filled hosts in rank order, the default of these launchers. If the launcher does not give
    `local_size`, it is 0, and the hosts are unknown until `rendezvous.complete_world`.
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
    is_by_hvdrun: bool = False
    """Whether `hvdrun` has set them, which are torchrun's, or horovodrun's in an elastic job."""

    def __str__(self) -> str:
        return f"rank {self.rank}/{self.size}"

    @property
    def row(self) -> Launcher:
        """The launcher's row; without a launcher one that has no variables."""
        return next((row for row in LAUNCHERS if row.name == self.launcher), _NO_LAUNCHER)

    @property
    def started_by(self) -> str:
        """The launcher's name in messages."""
        return "hvdrun" if self.is_by_hvdrun else self.row.command or self.launcher

    @property
    def is_complete(self) -> bool:
        """Whether it is known which ranks share a host."""
        return self.local_size > 0

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
    local_size: str = ""
    """Empty if the launcher does not set it: see `World.is_complete`."""
    cross_rank: str = ""
    cross_size: str = ""
    required: tuple[str, ...] = ()
    """Further variables that this launcher always sets: without one, the environment is partial."""
    optional: tuple[str, ...] = ()
    """Variables that it does not always set."""
    marks: tuple[str, ...] = ()
    """The variables that show this launcher; all that identify a rank, if it shares none of them
    with another launcher.
    """
    command: str = ""
    """The command that starts it, if not its name."""
    advice: str = ""
    """What to do about a partial environment, if not to start the job with that command."""
    proof: str = ""
    """A variable that the launcher sets, and users who set the others by hand do not."""
    is_mpi: bool = False

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that identify a rank of this launcher."""
        return tuple(filter(None, (self.rank, self.size, self.local_rank, self.local_size)))


def _names(prefix: str) -> tuple[str, str, str, str]:
    """Return the variables of rank, size, local rank and local size that start with `prefix`."""
    return f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"


STORE_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")

# Innermost first: a launcher that can run inside another comes before it. torchrun is started by
# mpirun or srun (one agent per host), horovodrun and mpirun by srun. MVAPICH may be started by
# Hydra, which also sets MPICH's variables; Spectrum MPI's ranks by jsrun have Open MPI's, too.
LAUNCHERS = (
    Launcher(
        "torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        cross_rank="GROUP_RANK",
        cross_size="GROUP_WORLD_SIZE",
        required=STORE_ADDRESS,
        marks=("LOCAL_WORLD_SIZE",),
        proof="TORCHELASTIC_RUN_ID",
    ),
    Launcher(  # a cluster's, or set by hand: Kubeflow's PyTorchJob without torchrun, AzureML
        "env://",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        required=STORE_ADDRESS,
        optional=("LOCAL_RANK",),
        proof="TORCHELASTIC_RUN_ID",  # never set here: no process of a launcher can be watched
        command="the variables RANK and WORLD_SIZE",
        advice="start the job with torchrun, or set or unset them all",
    ),
    Launcher(
        "horovodrun",
        *_names("HOROVOD_"),
        cross_rank="HOROVOD_CROSS_RANK",
        cross_size="HOROVOD_CROSS_SIZE",
        required=("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
    ),
    Launcher(
        "openmpi",
        *_names("OMPI_COMM_WORLD_"),
        # horovodrun sets no variable that distinguishes it from the mpirun that it executes
        command="mpirun (Open MPI, also by horovodrun --mpi)",
        is_mpi=True,
    ),
    Launcher("mvapich", *_names("MV2_COMM_WORLD_"), is_mpi=True),
    Launcher(  # Hydra: MPICH and Intel MPI
        "mpich",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        is_mpi=True,
    ),
    Launcher(  # LSF; with Spectrum MPI also Open MPI's variables
        "jsrun",
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        is_mpi=True,
    ),
    Launcher(  # HPE Cray's mpiexec, under PBS
        "pals",
        rank="PALS_RANKID",
        size="PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
        marks=("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        command="mpiexec (PALS)",
        advice="give the number of ranks, such as: mpiexec -n 8 env PMI_SIZE=8 hvdtrain",
        is_mpi=True,
    ),
    Launcher(  # launchers/flux.sh sets the variables of env:// from these
        "flux",
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        command="flux run bash launchers/flux.sh",
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
    ),
)

*_, _PALS, _FLUX, _SRUN = LAUNCHERS
_NO_LAUNCHER = Launcher("none", "", "", "", command="no launcher")

# What Kubeflow sets for torchrun, which sets RANK from it
_KUBEFLOW = tuple(f"PET_{n}" for n in "NNODES NPROC_PER_NODE NODE_RANK MASTER_ADDR".split())

# Resource managers that allocate slots and start no ranks: the variable with their number, or with
# the path of a file that has a line for each or for each host, and what starts ranks there.
_ALLOCATIONS = (
    ("Slurm", "SLURM_TASKS_PER_NODE", "srun"),
    ("LSF", "LSB_DJOB_NUMPROC", "hvdrun"),
    ("Grid Engine", "NSLOTS", "hvdrun"),
    ("PBS", "PBS_NODEFILE", "hvdrun"),
    ("Kubeflow's MPIJob", "OMPI_MCA_orte_default_hostfile", "mpirun"),
)

_SLOTS = re.compile(r"\bslots=(\d{1,6})")  # in a line of a hostfile; one without is one slot

_MAX_DIGITS = 9  # in a rank or a size; more are certainly a mistake


def detect(env: Mapping[str, str] | None = None) -> World:
    """Return the World of this process. Not collective; reads only `env` (`launch_env()` if None).

    Raises LaunchError if a launcher's variables are partial, contradictory or not numbers, or if a
    cluster has set its own variables but no rank.
    """
    env = launch_env() if env is None else env
    found: list[World] = []
    for row in LAUNCHERS:
        try:
            found += filter(None, [_read(row, env)])
        except LaunchError:
            # torchrun has certainly started this rank: the others' are left over.
            if not (found and found[0].launcher == "torchrun" and LAUNCHERS[0].proof in env):
                raise
    _check_kubeflow(env, found)
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
    # The same ranks as another launcher numbers them, which may know the hosts: RANK set by hand
    # from SLURM_PROCID, for example.
    same = (w for w in found if (w.rank, w.size) == (inner.rank, inner.size) and w.is_complete)
    world = next(same, inner)
    if world.row is not _FLUX:
        return world
    if world.size == 1:
        return World()
    raise LaunchError(
        f"Flux started this process as one of several tasks ({world.source}): flux run bash "
        "launchers/flux.sh COMMAND sets their RANK and WORLD_SIZE"
    )


HVDRUN_ID = "hvdrun"
"""What `hvdrun` sets as TORCHELASTIC_RUN_ID: its ranks have torchrun's variables."""

RESTART_VARIABLE = "HVDTRAIN_RESTART"
"""What `hvdrun --max-restarts` gives its ranks, in JSON: the job's id ("job"), how often it has
started them again ("number") of how many times ("of"), and why ("cause").
"""


def hvdrun_restart(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the content of RESTART_VARIABLE; None without it. Raises LaunchError."""
    text = env.get(RESTART_VARIABLE)
    if text is None:
        return None
    try:
        told = json.loads(text)
        return {"job": str(told["job"]), "number": int(told["number"]), **told}
    except (ValueError, LookupError, TypeError):
        raise LaunchError(f"{RESTART_VARIABLE}={text!r} was not set by hvdrun; unset it") from None


_launch_env: dict[int, dict[str, str]] = {}  # by process id, so that a forked child has its own


def launch_env() -> Mapping[str, str]:
    """Return the environment that the launcher has given: os.environ, but once this process has
    opened a World, as it was then. Not collective.

    Scripts write RANK or LOCAL_RANK into os.environ later, which must not change a re-init or who
    ends the job. HOROVOD_* count as they are now: elastic Horovod gives a process a new rank.
    """
    first = _launch_env.get(os.getpid())
    if first is None:
        return os.environ
    return first | {name: os.environ[name] for name in os.environ if name.startswith("HOROVOD_")}


def keep_launch_env() -> None:
    """Make `launch_env` return today's os.environ from now on. A second call does nothing."""
    _launch_env.setdefault(os.getpid(), dict(os.environ))


def unused_allocation() -> str:
    """Return, for a World without a launcher, what a resource manager has allocated to this job and
    how to use it; "" if that is one slot at most, or nothing. Not collective.
    """
    env = launch_env()
    for name, variable, command in _ALLOCATIONS:
        text = env.get(variable, "")
        counts = expand_tasks_per_node(text)
        with suppress(OSError, UnicodeError):
            if text.startswith("/"):
                lines = filter(str.strip, Path(text).read_text().splitlines())
                counts = [int(m[1]) if (m := _SLOTS.search(line)) else 1 for line in lines]
        count = sum(counts)
        if count > 1:
            return (
                f"{name} has allocated {count} slots ({variable}={text}), but this is one process; "
                f"to start a rank in each, run: {command} hvdtrain"
            )
    return ""


def is_mpi(world: World) -> bool:
    """Return whether an MPI launcher started this process, so that MPI_Init joins its peers."""
    return world.row.is_mpi


def may_be_mpi(world: World) -> bool:
    """Return whether MPI_Init may join this process's peers. srun and Flux can start MPI programs;
    only initialising MPI shows whether they have.
    """
    return world.row.is_mpi or world.row in (_FLUX, _SRUN)


def rank_variable(world: World) -> str | None:
    """Return the `NAME=value` that a launcher sets in its ranks but not in its own process; None if
    no launcher started this process.
    """
    env, row = launch_env(), world.row
    is_set = row.rank in env and (not row.proof or row.proof in env)
    return f"{row.rank}={env[row.rank]}" if is_set else None


def agent_keeps_store(world: World) -> bool:
    """Whether torchrun's agent serves the store, from before the ranks start until they end."""
    is_served = launch_env().get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return is_served and world.launcher == "torchrun"


def _read(row: Launcher, env: Mapping[str, str]) -> World | None:
    """Return the World that one launcher's variables describe; None if it has set none of them."""
    if row is _SRUN:
        if not is_srun_task(env):
            return None
        env = facts_of_step(env)
    elif not env.keys() & (row.marks or row.variables):
        return None
    elif row.name == "env://" and "LOCAL_WORLD_SIZE" in env:
        return None  # torchrun's
    names = (*row.variables, *row.required)
    missing = [name for name in names if name not in env and name not in row.optional]
    if missing:
        if row.name == "mpich" and _has_pmi_of_another(env):
            return None
        command = row.command or row.name
        raise LaunchError(
            f"an incomplete {row.name} environment: {_listed(env, names)} set, but "
            f"{', '.join(missing)} missing; "
            + (row.advice or f"start the job with {command}, or set or unset them all")
        )
    rank, size = _number(env, row.rank), _number(env, row.size)
    local_rank, num_hosts = _number(env, row.local_rank), _number(env, row.cross_size)
    local_size = _number(env, row.local_size, size if 1 in (size, num_hosts) else 0)
    # For launchers that set no cross variables: equally filled hosts, in rank order.
    cross_rank = rank // local_size if local_size else 0
    cross_size = -(-size // local_size) if local_size else 0
    if row.cross_rank in env and row.cross_size in env:
        cross_rank, cross_size = _number(env, row.cross_rank), num_hosts
    source = _listed(env, (*row.variables, row.cross_rank, row.cross_size))
    by_hvdrun = env.get(row.proof) == HVDRUN_ID or elastic_world.SECRET in env
    place = rank, size, local_rank, local_size, cross_rank, cross_size
    world = World(*place, row.name, source, by_hvdrun)
    # A rank that replaces a lost one on an elastic host has its slot, behind older ranks.
    is_elastic = row.name == "horovodrun" and env.get("HOROVOD_ELASTIC") == "1"
    possible = 0 <= rank < size and 0 <= local_rank <= (size if is_elastic else rank)
    if row.local_size or world.is_complete:
        hosts_fit = 0 <= cross_rank < cross_size <= size
        possible = possible and local_rank < local_size <= size and hosts_fit
    if not possible:
        raise LaunchError(f"an impossible {row.name} environment: {source}")
    return world


def _listed(env: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the variables that are set, with their values, for a message."""
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def _has_pmi_of_another(env: Mapping[str, str]) -> bool:
    """Return whether PMI_RANK and PMI_SIZE are not Hydra's, but of PALS, Flux or `srun --mpi=pmi2`,
    which set no MPI_LOCALRANKID.
    """
    return is_srun_task(env) or any(name in env for name in ("FLUX_TASK_RANK", *_PALS.marks))


def _check_kubeflow(env: Mapping[str, str], found: list[World]) -> None:
    """Raise LaunchError in a pod that Kubeflow has started for torchrun, but without torchrun."""
    per_pod = env.get("PET_NPROC_PER_NODE")
    if found:  # torchrun has numbered them, or each pod is one rank: PyTorchJob without torchrun
        is_rank = found[0].launcher != "env://" or "LOCAL_RANK" in env
        if is_rank or per_pod in (None, "1", "auto"):
            return
    elif not env.keys() & _KUBEFLOW or (per_pod, env.get("PET_NNODES")) == ("1", "1"):
        return
    raise LaunchError(
        f"Kubeflow started this pod for torchrun ({_listed(env, _KUBEFLOW)}): use torchrun -m "
        f"hvdtrain, or torchrun with your script"
    )


def guess_world() -> World:
    """Guess the World of this process after `detect` raised LaunchError, so that not every rank of
    a host has to print the error. Not collective; never raises.

    Take the largest rank of any launcher: variables left over from another job are equal on all
    ranks.
    """
    env, largest = launch_env(), [0, 0]
    for row in LAUNCHERS:
        for i, name in enumerate((row.rank, row.local_rank)):
            with suppress(LaunchError):
                largest[i] = max(largest[i], _number(env, name))
    rank, local_rank = largest
    return World(rank, rank + 1, local_rank, local_rank + 1)


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    """Return the number in a variable; `default` without it. Raises LaunchError."""
    text = env.get(name, str(default))
    try:
        if len(text) <= _MAX_DIGITS:
            return int(text)
    except ValueError:
        pass
    raise LaunchError(f"{name}={text!r} is not a whole number of at most {_MAX_DIGITS} digits")


def _consistent(inner: World, outer: World) -> bool:
    """Return whether the launcher of `outer` can have started the process that `inner` describes.

    Either both number the same ranks, or `outer` is a world of one, or it started one agent per
    host.
    """
    if (inner.rank, inner.size) == (outer.rank, outer.size) or outer.size == 1:
        return True
    # A launcher of programs of any kind, as MPI's are, may start one agent per host, which then
    # starts the ranks (`srun torchrun ...`). Its own rank and size are then those of the agents.
    if not may_be_mpi(outer):
        return False
    if inner.launcher == "env://":
        return _sets_ranks(inner, outer)
    if outer.row is _SRUN and inner.launcher != "torchrun":
        return True  # mpirun and horovodrun start daemons by `srun`: `outer` is a daemon's
    # Ranks cannot be compared: torchrun numbers its agents in the order of their arrival. With
    # --nnodes MIN:MAX and one agent a host it goes on without an agent that is lost.
    one_a_host = outer.local_size == 1
    return inner.cross_size == outer.size or (one_a_host and 1 < inner.cross_size < outer.size)


def _sets_ranks(inner: World, outer: World) -> bool:
    """Return whether a task of `outer` can have set the RANK and WORLD_SIZE of `inner`: for ranks
    that it spawns, or to number the tasks host by host. Leftovers are equal in all tasks.
    """
    if inner.size > outer.size:
        each, rest = divmod(inner.size, outer.size)
        return outer.row is _SRUN or (not rest and inner.rank // each == outer.rank)
    by_host = outer.cross_rank * outer.local_size + outer.local_rank
    return (inner.rank, inner.size) == (by_host, outer.size)
