"""Real Slurm on two hosts: srun, `hvdrun --rsh srun` in an allocation, and the sbatch script."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.hosts import Hosts, running_hosts
from tests.launch.slurm import Slurm, running_slurm
from tests.launching import ROOT, run, started, wait_for, wait_until

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(400), pytest.mark.exhaustive]

HVDTRAIN = [sys.executable, "-m", "hvdtrain"]
DIGITS = "--seed 1 --max-steps 10 --global-batch-size 64 --transport gloo --threads 1".split()
PLACES = "import os, socket; print('at', socket.gethostname(), os.environ['RANK'], os.getcwd())"
WAITING = "import time; print('ready', flush=True); time.sleep(300)"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """a and b."""
    with running_hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[Slurm]:
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(hosts.sshd, start=1)}
    with running_slurm(hosts.folder / "slurm", addresses, hosts.on) as slurm:
        yield slurm


@pytest.fixture
def slurm(hosts: Hosts, cluster: Slurm) -> Iterator[Slurm]:
    """Their cluster; commands of the tests run on a. A test that fails leaves no job."""
    yield cluster
    run(hosts.on("a", "scancel", "--user", "root"), env=cluster.env)
    ask = hosts.on("a", "squeue", "--noheader", "--format=%T")
    wait_until(lambda: not run(ask, env=cluster.env).output.strip(), "an empty queue", 120)


def params_sha256(output: str) -> str:
    (found,) = re.findall(r"params_sha256 (\w+)", output)
    return str(found)


def test_srun_trains_the_model_that_hvdrun_trains(
    hosts: Hosts, slurm: Slurm, tmp_path: Path
) -> None:
    train = [*HVDTRAIN, *DIGITS, "--run-dir"]
    by_srun = run(
        hosts.on("a", "srun", "-N", 2, "-n", 4, "--kill-on-bad-exit=1", *train, tmp_path / "srun"),
        env=slurm.env,
        timeout=120,
    )
    assert by_srun.code == 0, by_srun.output + slurm.logs()
    assert "4 ranks on 2 hosts, started by srun" in by_srun.output
    hvdrun = [*HVDTRAIN, "launch", "-H", "a:2,b:2", "--rsh"]
    alone = run(hosts.on("a", *hvdrun, "ssh", *train, tmp_path / "ssh"), timeout=120)
    assert alone.code == 0, alone.output
    allocated = hosts.on("a", "salloc", "-N", 2, "-n", 4, *hvdrun, "srun", *train, tmp_path / "rsh")
    by_rsh = run(allocated, env=slurm.env, timeout=120)
    assert by_rsh.code == 0, by_rsh.output + slurm.logs()
    assert "4 ranks on 2 hosts, started by hvdrun" in by_rsh.output
    assert len({params_sha256(done.output) for done in (by_srun, alone, by_rsh)}) == 1


def test_hvdrun_takes_the_hosts_of_an_allocation_and_starts_ranks_by_srun(
    hosts: Hosts, slurm: Slurm
) -> None:
    """Without ssh: with its own marks, exit codes and end."""
    line = ["salloc", "-N", 2, "--ntasks-per-node", 2, *HVDTRAIN, "launch", "--rsh", "srun"]
    done = run(hosts.on("a", *line, sys.executable, "-c", PLACES), env=slurm.env, timeout=120)
    assert done.code == 0, done.output + slurm.logs()
    for rank, name in enumerate("aabb"):
        assert f"[{rank}]<stdout>:at {name} {rank} {ROOT}\n" in done.output
    code = "import os, sys; sys.exit(3 * (os.environ['RANK'] == '3'))"
    done = run(hosts.on("a", *line, sys.executable, "-c", code), env=slurm.env)
    assert done.code == 3, done.output
    assert "\nerror: rank 3 on b exited with code 3\n" in done.output


@pytest.mark.parametrize("victim", ["launcher", "srun", "rank"])
def test_when_a_part_is_killed_nothing_stays_on_either_host(
    hosts: Hosts, slurm: Slurm, victim: str
) -> None:
    line = ["salloc", "-N", 2, "--ntasks-per-node", 2, *HVDTRAIN, "launch", "--rsh", "srun"]
    with started(hosts.on("a", *line, sys.executable, "-c", WAITING), env=slurm.env) as (job, log):
        wait_for(log, "ready", 4, seconds=120)
        text = {"launcher": "-m hvdtrain launch", "srun": "srun --overlap"}
        if victim == "rank":
            own = [p for p, line in hosts.processes("b").items() if "print('ready'" in line]
            os.kill(max(own), signal.SIGKILL)
        else:
            # salloc's own command line has the launcher's in it.
            found = [p for p, line in hosts.processes("a").items() if text[victim] in line]
            os.kill(max(found) if victim == "launcher" else min(found), signal.SIGKILL)
        code = job.wait(90)

        def left() -> list[str]:
            lines = [line for name in "ab" for line in hosts.processes(name).values()]
            return [line for line in lines if "hvdtrain" in line and "slurm" not in line]

        wait_until(lambda: not left(), "an end of all processes")
        output = log.read_text()
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    if victim == "rank":
        assert code == 137, output
        assert re.fullmatch(r"error: rank [23] on b was killed by SIGKILL", said[0]), output
    elif victim == "srun":
        assert said, output
        assert "srun to b" in said[0], output


def test_a_preempted_job_goes_on_in_its_second_start(
    hosts: Hosts, slurm: Slurm, tmp_path: Path
) -> None:
    """The script: USR1, which Slurm sends before the time limit, a checkpoint, code 143, the queue,
    and the same parameters as without an interruption.
    """
    train = [*DIGITS, "--epochs", 400, "--max-steps", 400, "--run-dir"]
    script = [ROOT / "launchers" / "slurm.sbatch", *train, tmp_path / "run", "--resume", "auto"]
    options = ["--parsable", "--ntasks-per-node=1", "--cpus-per-task=1", "--chdir", tmp_path]
    options += ["--output", tmp_path / "log", "--open-mode=append"]
    asked = run(hosts.on("a", "sbatch", *options, *script), env=slurm.env)
    assert asked.code == 0, asked.output
    job, log = asked.output.strip(), tmp_path / "log"
    wait_until(log.exists, "the start of the job", 120)
    wait_for(log, "step ", seconds=120)
    assert run(hosts.on("a", "scancel", "--batch", "--signal=USR1", job), env=slurm.env).code == 0
    wait_for(log, "resume", seconds=120)
    wait_for(log, "done ", seconds=120)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    hvdrun = [*HVDTRAIN, "launch", "-H", "a,b", *HVDTRAIN]
    whole = run(hosts.on("a", *hvdrun, *train, tmp_path / "whole"), timeout=120)
    assert whole.code == 0, whole.output
    assert params_sha256(whole.output) == facts["params_sha256"][:12], log.read_text()


def test_scancel_lets_the_ranks_save_and_queues_nothing_again(
    hosts: Hosts, slurm: Slurm, tmp_path: Path
) -> None:
    train = [*DIGITS, "--epochs", 4000, "--max-steps", 40000, "--run-dir", tmp_path / "run"]
    options = ["--parsable", "--ntasks-per-node=1", "--cpus-per-task=1", "--chdir", tmp_path]
    script = [ROOT / "launchers" / "slurm.sbatch", *train]
    asked = run(
        hosts.on("a", "sbatch", *options, "--output", tmp_path / "log", *script), env=slurm.env
    )
    job, log = asked.output.strip(), tmp_path / "log"
    wait_until(log.exists, "the start of the job", 120)
    wait_for(log, "step ", seconds=120)
    # The step on b gets the signal: its supervisor tells hvdrun, which stops all ranks.
    assert run(hosts.on("a", "scancel", "--signal=TERM", job), env=slurm.env).code == 0
    wait_for(log, "error: ended by SIGTERM", seconds=120)
    assert "saved; exit code 143" in log.read_text()
    ask = hosts.on("a", "squeue", "--noheader", "--format=%T")
    wait_until(lambda: not run(ask, env=slurm.env).output.strip(), "an empty queue")
