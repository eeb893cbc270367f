"""The exit codes by launcher: each cell of the table in launchers/README.md is tried."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.forkserver import warm
from tests.launch.test_failure import failing, line
from tests.launching import ROOT, Started, started

# Slurm's srun, as its manual describes it: `--kill-on-bad-exit` ends the others when a task fails,
# and the largest code counts, 128 + number for a signal; a task that srun has ended does not count.
SRUN = """
import os, signal, subprocess, sys
common = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
          "SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
          "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost",
          "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
tasks = {}
for number in "01":
    env = {**os.environ, **common, "SLURM_PROCID": number, "SLURM_LOCALID": number}
    task = subprocess.Popen(sys.argv[1:], env=env, start_new_session=True)
    tasks[task.pid] = task
def forward(number, frame):
    for pid in tasks:
        os.kill(pid, number)
signal.signal(signal.SIGTERM, forward)
signal.signal(signal.SIGINT, forward)
worst, ended = 0, False
while tasks:
    pid, status = os.wait()
    del tasks[pid]
    code = os.waitstatus_to_exitcode(status)
    if not ended:
        worst = max(worst, code if code >= 0 else 128 - code)
    if code and not ended:
        ended = True
        forward(signal.SIGTERM, None)
sys.exit(worst)
"""
# How a job ends: where and how which rank of the task fails (-1: all), options of `hvdtrain`, and
# the signal that its launcher gets.
ENDS: dict[str, tuple[tuple[str, str, int], str, signal.Signals | None]] = {
    "done": (("nowhere", "train", -1), "--max-steps 2", None),
    "a bug": (("loop", "raise", 1), "", None),
    "bad input": (("nowhere", "train", -1), "--batch-size -1", None),
    "the loss is not finite": (("nowhere", "diverge", -1), "--log-every 1", None),
    "a peer is lost or late": (("loop", "wait", 1), "--timeout 5", None),
    "Ctrl-C": (("loop", "train", -1), "", signal.SIGINT),
    "SIGTERM": (("loop", "train", -1), "", signal.SIGTERM),
    "a rank is killed with -9": (("loop", "kill", 1), "", None),
}


def table() -> dict[tuple[str, str], str]:
    """Return the cells of the table, by launcher and by how the job ends."""
    text = (ROOT / "launchers" / "README.md").read_text()
    lines = text.partition("## Exit codes")[2].partition("\n## ")[0].splitlines()
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return {
        (launcher.strip("`"), cells[0]): cell
        for cells in rows
        for launcher, cell in zip(head[1:], cells[1:], strict=True)
    }


CELLS = table()


def test_the_table_has_every_end() -> None:
    assert [end for launcher, end in CELLS if launcher == "mpirun"] == list(ENDS)


def command(launcher: str, *arguments: object) -> list[str]:
    module = [sys.executable, "-m", "hvdtrain", *map(str, arguments)]
    if launcher == "hvdtrain":
        return warm(module)
    module += ["--backend", "ddp"]
    if launcher == "srun":
        return [sys.executable, "-c", SRUN, *warm(module)]
    if launcher == "hvdrun":  # its agent needs more file descriptors than a forked one gets
        return [*module[:3], "launch", "-np", "2", *warm(module)]
    return warm(line(launcher, 2, *module[1:]))


# One of each kind always: the launcher's own codes, the ranks', and those of signals.
SOME = [("hvdrun", "a rank is killed with -9"), ("hvdrun", "the loss is not finite")]
SOME += [("torchrun", "bad input"), ("mpirun", "SIGTERM"), ("horovodrun", "a peer is lost or late")]


@pytest.mark.parametrize(
    ("launcher", "end"),
    [
        pytest.param(*cell, marks=() if cell in SOME else pytest.mark.exhaustive)
        for cell, codes in CELLS.items()
        if codes[:1].isdigit()
    ],
)
def test_exit_code(launcher: str, end: str, tmp_path: Path) -> None:
    (where, how, rank), options, number = ENDS[end]
    rank = 0 if launcher == "hvdtrain" else rank
    arguments = [*failing(tmp_path, where, how, rank), "--epochs", 1000, *options.split()]
    env = {"OMPI_MCA_odls_base_sigkill_timeout": "5"}  # from SIGTERM to SIGKILL
    with started(command(launcher, *arguments), env=env) as (process, log):
        if number is not None:
            send(process, number, tmp_path / "mark", log)
        code = process.wait(60)
        output = log.read_text(errors="replace")
    allowed = [int(text) for text in re.findall(r"\d+", CELLS[launcher, end])]
    assert (code if code >= 0 else 128 - code) in allowed, output


def send(process: Started, number: signal.Signals, mark: Path, log: Path) -> None:
    """Send a signal once the ranks train: Ctrl-C to the process group, as a terminal does."""
    deadline = time.monotonic() + 90
    while not mark.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
