"""Environments of their own, which `make` installs: other MPIs, Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launching import BIN, ROOT

# Open MPI 4.1 is in our own environment.
OTHER_MPIS = ("mpich", "openmpi5")


def other_mpi(name: str) -> tuple[Path, dict[str, str]]:
    """Return the `bin` of an environment with an MPI and mpi4py, and variables: see `environment`.

    mpi4py loads the MPI library of `sys.prefix`: our mpi4py, under that Python, loads the other.
    """
    folder, packages = environment(name, "mpiexec")
    # More ranks than cores; under Open MPI 4 that is OMPI_MCA_rmaps_base_oversubscribe.
    return folder, {**packages, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def environment(name: str, program: str) -> tuple[Path, dict[str, str]]:
    """Return the `bin` of an environment that has a program, and the variables with which its
    Python also imports our packages. Without it skip the test; fail it in CI.
    """
    folder = Path(os.environ.get("TEST_ENVIRONMENTS", ROOT)) / f".venv-{name}" / "bin"
    if not (folder / program).exists():
        why = f"no {name} in {folder}: make {folder.parent.name}/installed"
        if "CI" in os.environ:
            pytest.fail(why)
        pytest.skip(why)
    (site,) = (BIN.parent / "lib").glob("python3.*/site-packages")
    return folder, {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
