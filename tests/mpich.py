"""A second MPI for the tests: MPICH, which `make` puts into an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launching import BIN, ROOT


def mpich() -> tuple[Path, dict[str, str]]:
    """Return the `bin` of an environment with the packages mpich and mpi4py, and variables that
    give its Python what ours has. Where there is none the test is skipped; in CI it fails.

    mpi4py takes the MPI library of `sys.prefix`, so that the one of ours then finds MPICH's.
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
