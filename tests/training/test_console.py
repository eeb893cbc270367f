"""What rank 0 shows: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.job.world import World
from hvdtrain.training.console import Console, LineConsole, make_console
from tests.forkserver import warm
from tests.launching import ROOT, clean_env

LINE = "-m hvdtrain --task mlp --set width=8 --epochs 1 --max-steps 12".split()


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    """Through a real pseudo-terminal: the bar, the evaluation above it, and the last line."""
    ours, theirs = pty.openpty()
    command = warm([sys.executable, *LINE, "--run-dir", tmp_path / "run"])
    env = clean_env({"TERM": "xterm", "COLUMNS": "100"})
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        output = b""
        while chunk := _read(ours):
            output += chunk
    os.close(ours)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())
    assert "12/12" in text
    assert re.search(r"12/12 0:00:\d\d 0:00:00 epoch 1 +loss \d\.\d{4} +\d+ samples/s", text)
    assert re.search(r"\d/12 0:00:\d\d (-:--:--|0:00:\d\d) ", text), "the time left"
    assert "step 10/12" not in text, "lines of metrics belong to files and pipes"
    assert re.search(r"step 12 .*eval_loss", text)
    assert "done     12 steps" in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that the other side has closed
        return b""


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console(World(rank=1, size=2, local_rank=1, local_size=2))
    assert type(console) is Console
    console.start(5, 0)
    console.print_line("a line")
    console.log({"step": 1, "loss": 2.0})
    console.advance(1)
    console.stop()
    assert capsys.readouterr().out == ""


def test_a_launcher_that_forwards_lines_gets_lines() -> None:
    """Open MPI gives its ranks a pseudo-terminal, which no user looks at."""
    assert isinstance(make_console(World(launcher="openmpi")), LineConsole)
