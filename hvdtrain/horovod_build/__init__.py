"""Build Horovod from its source distribution against the torch installed here.

Used by `hvdtrain install-horovod`; backends and `compare` use it to find Horovod. Horovod has no
wheels, and its CMake asks for C++14, but today's torch headers need C++20. In the order of use:

    installed   the Horovod that is installed now, read from files alone
    facts       what this machine has: torch, compilers, cmake, MPI, CUDA, NCCL
    plan        facts and choices in, decisions and missing parts out; pure
    recipe      the plan as CMake files, environment and pip commands; pure
    build       the wheel in a temporary folder, then its installation
    check       a real allreduce of two ranks for every controller that is built
    install     the command `hvdtrain install-horovod`, from the first line to the table

Importing this package imports neither torch nor Horovod.
"""

from __future__ import annotations

from hvdtrain.horovod_build.installed import InstalledHorovod, installed_horovod

__all__ = ["InstalledHorovod", "installed_horovod"]
