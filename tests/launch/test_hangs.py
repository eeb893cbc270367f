"""What is written of a hang, a link that dies, a supervisor that waits for nobody. Ranks that hang:
tests/death.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import psutil
import pytest

from tests.forkserver import warm
from tests.launch import failing
from tests.launch.test_failure import FAILING, line_in, settings, train
from tests.launch.test_rendezvous import (
    cut_link,
    one_rank_each,
    two_hosts,  # noqa: F401  a fixture
)
from tests.launching import Finished, run, started, wait_for, wait_until


@pytest.mark.exhaustive
def test_a_stalled_data_loader(tmp_path: Path) -> None:
    """Named, and with the stacks of every rank in the run directory."""
    options = [*settings(tmp_path, "data", "wait", 1), "--batch-size", 8, "--timeout", 3]
    finished = run(warm(train("torchrun", 2, "ddp", *options, "--transport", "gloo")))
    error, *_ = finished.lines("lost contact with")
    folder = tmp_path / "run" / "hangs"
    where = f"in the data loader, at {line_in(failing.wait)}"
    assert f"rank 1 ({socket.gethostname()}) has not arrived: it is in step 5, {where}" in error
    assert error.endswith(f"stacks of all ranks: {folder}"), error
    assert {file.name for file in folder.iterdir()} == {"rank-0.txt", "rank-1.txt"}
    stack = (folder / "rank-1.txt").read_text()
    assert stack.startswith("thread MainThread:\n"), stack
    assert "in __getitem__" in stack, stack
    assert "in _take_step" in (folder / "rank-0.txt").read_text()


@pytest.mark.exhaustive
def test_a_dead_link(tmp_path: Path, two_hosts: tuple[str, str]) -> None:  # noqa: F811
    """Both sides say that the other one's heartbeat has ended."""
    mark = tmp_path / "mark"
    # Names of hosts are looked up for seconds there: the limit is longer than that.
    command = [FAILING, "ddp", "link", "0", mark, "gloo", "15"]
    with one_rank_each(two_hosts, *command) as running:
        wait_until(mark.exists, "the fifth step", log=running[0][1])
        cut_link(two_hosts)
        for rank, (_, log) in enumerate(running):
            wait_for(log, "lost contact with")
            error, *_ = Finished(0, log.read_text()).lines("lost contact with")
            why = rf"rank {1 - rank} \(\S+\) (has not run for \d+ s|is unreachable: .*)"
            assert re.search(why + r" \(last seen in step \d+\)", error), error


LEAVES_A_PROCESS = """
import os, subprocess, sys
subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(sys.argv[1]).read()
os.write(1, b"last\\n")
os._exit(3)
"""


def test_a_process_that_a_rank_leaves_behind_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It holds the rank's stdout, which the supervisor finds in one wake with the rank's end."""
    stdin, go = tmp_path / "stdin", tmp_path / "go"
    os.mkfifo(stdin)
    os.mkfifo(go)
    start = {"start": 0, "command": [sys.executable, "-c", LEAVES_A_PROCESS, str(go)]}
    supervisor = f"exec {sys.executable} -m hvdtrain.launch.supervisor < {stdin}"
    with started(["sh", "-c", supervisor]) as (process, log):
        with stdin.open("w") as messages:
            print(json.dumps({**start, "env": {}, "defaults": {}}), file=messages, flush=True)
            with go.open("w"):  # once the rank reads it
                (inner,) = psutil.Process(process.pid).children()
                (rank,) = inner.children()
                inner.suspend()
                wait_until(lambda: inner.status() == psutil.STATUS_STOPPED, "its stop", log=log)
            wait_until(lambda: rank.status() == psutil.STATUS_ZOMBIE, "the rank's end", log=log)
            inner.resume()
            wait_for(log, "[0]<exit>:3")
        assert "[0]<stdout>:last\n" in process.ends(0)
