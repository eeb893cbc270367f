"""`hvdtrain compare` over two hosts: network namespaces with an sshd in each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.launch import remote_hosts
from hvdtrain.launch.host_list import Host
from hvdtrain.launch.remote_hosts import RemoteHosts
from tests.forkserver import warm
from tests.launch.hosts import Hosts, running_hosts
from tests.launching import run, started, wait_for

# Less than the tests wait, so that a rank that hangs is named.
SHORT = "--blocks 6 --steps 5 --proof-steps 4 --max-foreign 100% --timeout 90 -H".split()
COMPARE = [sys.executable, "-m", "hvdtrain", "compare", *SHORT]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with running_hosts(2) as made:
        # A core for each, fewer than the comparison may have, so that ranks share none.
        for name, pid in made.sshd.items():
            os.sched_setaffinity(pid, {core_of(name)})
        yield made


def core_of(name: str) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores["ab".index(name) % len(cores)]


def compare(
    hosts: Hosts, folder: Path, at: str, arms: list[str]
) -> tuple[int, str, dict[str, Any]]:
    """Compare on a host, or beside them for "", without sharing temporary files with the others."""
    own = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))  # a socket's path must be short
    for name in set(hosts.sshd) - {at}:
        subprocess.run(hosts.on(name, "mount", "-t", "tmpfs", "tmpfs", own), check=True)
    command = [*COMPARE, "a:1,b:1", "--output", str(folder / "found"), *arms]
    line = hosts.on(at, "taskset", "-c", core_of(at), *command) if at else hosts.on_login(*command)
    done = run(line, env={"TMPDIR": str(own)}, timeout=350)
    record = json.loads((folder / "found" / "compare.json").read_text())
    hosts.wait_until_gone()
    shutil.rmtree(own)
    return done.code, done.output, record


TWIN = Path(__file__).parent / "scripts/twin.py"
RANKS = f"-np 2 -H a:1,b:1 {sys.executable}"


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("at", "arms"),
    [
        ("", ["--arms", "ddp/gloo,ddp/mpi,horovod/mpi"]),
        # Whatever starts the ranks there, if it passes on the environment. On a, for horovodrun
        # wants an interface of the same name where it runs.
        (
            "a",
            [
                f"hvdrun {RANKS} {TWIN} right",
                f"hvdrun {RANKS} -m hvdtrain.hvd {TWIN} horovod",
                f"horovodrun --gloo --disable-cache {RANKS} {TWIN} horovod",
            ],
        ),
    ],
    ids=["named", "commands"],
)
def test_arms_on_two_hosts(hosts: Hosts, at: str, arms: list[str], tmp_path: Path) -> None:
    code, output, record = compare(hosts, tmp_path, at, arms)
    assert code == 0, output
    assert {row["status"] for row in record["arms"].values()} == {"measured"}, output
    assert {row["ranks"] for row in record["arms"].values()} == {2}, "as many as slots"
    assert {row["verdict"] for row in record["parity"]} == {"bitwise"}, output
    assert record["config"]["hosts"] == "a:1,b:1"
    # The comparison has more cores: each rank has counted those of its own host.
    ranks = [rank for row in record["arms"].values() for rank in row["in_force"]]
    assert {rank["threads"] for rank in ranks} == {1}


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_nothing_outlives_a_killed_comparison(hosts: Hosts, tmp_path: Path) -> None:
    command = [*COMPARE, "a:1,b:1", "--arms", "ddp/gloo,ddp/shm", "--output", tmp_path / "found"]
    with started(hosts.on_login(*command)) as (process, log):
        wait_for(log, "timing: block 1", seconds=150)  # all arms but one are stopped
        process.kill()
    hosts.wait_until_gone()


NOISY_SSH = """#!/bin/sh
echo Welcome to the cluster
echo "You have $(printf 7) messages
7
in your mailbox"
printf 'last login: never '
exec sh
"""


def test_lines_of_a_login_shell_are_no_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(NOISY_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(remote_hosts, "is_this_host", lambda name: False)
    # Of the same machine here, so that it exists already.
    with RemoteHosts([Host("a", 1)], tmp_path) as hosts:
        assert hosts._run("a", "true") == 0
        assert hosts._run("a", "echo noise; exit_code() { return 3; }; exit_code") == 3
        assert hosts._to_clear == []
        hosts._shells["a"].terminate()
        assert hosts._run("a", "true") is None


@pytest.mark.exhaustive
def test_a_host_that_cannot_be_reached(hosts: Hosts, tmp_path: Path) -> None:
    command = warm([*COMPARE, "a:1,nowhere:1"])
    done = run(hosts.on_login(*command, "--output", tmp_path / "found"), timeout=60)
    assert done.code == 2
    assert "error: ssh to nowhere: " in done.output
    assert "Could not resolve hostname nowhere" in done.output
