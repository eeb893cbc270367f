"""Decide what to build, from the machine's facts and the user's choices. Pure: nothing is run here.

`facts` fills `Facts`, `install` calls `decide`, and `recipe` turns the `BuildPlan` into commands.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB_PER_JOB = 2.5
"""Memory of one compiler process, for a source file that includes the torch headers."""

GPU_FIX = "set HOROVOD_CUDA_HOME and HOROVOD_NCCL_HOME (horovod.readthedocs.io, Horovod on GPU)"


@dataclass(frozen=True)
class Torch:
    """The installed torch, as it reports itself. `version` is empty if it does not import."""

    version: str = ""
    cuda: str | None = None
    packages: str = ""
    """The folder that contains the torch package, and that of the NCCL wheel."""
    problem: str = ""


@dataclass(frozen=True)
class Tool:
    """A program that was searched for. `problem` is empty if it was found and works."""

    command: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Cuda:
    """One CUDA toolkit, by its folder and the release of its nvcc."""

    home: str
    release: str


@dataclass(frozen=True)
class Nccl:
    """An NCCL that can be compiled and linked against."""

    include: str
    library: str


@dataclass(frozen=True)
class Facts:
    """Everything that the decisions depend on, besides the user's choices."""

    torch: Torch
    cxx: Tool
    cmake: Tool
    mpicxx: Tool
    missing: tuple[str, ...] = ()
    """One line for each missing requirement: what it is, and the fix."""
    cuda: Cuda | None = None
    nccl: Nccl | None = None
    cpus: int = 1
    memory_gib: float = 8.0


@dataclass(frozen=True)
class Choices:
    """The user's choices; None lets the machine's facts decide."""

    mpi: bool | None = None
    nccl: bool | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Built:
    """What the installed Horovod reports after its import: its features, torch, and GPUs."""

    mpi: bool
    gloo: bool
    nccl: bool
    torch: str = ""
    gpus: int = 0

    @property
    def parts(self) -> str:
        """The controllers and operations that are built."""
        return ", ".join(name for name in ("gloo", "mpi", "nccl") if getattr(self, name))


@dataclass(frozen=True)
class BuildPlan:
    """What to build. If `missing` is not empty, no build is possible."""

    without_mpi: str
    """Why MPI is not built; empty if it is."""
    without_nccl: str
    """Why NCCL operations are not built; empty if they are."""
    cuda: Cuda | None
    nccl: Nccl | None
    jobs: int
    missing: tuple[str, ...] = ()


def decide(facts: Facts, choices: Choices) -> BuildPlan:
    """Choose the controllers, the GPU operations and the jobs, and list what is missing."""
    missing = list(facts.missing)
    without_mpi = "--without-mpi" if choices.mpi is False else facts.mpicxx.problem
    if choices.mpi and without_mpi:
        missing.append(f"--with-mpi: {without_mpi}")
    without_nccl = "--without-nccl" if choices.nccl is False else _nccl_problem(facts)
    if choices.nccl and without_nccl:
        missing.append(f"--with-nccl: {without_nccl}")
    # One job per core, but no more than fit in memory; Horovod's own default is eight.
    jobs = max(1, min(facts.cpus, int(facts.memory_gib / GIB_PER_JOB)))
    return BuildPlan(
        without_mpi=without_mpi,
        without_nccl=without_nccl,
        cuda=None if without_nccl else facts.cuda,
        nccl=None if without_nccl else facts.nccl,
        jobs=choices.jobs or jobs,
        missing=tuple(missing),
    )


def shortfall(built: Built, plan: BuildPlan, choices: Choices) -> str | None:
    """Return how a library falls short of the plan; None if it satisfies plan and choices.

    Features beyond an automatic choice are no reason to build again.
    """
    for name, has, without, choice in (
        ("Gloo", built.gloo, "", None),  # every plan has it
        ("MPI", built.mpi, plan.without_mpi, choices.mpi),
        ("NCCL", built.nccl, plan.without_nccl, choices.nccl),
    ):
        if not (has or without):
            return f"without {name}"
        if has and choice is False:
            return f"with {name}"
    return None


def _nccl_problem(facts: Facts) -> str:
    """Return why NCCL operations cannot be built, and the fix."""
    wanted, cuda = facts.torch.cuda, facts.cuda
    if wanted is None:
        return "torch is not built for CUDA"
    if cuda is None:
        found = "no nvcc was found"
    # nvcc and torch must share the major version: one process loads both runtime libraries.
    elif cuda.release.partition(".")[0] != wanted.partition(".")[0]:
        found = f"nvcc is {cuda.release} in {cuda.home}"
    elif facts.nccl is None:
        found = "nccl.h with libnccl was not found"
    else:
        return ""
    return f"torch is built for CUDA {wanted} and {found}; {GPU_FIX}"
