"""Turn a plan into CMake files, an environment and two pip commands. Pure: nothing is run here.

Used by `build`, and by `install` for --dry-run. Horovod's sources build unchanged; these problems
are solved from outside:

- Its CMake asks for C++14, and C++11 in CUDA files; torch needs C++20, and CUDA 13 at least C++17.
  CMake reads a toolchain file before the project. It names the files below, which CMake reads after
  its own compiler tables, so that "C++14" becomes -std=c++20.
- CMake 4 rejects the `cmake_minimum_required(VERSION 2.8.12)` of the bundled Gloo.
- If torch has CUDA and CMake finds an nvcc, it builds for CUDA even if that is not requested.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.horovod_build.build_plan import BuildPlan, Facts

HOROVOD_VERSION = "0.28.1"

OVERRIDE_CXX = """\
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION "-std=gnu++20")
"""

OVERRIDE_CUDA = """\
set(CMAKE_CUDA11_STANDARD_COMPILE_OPTION "-std=c++17")
set(CMAKE_CUDA11_EXTENSION_COMPILE_OPTION "-std=c++17")
"""

# CMake finds this module before Horovod's own one of the same name, which it includes.
FIND_PYTORCH_CPU = """\
include("${PROJECT_SOURCE_DIR}/cmake/Modules/FindPytorch.cmake")
set(Pytorch_CUDA FALSE)
list(FILTER Pytorch_LIBRARIES EXCLUDE REGEX "cuda|NOTFOUND")
"""


def cmake_files(plan: BuildPlan, folder: Path, base: Mapping[str, str]) -> dict[Path, str]:
    """Return the CMake files of a build, by path below `folder`. `base`: the user's variables."""
    users = base.get("CMAKE_TOOLCHAIN_FILE")
    toolchain = [f'include("{users}")'] if users else []
    toolchain.append(f'set(CMAKE_USER_MAKE_RULES_OVERRIDE_CXX "{folder / "cxx.cmake"}")')
    files = {folder / "cxx.cmake": OVERRIDE_CXX}
    if plan.nccl:
        toolchain += [
            f'set(CMAKE_USER_MAKE_RULES_OVERRIDE_CUDA "{folder / "cuda.cmake"}")',
            f'set(NCCL_INCLUDE_DIR "{plan.nccl.include}" CACHE PATH "")',
            f'set(NCCL_LIBRARY "{plan.nccl.library}" CACHE FILEPATH "")',
        ]
        files[folder / "cuda.cmake"] = OVERRIDE_CUDA
    else:
        toolchain += [
            'set(CMAKE_CUDA_COMPILER "")',
            "set(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit TRUE)",
            f'list(INSERT CMAKE_MODULE_PATH 0 "{folder / "modules"}")',
        ]
        files[folder / "modules" / "FindPytorch.cmake"] = FIND_PYTORCH_CPU
    files[folder / "toolchain.cmake"] = "\n".join(toolchain) + "\n"
    return files


def build_environment(
    plan: BuildPlan, facts: Facts, folder: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the complete environment of a build: `base` and the variables of the plan.

    It keeps the user's HOROVOD_BUILD_* variables; other HOROVOD_ variables would contradict the
    plan. With CUDA, its nvcc comes first on PATH.
    """
    env = {
        name: value
        for name, value in base.items()
        if not name.startswith("HOROVOD_") or name.startswith("HOROVOD_BUILD_")
    }
    if plan.cuda and plan.nccl:
        env |= {
            # Horovod's CMake queries the first nvcc on PATH for architectures.
            "PATH": os.pathsep.join([os.path.join(plan.cuda.home, "bin"), env["PATH"]]),
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": plan.cuda.home,
            "HOROVOD_NCCL_HOME": str(Path(plan.nccl.include).parent),
            "HOROVOD_NCCL_LINK": "SHARED",
            "CUDA_HOME": plan.cuda.home,  # torch's own search must find the same toolkit
        }
    return {
        **env,
        "CXX": facts.cxx.command,
        "CMAKE_TOOLCHAIN_FILE": str(folder / "toolchain.cmake"),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # setup.py passes -j8 unless MAKEFLAGS is set, and passes make's options to any generator.
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(plan.jobs),
        "MAKEFLAGS": f"-j{plan.jobs}",
        "HOROVOD_CMAKE": facts.cmake.command,
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        f"HOROVOD_WITH{'OUT' * bool(plan.without_mpi)}_MPI": "1",
        "LC_ALL": "C",  # `buildlog` searches for English errors
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),  # where pip unpacks and compiles: removed with the folder
    }


def wheel_command(folder: Path) -> list[str]:
    """Return the command that builds the wheel into `folder`.

    It bypasses pip's cache, which does not distinguish torch versions.
    """
    return [
        *(sys.executable, "-m", "pip", "wheel", "-v", "--progress-bar=off"),
        *("--disable-pip-version-check", "--no-input", "--no-cache-dir"),
        *("--no-build-isolation", "--no-deps", "--no-binary=horovod"),
        *("--wheel-dir", str(folder), f"horovod=={HOROVOD_VERSION}"),
    ]


def install_command(wheel: Path) -> list[str]:
    """Return the command that installs the wheel, and replaces any installed Horovod."""
    return [
        *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"),
        *("--no-cache-dir", "--no-index", "--no-deps", "--force-reinstall", str(wheel)),
    ]
