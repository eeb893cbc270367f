"""The death of a rank under a launcher: the exit code of the job, and one report, which names it.

Each cell of the table in docs/files.md is tried, by launcher and by what ends the job. The
layers are a training of the Trainer, and a loop of the user's own on a backend.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import pytest

from tests.environments import rest, rows
from tests.forkserver import warm
from tests.launch import failing
from tests.launch.slurm import running_slurm
from tests.launch.test_failure import (
    FAILING,
    check_ended,
    line,
    line_in,
    settings,
    traces,
)
from tests.launching import ROOT, members, started, wait_for

INPUT, LOST, CTRL_C, TERM = "bad input", "a peer is lost or late", "Ctrl-C", "SIGTERM"


@dataclass(frozen=True)
class Row:
    """A launcher, and the end of the table in the manual that it must come to.

    `how` and `where` the rank fails (-1: all), as failing.py has them; "exit" is with code 3.
    """

    launcher: str
    end: str
    how: str
    where: str
    victim: int
    n: int
    layer: str
    """`training`, or `backend`: a loop of one's own on it."""
    backend: str
    transport: str
    options: str = ""
    always: str = ""


def cells() -> dict[tuple[str, str], list[int]]:
    """Return the exit codes of the table in the manual, by launcher and by what ends the job."""
    text = (ROOT / "docs" / "files.md").read_text()
    lines = text.partition("## Exit codes")[2].partition("\n## ")[0].splitlines()
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return {
        (launcher.strip("`"), cells[0]): [int(text) for text in re.findall(r"\d+", cell)]
        for cells in rows
        for launcher, cell in zip(head[1:], cells[1:], strict=True)
        if cell
    }


