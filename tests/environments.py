"""What a test needs beside Python and our own environment: programs of the system, root, and the
environments that `make` installs (other MPIs, Ray).

Where a part is missing the test is skipped; under CI it fails. Tests that need a program are marked
`exhaustive`: `make test` runs where there is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
from _pytest.mark import ParameterSet

from tests.launching import BIN, ROOT

PACKAGES = {
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "ip": "iproute2",
    "java": "openjdk-17-jre-headless",
    "nft": "nftables",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
"""Debian's package of each program that a test may require and that a new machine may lack."""


EXHAUSTIVE = pytest.mark.exhaustive
MARKS = {"rest": [EXHAUSTIVE], "slow": [EXHAUSTIVE, pytest.mark.slow]}


def rest(*values: object) -> ParameterSet:
    """Return a row of a test that `make test` leaves to `make test-rest`."""
    return pytest.param(*values, marks=EXHAUSTIVE)


def rows(text: str) -> list[ParameterSet]:
    """Return the rows of a table: one in each line, its cells between bars, comments after a #.

    A last cell "rest" leaves its row to `make test-rest`, and "slow" to `make test-all`.
    """
    found = []
    lines = (re.sub("(^|  )# .*", "", line).strip() for line in text.splitlines())
    for line in filter(None, lines):
        *cells, last = (cell.strip() for cell in line.split("|"))
        marks = MARKS.get(last, [])
        found.append(pytest.param(*cells, *([] if marks else [last]), marks=marks))
    return found


def missing(what: str) -> NoReturn:
    """Skip the test for want of something; fail it in CI."""
    if "CI" in os.environ:
        pytest.fail(f"CI must have it: {what}")
    pytest.skip(what)


def require(*programs: str, root: bool = False) -> None:
    """Skip the test, or fail it in CI, without one of the programs, or without root."""
    folders = os.pathsep.join([os.environ["PATH"], "/usr/local/sbin", "/usr/sbin", "/sbin"])
    for program in programs:
        if shutil.which(program, path=folders) is None:
            missing(f"without {program}: apt-get install {PACKAGES.get(program, 'util-linux')}")
    if root and os.geteuid() != 0:
        missing("without root")


def own_namespaces(script: str, *more: str) -> list[str]:
    """Return the prefix of a command that runs after `script`, in a mount namespace of its own and
    in `more`: options of unshare. The script ends with `exec "$@"`.
    """
    require("unshare", root=True)
    prefix = ["unshare", "--mount", *more, "sh", "-c", script, "sh"]
    tried = subprocess.run([*prefix, "/bin/true"], capture_output=True, text=True)
    if tried.returncode:
        missing(f"no namespaces of its own here: {tried.stderr.strip()}")
    return prefix


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
    Python also imports our packages.
    """
    folder = Path(os.environ.get("TEST_ENVIRONMENTS", ROOT)) / f".venv-{name}" / "bin"
    if not (folder / program).exists():
        missing(f"no {name} in {folder}: make {folder.parent.name}/installed")
    (site,) = (BIN.parent / "lib").glob("python3.*/site-packages")
    return folder, {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
