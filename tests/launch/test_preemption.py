"""Preemption under real launchers: a checkpoint, an exit code, one line, nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdtrain.training import checkpoint
from tests.environments import EXHAUSTIVE, rest
from tests.forkserver import warm
from tests.launch.test_failure import train
from tests.launching import members, started, wait_until
from tests.runs import newest, run_json

HVDTRAIN = [sys.executable, "-m", "hvdtrain"]
TASK = f"{Path(__file__).with_name('preempted.py')}:Told"


def told(tmp_path: Path, *more: object) -> list[str]:
    settings = ["--task", TASK, "--set", f"folder={tmp_path}", "--run-dir", tmp_path / "run"]
    return [*map(str, settings), "--threads", "1", "--checkpoint-every", "1000000", *map(str, more)]


# A horovodrun that ends its ranks can lose their exit codes, and then ends with 0: two threads wait
# for each rank, and Popen.wait returns 0 where psutil has taken the status before it
# (safe_shell_exec.py: _exec_middleman, terminate_executor_shell_and_children).
BY_HOROVODRUN = [1, 0]
# mpirun ends with 1 if it sees its own end first, and else with its first rank's code.
BY_MPIRUN = [1, 143]


def preempt(
    command: Sequence[str], tmp_path: Path, n: int, number: signal.Signals, whom: str
) -> tuple[int, str]:
    """Send a signal to a rank, the `launcher` or the `group`; return the exit code and output."""
    # mpirun passes SIGTERM on after a second and kills the ranks after another, which a busy
    # machine may take itself.
    with started(command, env={"OMPI_MCA_odls_base_sigkill_timeout": "4"}) as (process, log):
        # Each writes its file in its third step.
        process.wait_until(lambda: len([*tmp_path.glob("rank-*")]) == n, "two steps of each rank")
        if whom == "group":
            os.killpg(process.pid, number)
        elif whom == "launcher":
            process.send_signal(number)
        else:
            os.kill(int((tmp_path / f"rank-{whom}").read_text()), number)
        code = process.wait(60)
        wait_until(lambda: not members(process.marker), "the end of all processes", log=log)
        return code, process.text


def check_saved(tmp_path: Path, output: str) -> None:
    about = run_json(tmp_path / "run")
    assert about["outcome"] == "preempted", output
    (only,) = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoint.problem(only) is None
    assert only.name == f"step-{about['last_step']:08d}"
    (line,) = (line for line in output.splitlines() if "stopped  " in line)
    assert f"at step {about['last_step']} of " in line
    assert "exits with code" not in output, output
    assert "failed:" not in output, output
    errors = [line for line in output.splitlines() if "error: " in line]
    assert all("has ended, so this rank ends too" in line for line in errors), output


@pytest.mark.parametrize(
    ("row", "codes"),
    [
        ("torchrun ddp TERM launcher", [1]),
        rest("mpirun compat USR1 launcher", [143]),
        rest("horovodrun horovod TERM launcher", BY_HOROVODRUN),
        rest("torchrun ddp USR2 1", [1]),
        ("torchrun compat INT group", [1]),  # as a terminal sends Ctrl-C
        rest("horovodrun ddp INT group", BY_HOROVODRUN),
        rest("hvdrun ddp INT group", [130]),
        rest("torchrun ddp USR1 launcher", [-10]),
        rest("mpirun ddp TERM launcher", BY_MPIRUN),
        rest("horovodrun-mpi horovod TERM launcher", [-15]),
        # Rank 0 is ended, too, as by a launcher that ends: each notices that within a second.
        ("mpirun ddp TERM 1 terminated_in=record", [143]),
        rest("mpirun ddp TERM 1 terminated_in=close", [143]),
    ],
)
def test_under_a_launcher(row: str, codes: list[int], tmp_path: Path) -> None:
    """A row: the launcher, the backend, the signal, who receives it, and settings of the task."""
    launcher, backend, number, whom, *settings = row.split()
    sets = [word for setting in settings for word in ("--set", setting)]
    command = train(launcher, 2, backend, *told(tmp_path, *sets))
    if codes[0] >= 0:  # else the launcher ends by itself: a warm rank is no child of it
        command = warm(command)
    code, output = preempt(command, tmp_path, 2, signal.Signals[f"SIG{number}"], whom)
    assert code in codes, output
    check_saved(tmp_path, output)


@EXHAUSTIVE
def test_an_error_is_recorded_while_the_launcher_stops_the_rank(tmp_path: Path) -> None:
    fault = ["--set", "fails_at=2", "--set", "terminated_in=record"]
    with started(warm(train("torchrun", 2, "ddp", *told(tmp_path, *fault)))) as (process, _):
        process.ends(1, 90)
    about = run_json(tmp_path / "run")
    assert (about["outcome"], about["error"]) == ("failed", "ArithmeticError: as asked")


@EXHAUSTIVE
def test_a_signal_to_a_process_and_its_loaders(tmp_path: Path) -> None:
    """As batch systems and terminals send it: the loader processes must not be the first to end."""
    command = [*HVDTRAIN, *told(tmp_path, "--workers", 2)]
    code, output = preempt(command, tmp_path, 1, signal.SIGTERM, "group")
    assert code == 143, output
    check_saved(tmp_path, output)
    assert "signal   SIGTERM at rank 0: the run saves and ends, within 30 s" in output


def test_no_checkpoint_within_the_grace_period(tmp_path: Path) -> None:
    arguments = told(tmp_path, "--set", "hangs=0", "--grace", "1s", "--checkpoint-every", 1)
    command = [*HVDTRAIN, *arguments]
    code, output = preempt(warm(command), tmp_path, 1, signal.SIGUSR1, "0")
    assert code == 143, output
    (line,) = (line for line in output.splitlines() if "error: " in line)
    assert line == (
        "error: SIGUSR1 at rank 0, and no checkpoint within 1 s (--grace); --resume auto goes on "
        "from the one before"
    )
    assert newest(tmp_path / "run").name == "step-00000003"
