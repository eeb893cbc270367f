"""Real Slurm on two hosts: srun, `hvdrun --rsh srun` in an allocation, and the sbatch script."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.environments import rows
from tests.launch.hosts import Hosts, running_hosts
from tests.launch.slurm import running_slurm
from tests.launch.test_hosts import DIGITS, lines_of
from tests.launching import ROOT, Finished, run, started, succeed, wait_for, wait_until
from tests.runs import run_json

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(400), pytest.mark.exhaustive]

HVDTRAIN = [sys.executable, "-m", "hvdtrain"]
BY_SRUN = [*"salloc -N 2 --ntasks-per-node 2".split(), *HVDTRAIN, "launch", "--rsh", "srun"]
WAITING = """
import os, socket, time
print("ready on", socket.gethostname(), "in", os.getcwd(), flush=True)
time.sleep(300)
"""


@dataclass
class OnA:
    """Two hosts with Slurm, and commands that run on a."""

    hosts: Hosts
    env: dict[str, str]

    def run(self, *line: object) -> Finished:
        return run(self.hosts.on("a", *line), env=self.env)

    def is_idle(self) -> bool:
        return not self.run("squeue", "--noheader", "--format=%T").output.strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[OnA]:
    addresses = {"a": "10.77.0.1", "b": "10.77.0.2"}
    with (
        running_hosts(2) as hosts,
        running_slurm(hosts.folder / "slurm", addresses, hosts.on) as env,
    ):
        yield OnA(hosts, env)


@pytest.fixture
def slurm(cluster: OnA) -> Iterator[OnA]:
    """A test that fails leaves no job."""
    yield cluster
    cluster.run("scancel", "--user", "root")
    wait_until(cluster.is_idle, "an empty queue", 120)


def params_sha256(finished: Finished) -> str:
    (found,) = re.findall(r"params_sha256 (\w+)", succeed(finished))
    return str(found)


def test_srun_trains_the_model_that_hvdrun_trains(slurm: OnA, tmp_path: Path) -> None:
    train = [*HVDTRAIN, *DIGITS, "--run-dir"]
    srun = "srun -N 2 -n 4 --kill-on-bad-exit=1".split()
    by_srun = slurm.run(*srun, *train, tmp_path / "srun")
    by_rsh = slurm.run(*BY_SRUN, *train, tmp_path / "rsh")
    assert params_sha256(by_srun) == params_sha256(by_rsh)
    for finished, launcher in ((by_srun, "srun"), (by_rsh, "hvdrun")):
        assert f"4 ranks on 2 hosts, started by {launcher}" in finished.output


@pytest.mark.parametrize(
    ("host", "victim", "said"),
    rows(r"""
    a | -m hvdtrain launch |
    a | srun --overlap     | error: .*srun to b
    b | print("ready on"   | error: rank [23] on b was killed by SIGKILL\n137$
    """),
)
def test_when_a_part_is_killed_nothing_stays_on_either_host(
    slurm: OnA, host: str, victim: str, said: str
) -> None:
    """hvdrun takes the hosts of an allocation and starts ranks by srun: with its own marks, exit
    codes and end.
    """
    hosts = slurm.hosts
    line = hosts.on("a", *BY_SRUN, sys.executable, "-c", WAITING)
    with started(line, env=slurm.env) as (job, log):
        wait_for(log, "ready", 4, seconds=120)
        for rank, name in enumerate("aabb"):
            assert f"[{rank}]<stdout>:ready on {name} in {ROOT}\n" in job.text
        # salloc's own command line has the launcher's in it; each srun is two processes.
        found = [p for p, line in hosts.processes(host).items() if victim in line]
        os.kill(min(found) if "srun" in victim else max(found), signal.SIGKILL)
        code = job.wait(90)

        def have_ended() -> bool:
            lines = [line for name in "ab" for line in hosts.processes(name).values()]
            return not any("hvdtrain" in line and "slurm" not in line for line in lines)

        wait_until(have_ended, "an end of all processes")
        first = "".join(lines_of(job.text, "error: ")[:1])
    assert re.match(said, f"{first}\n{code}"), (first, code)


def submit(slurm: OnA, folder: Path, *train: object) -> tuple[str, Path]:
    """Submit the script, and wait for a step of it; return the job and the file of its output."""
    options = ["--parsable", "--ntasks-per-node=1", "--cpus-per-task=1", "--chdir", folder]
    options += ["--output", folder / "log", "--open-mode=append"]
    script = [ROOT / "launchers" / "slurm.sbatch", *DIGITS, *train]
    job = succeed(slurm.run("sbatch", *options, *script)).strip()
    wait_until((folder / "log").exists, "the start of the job", 120)
    wait_for(folder / "log", "step ", seconds=120)
    return job, folder / "log"


def test_a_preempted_job_goes_on_in_its_second_start(slurm: OnA, tmp_path: Path) -> None:
    """The script: USR1, which Slurm sends before the time limit, a checkpoint, code 143, the queue,
    and the same parameters as without an interruption.
    """
    train = ["--epochs", 400, "--max-steps", 400, "--run-dir"]
    job, log = submit(slurm, tmp_path, *train, tmp_path / "run", "--resume", "auto")
    succeed(slurm.run("scancel", "--batch", "--signal=USR1", job))
    wait_for(log, "resume", seconds=120)
    wait_for(log, "done ", seconds=120)
    hvdrun = [*HVDTRAIN, "launch", "-H", "a,b", *HVDTRAIN, *DIGITS]
    whole = slurm.run(*hvdrun, *train, tmp_path / "whole")
    trained = run_json(tmp_path / "run")["params_sha256"][:12]
    assert params_sha256(whole) == trained, log.read_text()


def test_scancel_lets_the_ranks_save_and_queues_nothing_again(slurm: OnA, tmp_path: Path) -> None:
    train = ["--epochs", 4000, "--max-steps", 40000, "--run-dir", tmp_path / "run"]
    job, log = submit(slurm, tmp_path, *train)
    # The step on b gets the signal: its supervisor tells hvdrun, which stops all ranks.
    succeed(slurm.run("scancel", "--signal=TERM", job))
    wait_for(log, "error: ended by SIGTERM", seconds=120)
    assert "saved; exit code 143" in log.read_text()
    wait_until(slurm.is_idle, "an empty queue")
