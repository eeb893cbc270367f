"""Decide what to build, from the machine's facts and the user's choices. Pure: nothing is run here.

`facts` fills `Facts`, `install` calls `decide`, and `recipe` turns the `BuildPlan` into commands.
"""

from __future__ import annotations

from dataclasses import dataclass

CMAKE_MINIMUM = (3, 21)
"""Horovod needs 3.13, but CMake reads CMAKE_TOOLCHAIN_FILE from the environment only since 3.21."""

GIB_PER_JOB = 2.5
"""Memory of one compiler process, for a source file that includes the torch headers."""

CMAKE_FIX = "pip install --upgrade cmake"
GPU_FIX = "set HOROVOD_CUDA_HOME and HOROVOD_NCCL_HOME (horovod.readthedocs.io, Horovod on GPU)"


@dataclass(frozen=True)
class Torch:
    """The installed torch, as it reports itself."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    cxx11_abi: bool = True
    packages: str = ""
    """The folder that contains the torch package, and that of the NCCL wheel."""


@dataclass(frozen=True)
class Tool:
    """A program that was searched for. `problem` is None if it was found and works."""

    command: str = ""
    about: str = ""
    problem: str | None = None

    @property
    def works(self) -> bool:
        """Whether it was found and passed its test."""
        return self.problem is None


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

    torch: Torch | None
    cxx: Tool
    cc: Tool
    make: Tool
    cmake: Tool
    mpicxx: Tool
    python_header: Tool
    torch_problem: str = ""
    cmake_version: tuple[int, ...] = ()
    cuda: tuple[Cuda, ...] = ()
    nccl: Nccl | None = None
    modules_missing: tuple[str, ...] = ()
    managed: bool = False
    """Whether pip may not install here, because a system package manager owns this Python."""
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


@dataclass(frozen=True)
class BuildPlan:
    """What to build. If `missing` is not empty, no build is possible."""

    mpi: bool
    mpi_note: str
    cuda: Cuda | None
    nccl: Nccl | None
    gpu_note: str
    jobs: int
    missing: tuple[str, ...] = ()


def decide(facts: Facts, choices: Choices) -> BuildPlan:
    """Choose the controllers, the GPU operations and the jobs, and list what is missing."""
    missing = _missing(facts)
    mpi, mpi_note = _decide_mpi(facts.mpicxx, choices.mpi)
    if choices.mpi and not mpi:
        missing.append(f"--with-mpi: {facts.mpicxx.problem}")
    cuda, gpu_note = _decide_gpu(facts, choices.nccl)
    if choices.nccl and not cuda:
        missing.append(f"--with-nccl: {gpu_note}")
    return BuildPlan(
        mpi=mpi,
        mpi_note=mpi_note,
        cuda=cuda,
        nccl=facts.nccl if cuda else None,
        gpu_note=gpu_note,
        jobs=choices.jobs or default_jobs(facts.cpus, facts.memory_gib),
        missing=tuple(missing),
    )


def default_jobs(cpus: int, memory_gib: float) -> int:
    """Return one job per core, but no more than fit in memory; Horovod's own default is eight."""
    return max(1, min(cpus, int(memory_gib / GIB_PER_JOB)))


def shortfall(built: Built, plan: BuildPlan, choices: Choices) -> str | None:
    """Return how a library falls short of the plan; None if it satisfies plan and choices.

    Features beyond an automatic choice are no reason to build again.
    """
    if not built.gloo:  # every plan has Gloo
        return "without Gloo"
    for name, has, planned, choice in (
        ("MPI", built.mpi, plan.mpi, choices.mpi),
        ("NCCL", built.nccl, plan.nccl is not None, choices.nccl),
    ):
        if planned and not has:
            return f"without {name}"
        if has and choice is False:
            return f"with {name}"
    return None


def _missing(facts: Facts) -> list[str]:
    """Return one line for each missing requirement: what it is, and the fix."""
    lines = [] if facts.torch else [facts.torch_problem]
    tools = (facts.cxx, facts.cc, facts.make, facts.cmake, facts.python_header)
    lines += [tool.problem for tool in tools if tool.problem]
    if facts.cmake.works and facts.cmake_version < CMAKE_MINIMUM:
        have, need = (".".join(map(str, v)) for v in (facts.cmake_version, CMAKE_MINIMUM))
        lines.append(f"cmake {need} or later: {facts.cmake.command} is {have}; {CMAKE_FIX}")
    if facts.modules_missing:
        # Without pip there is nothing to install the others with, so its fix is first.
        others = [name for name in facts.modules_missing if name != "pip"]
        fixes = ["python -m ensurepip"] if "pip" in facts.modules_missing else []
        fixes += [f"pip install {' '.join(others)}"] if others else []
        names = ", ".join(facts.modules_missing)
        lines.append(f"Python packages for the build: {names}; {'; '.join(fixes)}")
    if facts.managed:
        lines.append(
            "a Python that pip may install into: this one belongs to the system's package manager; "
            "use a virtual environment (python -m venv)"
        )
    return lines


def _decide_mpi(mpicxx: Tool, choice: bool | None) -> tuple[bool, str]:
    if choice is False:
        return False, "no: --without-mpi"
    if mpicxx.works:
        return True, f"yes: {mpicxx.command}{mpicxx.about and f' ({mpicxx.about})'}"
    return False, f"no, Gloo only: {mpicxx.problem}"


def _decide_gpu(facts: Facts, choice: bool | None) -> tuple[Cuda | None, str]:
    """Return the CUDA toolkit for NCCL operations, or None for a CPU build; and a note on why."""
    torch = facts.torch
    if choice is False:
        return None, "no: --without-nccl"
    if torch is None:
        return None, "no: torch is missing"
    if torch.hip is not None:
        return None, f"no: torch is a ROCm build ({torch.hip}); this command knows CUDA only"
    if torch.cuda is None:
        return None, "no: torch is a CPU build"
    major = torch.cuda.partition(".")[0]
    asked = f"torch is built for CUDA {torch.cuda}"
    if not facts.cuda:
        return None, f"no: {asked} and no nvcc was found; {GPU_FIX}"
    # nvcc and torch must share the major version: one process loads both runtime libraries.
    fits = [cuda for cuda in facts.cuda if cuda.release.partition(".")[0] == major]
    if not fits:
        found = ", ".join(f"{cuda.release} in {cuda.home}" for cuda in facts.cuda)
        return None, f"no: {asked} and nvcc is {found}; {GPU_FIX}"
    if facts.nccl is None:
        return None, f"no: {asked} and nccl.h with libnccl was not found; {GPU_FIX}"
    return fits[0], f"NCCL: {facts.nccl.library}, nvcc {fits[0].release} in {fits[0].home}"
