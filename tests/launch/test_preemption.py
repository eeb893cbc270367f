"""Preemption under real launchers: a checkpoint, an exit code, one line, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdtrain.training import checkpoint
from tests.environments import EXHAUSTIVE, rows
from tests.forkserver import warm
from tests.launch.test_failure import settings, train
from tests.launching import Finished, members, run, started, wait_until
from tests.runs import newest, run_json


def preempt(
    command: Sequence[str], tmp_path: Path, n: int, number: signal.Signals, whom: str
) -> Finished:
    """Send a signal to a rank, the `launcher` or the `group`; return how the job ended."""
    # mpirun passes SIGTERM on after a second and kills the ranks after another, which a busy
    # machine may take itself.
    with started(command, env={"OMPI_MCA_odls_base_sigkill_timeout": "4"}) as (process, log):
        mark = tmp_path / "mark"  # in which each rank writes its process, in its fourth step
        process.wait_until(
            lambda: mark.exists() and mark.read_text().count("\n") == n, "three steps of each rank"
        )
        if whom == "group":
            os.killpg(process.pid, number)
        elif whom == "launcher":
            process.send_signal(number)
        else:
            pids = dict(line.split() for line in mark.read_text().splitlines())
            os.kill(int(pids[whom]), number)
        code = process.wait(60)
        wait_until(lambda: not members(process.marker), "the end of all processes", log=log)
        return Finished(code, process.text)


def check_saved(tmp_path: Path, finished: Finished) -> None:
    output, about = finished.output, run_json(tmp_path / "run")
    assert about["outcome"] == "preempted", output
    (only,) = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoint.problem(only) is None
    assert only.name == f"step-{about['last_step']:08d}"
    (line,) = finished.lines("stopped  ")
    assert f"at step {about['last_step']} of " in line
    assert "exits with code" not in output, output
    assert "failed:" not in output, output
    errors = finished.lines("error: ")
    assert all("has ended, so this rank ends too" in line for line in errors), output


# The launcher, the backend, the signal, who receives it, options of the run, and the exit codes.
# A horovodrun that ends its ranks can lose their exit codes, and then ends with 0: two threads wait
# for each rank, and Popen.wait returns 0 where psutil has taken the status before it
# (safe_shell_exec.py: _exec_middleman, terminate_executor_shell_and_children).
# mpirun ends with 1 if it sees its own end first, and else with its first rank's code.
PREEMPTED = """
torchrun ddp TERM launcher           | 1
mpirun compat USR1 launcher          | 143   | rest
horovodrun horovod TERM launcher     | 1 0   | rest
torchrun ddp USR2 1                  | 1     | rest
torchrun compat INT group            | 1  # as a terminal sends Ctrl-C
horovodrun ddp INT group             | 1 0   | rest
hvdrun ddp INT group                 | 130   | rest
torchrun ddp USR1 launcher           | -10   | rest
mpirun ddp TERM launcher             | 1 143 | rest
horovodrun-mpi horovod TERM launcher | -15   | rest
# Rank 0 is ended, too, as by a launcher that ends: each notices that within a second.
mpirun ddp TERM 1 --set terminated_in=record | 143 | rest
mpirun ddp TERM 1 --set terminated_in=close  | 143 | rest
# As batch systems and terminals send it: the loaders must not be the first to end.
none single TERM group --workers 2   | 143   | rest
"""


@pytest.mark.parametrize(("row", "codes"), rows(PREEMPTED))
def test_under_a_launcher(row: str, codes: str, tmp_path: Path) -> None:
    launcher, backend, number, whom, *options = row.split()
    n = 1 if launcher == "none" else 2
    options += "--set samples=1048576 --checkpoint-every 1000000".split()
    command = train(launcher, n, backend, *settings(tmp_path, "loop", "train", -1), *options)
    if codes[0] != "-" and n == 2:  # else what receives the signal ends by itself, and is not warm
        command = warm(command)
    finished = preempt(command, tmp_path, n, signal.Signals[f"SIG{number}"], whom)
    assert str(finished.code) in codes.split(), finished.output
    check_saved(tmp_path, finished)
    (said,) = finished.lines("signal   ")
    assert re.search(rf"SIG({number}|TERM) at rank \d: the run saves and ends, within 30 s", said)


@EXHAUSTIVE
def test_an_error_is_recorded_while_the_launcher_stops_the_rank(tmp_path: Path) -> None:
    fault = [*settings(tmp_path, "loop", "raise", -1), "--set", "terminated_in=record"]
    finished = run(warm(train("torchrun", 2, "ddp", *fault)))
    assert finished.code == 1, finished.output
    about = run_json(tmp_path / "run")
    assert (about["outcome"], about["error"]) == ("failed", "ArithmeticError: as told")


def test_no_checkpoint_within_the_grace_period(tmp_path: Path) -> None:
    options = [*settings(tmp_path, "loop", "wait", 0), "--grace", "1s", "--checkpoint-every", 1]
    with started(warm(train("none", 1, "single", *options))) as (process, _):
        process.wait_until((tmp_path / "mark").exists, "the file mark")
        process.send_signal(signal.SIGUSR1)
        finished = Finished(143, process.ends(143))
    (line,) = finished.lines("error: ")
    assert line == (
        "error: SIGUSR1 at rank 0, and no checkpoint within 1 s (--grace); --resume auto goes on "
        "from the one before"
    )
    assert newest(tmp_path / "run").name == "step-00000003"
