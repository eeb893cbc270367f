"""MPICH, a second MPI for the tests, which `make` installs into an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launching import BIN, ROOT


def mpich() -> tuple[Path, dict[str, str]]:
    """Return the `bin` of an environment with mpich and mpi4py, and the variables with which its
    Python also imports our packages. Without such an environment skip the test; fail it in CI.

    mpi4py loads the MPI library of `sys.prefix`: our mpi4py, under that Python, loads MPICH's.
    """
    folder = Path(os.environ.get("TEST_MPICH_ENV", ROOT / ".venv-mpich")) / "bin"
    if not (folder / "mpiexec").exists():
        why = f"no MPICH in {folder}: python3 -m venv .venv-mpich && .venv-mpich/bin/pip install "
        why += "mpich mpi4py"
        if "CI" in os.environ:
            pytest.fail(why)
        pytest.skip(why)
    (site,) = (BIN.parent / "lib").glob("python3.*/site-packages")
    return folder, {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
