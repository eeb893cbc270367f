"""Attacks of another user of the machine on a running job: nothing of his is executed or used.

Two real users, so these tests want root, and are not in `make test`: test_security.py is.
`tests/launch/stranger.py` has the job and the attacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments import missing, require
from tests.launch.stranger import JOB, STRANGER
from tests.launching import ROOT, free_address, run, started, variables, wait_for

pytestmark = pytest.mark.exhaustive


def user(uid: int, folder: Path) -> list[str]:
    """What starts a program as a user. Skip the test without root, or a checkout that all read."""
    require("setpriv", root=True)
    home = folder / f"home-{uid}"
    if not home.exists():
        home.mkdir()
        os.chown(home, uid, uid)
    change = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
    names = {"HOME": home, "USER": f"u{uid}", "LOGNAME": f"u{uid}", "TMPDIR": home}
    line = [*change, "env", "-u", "XDG_CONFIG_HOME", *(f"{n}={v}" for n, v in names.items())]
    python = Path(sys.base_prefix)
    if closed := [path for path in python.parents if not path.stat().st_mode & 0o001]:
        # Root's own Python: show it, and nothing else of root's home, in a mount namespace.
        place = folder / "python"
        place.mkdir(exist_ok=True)
        mounts = f"mount --bind {python} {place} && mount -t tmpfs -o mode=755 none {closed[-1]}"
        mounts += f" && mkdir -p {python} && mount --bind {place} {python}"
        line = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *line]
    if subprocess.run([*line, sys.executable, "-c", "import hvdtrain"], cwd=ROOT).returncode:
        missing("another user cannot read this checkout")
    return line


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in which every user can create files: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-test-") as name:
        path = Path(name)
        path.chmod(0o777)
        yield path
        found = [entry.name for entry in path.iterdir() if entry.name.endswith(f"-{JOB}")]
        assert found == [f"home-{JOB}"], found  # no attack has succeeded


PROGRAM = ["-m", "tests.launch.stranger"]
ENV = variables("HOROVOD_GLOO_TIMEOUT_SECONDS=60 PYTHONDONTWRITEBYTECODE=1")
LATE = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True"


@pytest.mark.parametrize("launcher", ["torchrun --nproc-per-node 2", "hvdrun -np 2"])
def test_a_stranger_joins_as_a_late_rank(folder: Path, launcher: str) -> None:
    """And answers with a pickle."""
    address = free_address()
    program = [*PROGRAM, str(folder)]
    command = [*launcher.split(), "--master-port", address["MASTER_PORT"], *program]
    with started([*user(JOB, folder), *command], env=ENV) as (_, log):
        joins = [*user(STRANGER, folder), sys.executable, *program]
        print(run(joins, env={**ENV, **address, **variables(LATE)}).output)
        (folder / "attacked").touch()
        wait_for(log, "rank 0/2 got a value from rank 1 that is not signed with this job's secret")