CELLS = cells()
# The fields of each Row: every launcher, backend, fault, place and victim meets the others once.
CHOSEN = """
torchrun   | a bug                  | raise   | loop  | 1  | 2 | training | compat  | auto || always
torchrun   | bad input              | refuse  | loop  | 1  | 2 | training | ddp     | auto
torchrun   | a rank is killed with -9 | kill  | loop  | 0  | 2 | training | compat  | auto
torchrun   | a peer is lost or late | wait    | loop  | 1  | 2 | backend  | ddp     | gloo || always
torchrun   | a peer is lost or late | other   | loop  | 1  | 2 | backend  | ddp     | gloo
torchrun   | a peer is lost or late | stop    | loop  | 0  | 2 | training | compat  | auto
torchrun   | a peer is lost or late | stop    | loop  | 1  | 2 | backend  | ddp     | shm
mpirun     | a bug                  | raise   | loop  | 2  | 3 | backend  | horovod | auto
mpirun     | bad input              | refuse  | loop  | 1  | 2 | training | compat  | auto
mpirun     | the loss is not finite | exit    | model | 0  | 2 | training | horovod | auto
mpirun     | the loss is not finite | _exit   | loop  | 0  | 2 | backend  | ddp     | auto
mpirun     | a peer is lost or late | stop    | loop  | 1  | 2 | backend  | compat  | mpi
mpirun     | a peer is lost or late | wait    | loop  | 0  | 2 | training | horovod | auto
horovodrun | a bug                  | raise   | loop  | 1  | 2 | training | horovod | auto
horovodrun | the loss is not finite | exit    | model | 0  | 2 | training | horovod | auto || always
horovodrun | a peer is lost or late | wait    | loop  | 1  | 2 | training | compat  | gloo
hvdrun     | a bug                  | raise   | model | -1 | 2 | training | compat  | auto
hvdrun     | a rank is killed with -9 | kill  | loop  | 1  | 2 | training | ddp     | auto || always
srun       | a bug                  | raise   | loop  | 0  | 2 | training | compat  | auto
"""
# Of the launchers that have no row above for it
DEFAULTS = """
 | done                     | train   | loop | -1 | 2 | training | ddp | auto | --max-steps 2
 | a bug                    | raise   | loop | 1  | 2 | training | ddp | auto
 | bad input                | train   | loop | -1 | 2 | training | ddp | auto | --batch-size -1
 | the loss is not finite   | diverge | loop | -1 | 2 | training | ddp | auto | --log-every 1
 | a peer is lost or late   | wait    | loop | 1  | 2 | training | ddp | auto
 | Ctrl-C                   | train   | loop | -1 | 2 | training | ddp | auto
 | SIGTERM                  | train   | loop | -1 | 2 | training | ddp | auto
 | a rank is killed with -9 | kill    | loop | 1  | 2 | training | ddp | auto
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Slurm on this machine."""
    with running_slurm(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def ends_of(text: str) -> list[Row]:
    """Return the rows of a table."""
    found = []
    for cells in rows(text):
        launcher, end, how, where, victim, n, *more = map(str, cells.values)
        found.append(Row(launcher, end, how, where, int(victim), int(n), *more))
    return found


def every_end() -> list[Row]:
    """Return the chosen rows, and a default one for each cell that none of them is in."""
    made = ends_of(CHOSEN)
    defaults = {row.end: row for row in ends_of(DEFAULTS)}
    for launcher, end in sorted(CELLS.keys() - {(row.launcher, row.end) for row in made}):
        row = replace(defaults[end], launcher=launcher)
        alone = replace(row, victim=min(row.victim, 0), n=1)
        made.append(alone if launcher == "hvdtrain" else row)
    return made


def test_the_manual_has_every_end() -> None:
    ends = [end for launcher, end in CELLS if launcher == "mpirun"]
    assert ends == [row.end for row in ends_of(DEFAULTS)]


def id_of(row: Row) -> str:
    return "-".join(map(str, astuple(row)))


@pytest.mark.parametrize(
    "row", [row if row.always else rest(row) for row in every_end()], ids=id_of
)
def test_a_rank_ends_the_job(row: Row, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    env = {"OMPI_MCA_odls_base_sigkill_timeout": "5"}  # from SIGTERM to SIGKILL
    if row.launcher == "srun":
        env = request.getfixturevalue("slurm")
    mark = tmp_path / "mark"
    with started(command(row, tmp_path), env=env) as (process, log):
        if row.end in (CTRL_C, TERM):
            process.wait_until(mark.exists, "the file mark")
            if row.end == TERM:
                process.send_signal(signal.SIGTERM)
            else:  # to the process group, as a terminal does
                os.killpg(process.pid, signal.SIGINT)
        if row.how == "stop":  # until another has reported it, for torchrun waits for it
            wait_for(log, "has not run for", seconds=90)
            for pid in members(process.marker):
                os.kill(pid, signal.SIGCONT)
        code = process.wait(60)
        check_ended(process)
        output = log.read_text(errors="replace")
    assert (code if code >= 0 else 128 - code) in CELLS[row.launcher, row.end], output
    assert mark.exists() or row.victim == -1, output
    check_report(row, output)


def command(row: Row, folder: Path) -> list[str]:
    """Return what starts the job. Ranks that are stopped are not warm: a signal reaches the client
    alone.
    """
    timeout = 5 if row.end == LOST else 300
    if row.layer == "backend":
        mark = folder / "mark"
        words = [FAILING, row.backend, row.how, row.victim, mark, row.transport, timeout]
    else:
        words = ["-m", "hvdtrain", *settings(folder, row.where, row.how, row.victim)]
        words += ["--epochs", 1000, "--timeout", timeout]
        words += row.options.split()
        if row.launcher != "hvdtrain":
            words += ["--backend", row.backend, "--transport", row.transport]
    start = line(row.launcher.replace("hvdtrain", "none"), row.n, *words)
    return start if row.how == "stop" else warm(start)


def check_report(row: Row, output: str) -> None:
    """Every failure is reported once, with the rank."""
    lines = output.splitlines()
    who = f"rank {row.victim}/{row.n}"
    # hvdrun's summary is of the rank that ended first.
    others = "error: rank ", "srun: ", "slurmstepd"
    errors = [text for text in lines if "error: " in text and not text.startswith(others)]
    if row.layer == "backend" and row.end == LOST:
        errors = [text for text in lines if "lost contact with" in text][:1]
    elif row.victim >= 0:  # all ranks alike print their traceback each
        assert len(traces(output)) == (row.how == "raise"), output
    if row.how == "raise":
        assert output.count(f"[{who}] failed:") == (row.n > 1 and row.victim >= 0), output
        assert "ArithmeticError: as told" in output, output
    elif row.how == "exit":
        assert output.count(f"[{who}] exits with code 3") == 1, output
    elif row.end in (INPUT, LOST):
        assert len(errors) == 1, output
        if row.how == "refuse":
            assert errors[0].endswith(f"[{who}] error: refused as told"), output
        elif row.end == LOST:
            check_reason(row, errors[0])
            if row.layer == "backend":  # whose stack is printed if it does not fail itself
                thread = f"rank {row.victim} ({socket.gethostname()}), thread Main"
                assert (thread in output) == (row.how == "wait"), output


def check_reason(row: Row, error: str) -> None:
    """The error of a rank that waited names the victim, with its host, its step and its line."""
    if row.backend == "horovod":
        assert "timed out after 5 s in the averaging" in error, error
        return
    assert "lost contact with" in error, error
    rank = rf"rank {row.victim} \({re.escape(socket.gethostname())}\)"
    where = " in step 5: " if row.layer == "backend" else ""
    waited = line_in(failing.wait)
    reason = {
        "wait": rf"{rank} has not arrived: it is in step \d+, in {re.escape(waited)}",
        "other": rf"{rank} is waiting: it is in step 5, in failing.py:\d+, main \(last collective:",
        "stop": rf"rank {row.victim} \(\S+\) has not run for \d+ s",
    }[row.how]
    assert re.search(f"{where}.*{reason}", error), error
