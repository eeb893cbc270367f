"""Build Horovod from its source distribution against the torch installed here.

Used by `hvdtrain install-horovod`; backends and `compare` use it to find Horovod. Horovod has no
wheels, and its CMake asks for C++14, but today's torch headers need C++20. In the order of use:

    facts       what this machine has: torch, compilers, cmake, MPI, CUDA, NCCL
    build_plan  facts and choices in, decisions and missing parts out; pure
    recipe      the plan as CMake files, environment and pip commands; pure
    build       the wheel in a temporary folder, then its installation
    check       a real allreduce of two ranks for every controller that is built
    install     the command `hvdtrain install-horovod`, from the first line to the table

This module finds the Horovod that is installed now, from its files alone: importing the package
imports neither torch nor Horovod.
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

INSTALL = "hvdtrain install-horovod"


@dataclass(frozen=True)
class InstalledHorovod:
    """An installed Horovod: its version, and the torch that it was compiled against."""

    version: str
    torch: str | None
    """`torch.__version__` at build time; None if it had no PyTorch, or did not record it."""

    def problem(self, torch_version: str) -> str | None:
        """Return why this Horovod does not work with `torch_version`, and the fix; None if it does.

        C++ has no stable ABI between two torch versions, nor between a +cpu and a +cu build of the
        same one, so the strings must be equal.
        """
        if self.torch is None:
            return f"Horovod {self.version} here was built without PyTorch; run: {INSTALL}"
        if self.torch != torch_version:
            return (
                f"Horovod {self.version} here was built for torch {self.torch}, "
                f"this is torch {torch_version}; run: {INSTALL}"
            )
        return None


def installed_horovod() -> InstalledHorovod | None:
    """Return the installed Horovod, or None. Reads files only: no torch, no Horovod import."""
    try:
        found = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None
    package = Path(str(found.locate_file("horovod")))
    return InstalledHorovod(found.version, _built_for(package))


def horovod_problem(torch_version: str) -> str | None:
    """Return why there is no Horovod that works with `torch_version`, and the fix; else None."""
    found = installed_horovod()
    if found is None:
        return f"Horovod is not installed; build it with: {INSTALL}"
    return found.problem(torch_version)


def _built_for(package: Path) -> str | None:
    # Horovod's CMake writes metadata.json before it compiles, so it is valid only with the library.
    library = package / "torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"
    if not library.is_file():
        return None
    try:
        version = json.loads((package / "metadata.json").read_text(encoding="utf-8"))["pytorch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(version)
