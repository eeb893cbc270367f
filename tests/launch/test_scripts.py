"""The launcher scripts: what they would run. test_parity.py runs them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.launching import ROOT, run

SCRIPTS = ROOT / "launchers"
RUNNABLE = ("torchrun", "horovodrun", "mpirun")


def dry_run(name: str, *arguments: str, **env: str) -> list[str]:
    """The command that the script prints, as words."""
    done = run(["bash", SCRIPTS / name, *arguments], env={"DRY_RUN": "1", **env})
    assert done.code == 0, done.output
    (line,) = done.output.splitlines()
    return shlex.split(line)


def test_torchrun_prints_its_command() -> None:
    assert dry_run("torchrun.sh", "--epochs", "2") == [
        *("torchrun", "--standalone", "--nproc-per-node", "1"),
        *("-m", "hvdtrain", "--epochs", "2"),
    ]
    several = {"NP": "8", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0"}
    assert dry_run("torchrun.sh", **several) == [
        *("torchrun", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", "host0", "--master-port", "29500"),
        *("--nproc-per-node", "8", "-m", "hvdtrain"),
    ]


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_torchrun_asks_for_what_several_hosts_need(missing: str) -> None:
    env = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "host0", "DRY_RUN": "1"}
    del env[missing]
    done = run(["bash", SCRIPTS / "torchrun.sh"], env=env)
    assert done.code != 0
    assert missing in done.output


def test_horovodrun_prints_its_command() -> None:
    assert dry_run("horovodrun.sh", "--epochs", "2", NP="2") == [
        *("horovodrun", "-np", "2", "hvdtrain", "--epochs", "2")
    ]
    assert dry_run("horovodrun.sh", NP="4", HOSTS="host0:2,host1:2") == [
        *("horovodrun", "-np", "4", "-H", "host0:2,host1:2", "hvdtrain")
    ]


def test_mpirun_prints_its_command() -> None:
    assert dry_run("mpirun.sh", "--epochs", "2", NP="2") == [
        *("mpirun", "-np", "2", "--bind-to", "none", "hvdtrain", "--epochs", "2")
    ]
    hosts = {"NP": "4", "HOSTS": "host0:2,host1:2"}
    variables = {"LD_LIBRARY_PATH": "", "PYTHONPATH": "/src", "HVDTRAIN_EPOCHS": "1"}
    variables |= {"HOROVOD_CYCLE_TIME": "2", "OMP_NUM_THREADS": "1"}
    command = dry_run("mpirun.sh", **hosts, **variables)
    assert command[:7] == ["mpirun", "-np", "4", "--bind-to", "none", "-H", "host0:2,host1:2"]
    assert command[-1] == "hvdtrain"
    passed = dict(zip(command[8:-1:2], command[7:-1:2], strict=True))
    assert {"PATH", "PYTHONPATH", *list(variables)[2:]} <= passed.keys()
    assert "LD_LIBRARY_PATH" not in passed, "mpirun complains of an empty one"
    assert set(passed.values()) == {"-x"}


def test_slurm_prints_its_command() -> None:
    assert run(["bash", "-n", SCRIPTS / "slurm.sbatch"]).code == 0
    srun = ["srun", "--cpus-per-task", "4", "--kill-on-bad-exit=1", "hvdtrain"]
    command = dry_run("slurm.sbatch", "--epochs", "2", SLURM_CPUS_PER_TASK="4")
    assert command == [*srun, "--epochs", "2"]


@pytest.mark.parametrize(("code", "requeues"), [(0, False), (1, False), (143, True)])
def test_slurm_queues_a_preempted_job_again(code: int, requeues: bool, tmp_path: Path) -> None:
    for name, does in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" > {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    assert run(["bash", SCRIPTS / "slurm.sbatch"], env=env).code == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == "requeue 17\n" * requeues


def test_slurm_reads_its_options_from_the_head() -> None:
    """sbatch stops looking at the first line that is neither empty nor a comment."""
    lines = (SCRIPTS / "slurm.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options
    assert max(options) < first_command


SCHEDULED = {"pbs": "PBS", "lsf": "BSUB", "flux": "flux:"}


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_scheduler_reads_its_options_from_the_head(name: str) -> None:
    script = SCRIPTS / f"{name}.sh"
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith(f"#{SCHEDULED[name]}")]
    assert len(options) >= 3
    assert max(options) < first_command
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    "name", [*(f"{name}.sh" for name in (*RUNNABLE, *SCHEDULED)), "slurm.sbatch"]
)
def test_arguments_reach_hvdtrain_unchanged(name: str) -> None:
    odd = ["--set", "name=two words", "--run-dir", "it's $HOME; *", "--config", ""]
    assert dry_run(name, *odd)[-len(odd) :] == odd


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) for name in RUNNABLE]
)
def test_a_failure_is_the_exit_code_of_the_script(name: str, tmp_path: Path) -> None:
    script = SCRIPTS / f"{name}.sh"
    bad = ["--task", "mlp", "--set", "width=0", "--run-dir", str(tmp_path / "run")]
    done = run([script, *bad], env={"NP": "2"}, timeout=100)
    # mpirun hands on the exit code of a rank, torchrun never, horovodrun where it uses mpirun.
    codes = {"torchrun": {1}, "horovodrun": {1, 2}, "mpirun": {2}}
    assert done.code in codes[name], done.output
    assert "width=0 must be a whole number greater than zero" in done.output
