"""Attacks of another user of the machine on a running job: nothing of his is executed or used.

Two real users, so these tests want root, and are not in `make test`: test_security.py is.
`tests/launch/stranger.py` has the job and the attacks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.environments import missing, require
from tests.launch.stranger import JOB, STRANGER, listening_ports
from tests.launch.test_rendezvous import at_address, env_id, first_port, step
from tests.launching import BIN, ROOT, Started, started

pytestmark = pytest.mark.exhaustive

PROGRAM = [sys.executable, "-m", "tests.launch.stranger"]
LAUNCHERS = {
    "torchrun": [f"{BIN}/torchrun", "--standalone", "--nproc-per-node", "2"],
    "hvdrun": [f"{BIN}/hvdrun", "-np", "2", sys.executable],
}


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


Start = Callable[..., Started]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Return what starts a command as a user; all end after the test."""
    with contextlib.ExitStack() as stack:

        def start_one(uid: int, *command: str, **env: str) -> Started:
            line = [*user(uid, folder), *command, str(folder)]
            env |= {"TEST_USER": str(JOB), "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
            env |= {"PYTHONDONTWRITEBYTECODE": "1"}
            return stack.enter_context(started(line, env=env))[0]

        yield start_one


def end(running: Started) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(60)
    return running.text


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stranger_joins_as_a_late_rank(folder: Path, start: Start, launcher: str) -> None:
    """He finds the port of the store, and answers with a pickle."""
    job = start(JOB, *LAUNCHERS[launcher], "-m", "tests.launch.stranger", "objects")
    print(end(start(STRANGER, *PROGRAM, "join")))
    (folder / "attacked").touch()
    assert "rank 0/2 got a value of rank 1 that is not signed with the secret" in end(job)


def test_a_stranger_listens_first(folder: Path, start: Start) -> None:
    """Where the port follows from the job's public id. The ranks meet at the next port."""
    envs = step(2)
    stranger = start(STRANGER, *PROGRAM, "objects", **envs[0])
    while not (port := next(iter(listening_ports(STRANGER)), 0)):
        assert stranger.poll() is None, end(stranger)
    assert port == first_port(env_id(envs[0]))
    (folder / "attacked").touch()
    ranks = [start(JOB, *PROGRAM, "objects", **env) for env in envs]
    assert [end(rank) for rank in ranks] == ["met 2\n"] * 2


def test_a_stranger_reads_and_redirects_addresses(start: Start) -> None:
    """He connects to a rank with what the store says, and writes another address to it."""
    stranger = start(STRANGER, *PROGRAM, "redirect")
    ranks = [start(JOB, *PROGRAM, "connections", **env) for env in at_address()]
    said = end(ranks[1])
    end(stranger)
    assert "listening/0 in the store is not signed with the secret" in said, said
