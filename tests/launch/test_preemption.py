"""Preemption under real launchers: a checkpoint, an exit code, one line, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdtrain.training import checkpoint
from tests.forkserver import warm
from tests.launch.test_failure import EXHAUSTIVE, train
from tests.launching import Started, members, started, wait_for, wait_until
from tests.runs import run_json

TERM, INT, USR1, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
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
    command: Sequence[str], tmp_path: Path, n: int, number: signal.Signals, whom: str | int
) -> tuple[int, str]:
    """Send a signal to a rank, the `launcher` or the `group`; return the exit code and output."""
    # mpirun passes SIGTERM on after a second and kills the ranks after another, which a busy
    # machine may take itself.
    with started(command, env={"OMPI_MCA_odls_base_sigkill_timeout": "4"}) as (process, log):
        wait_for_steps(tmp_path, n, process, log)
        if whom == "group":
            os.killpg(process.pid, number)
        elif whom == "launcher":
            process.send_signal(number)
        else:
            os.kill(int((tmp_path / f"rank-{whom}").read_text()), number)
        code = process.wait(60)
        wait_until(lambda: not members(process.marker), "the end of all processes", log=log)
        return code, log.read_text()


def wait_for_steps(folder: Path, n: int, process: Started, log: Path) -> None:
    """Wait until each of `n` ranks has taken two steps."""

    def all_have() -> bool:
        assert process.poll() is None, log.read_text()
        return all((folder / f"rank-{rank}").exists() for rank in range(n))

    wait_until(all_have, "the third step of each rank", 90, log)


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
    ("launcher", "backend", "number", "whom", "codes"),
    [
        ("torchrun", "ddp", TERM, "launcher", [1]),
        pytest.param("mpirun", "compat", USR1, "launcher", [143], marks=EXHAUSTIVE),
        pytest.param("horovodrun", "horovod", TERM, "launcher", BY_HOROVODRUN, marks=EXHAUSTIVE),
        pytest.param("torchrun", "ddp", USR2, 1, [1], marks=EXHAUSTIVE),
        ("torchrun", "compat", INT, "group", [1]),  # as a terminal sends Ctrl-C
        pytest.param("horovodrun", "ddp", INT, "group", BY_HOROVODRUN, marks=EXHAUSTIVE),
        pytest.param("hvdrun", "ddp", INT, "group", [130], marks=EXHAUSTIVE),
        pytest.param("torchrun", "ddp", USR1, "launcher", [-10], marks=EXHAUSTIVE),
        pytest.param("mpirun", "ddp", TERM, "launcher", BY_MPIRUN, marks=EXHAUSTIVE),
        pytest.param("horovodrun-mpi", "horovod", TERM, "launcher", [-15], marks=EXHAUSTIVE),
    ],
)
def test_under_a_launcher(
    tmp_path: Path,
    launcher: str,
    backend: str,
    number: signal.Signals,
    whom: str | int,
    codes: list[int],
) -> None:
    command = train(launcher, 2, *backend.split(), *told(tmp_path))
    if codes[0] >= 0:  # else the launcher ends by itself: a warm rank is no child of it
        command = warm(command)
    code, output = preempt(command, tmp_path, 2, number, whom)
    assert code in codes, output
    check_saved(tmp_path, output)


@pytest.mark.parametrize("where", ["record", pytest.param("close", marks=EXHAUSTIVE)])
def test_a_rank_that_ends_is_told_too(where: str, tmp_path: Path) -> None:
    """As by a launcher that ends: each rank notices that within a second, by itself."""
    more = ["--set", f"terminated_in={where}"]
    command = train("mpirun", 2, "ddp", *told(tmp_path, *more))
    code, output = preempt(warm(command), tmp_path, 2, TERM, 1)
    assert code == 143, output
    check_saved(tmp_path, output)


@EXHAUSTIVE
def test_an_error_is_recorded_while_the_launcher_stops_the_rank(tmp_path: Path) -> None:
    fault = ["--set", "fails_at=2", "--set", "terminated_in=record"]
    with started(warm(train("torchrun", 2, "ddp", *told(tmp_path, *fault)))) as (process, log):
        assert process.wait(90) == 1, log.read_text()
    about = run_json(tmp_path / "run")
    assert (about["outcome"], about["error"]) == ("failed", "ArithmeticError: as asked")


@EXHAUSTIVE
def test_a_signal_to_a_process_and_its_loaders(tmp_path: Path) -> None:
    """As batch systems and terminals send it: the loader processes must not be the first to end."""
    command = [sys.executable, "-m", "hvdtrain", *told(tmp_path, "--workers", 2)]
    code, output = preempt(command, tmp_path, 1, TERM, "group")
    assert code == 143, output
    check_saved(tmp_path, output)
    assert "signal   SIGTERM at rank 0: the run saves and ends, within 30 s" in output


def test_no_checkpoint_within_the_grace_period(tmp_path: Path) -> None:
    more = ["--set", "hangs=0", "--grace", "1s"]
    arguments = told(tmp_path, *more, "--checkpoint-every", 1)
    command = [sys.executable, "-m", "hvdtrain", *arguments]
    code, output = preempt(warm(command), tmp_path, 1, USR1, 0)
    assert code == 143, output
    (line,) = (line for line in output.splitlines() if "error: " in line)
    assert line == (
        "error: SIGUSR1 at rank 0, and no checkpoint within 1 s (--grace); --resume auto goes on "
        "from the one before"
    )
    newest, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000003"


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    command = warm([sys.executable, "-m", "hvdtrain", *told(tmp_path, "--set", "hangs=0")])
    with started(command) as (process, log):
        wait_for_steps(tmp_path, 1, process, log)
        deadline = time.monotonic() + 90
        process.send_signal(INT)
        wait_for(log, "signal   ")
        signals = 1
        while process.poll() is None:  # those of the first seconds count as one
            assert time.monotonic() < deadline, log.read_text()
            process.send_signal(INT)
            signals += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        assert process.returncode == 130, log.read_text()
        assert signals > 1, log.read_text()
    assert run_json(tmp_path / "run")["outcome"] == "interrupted"
