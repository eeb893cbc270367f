"""What is written of a hang, and a link that dies. Ranks that hang: tests/death."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forkserver import warm
from tests.launch import hanging
from tests.launch.test_failure import FAILING, line, line_in
from tests.launch.test_rendezvous import two_hosts  # noqa: F401  a fixture
from tests.launching import Finished, Started, run, started

HANGING = Path(hanging.__file__)


def error_line(output: str) -> str:
    found, *_ = [text for text in output.splitlines() if "lost contact with" in text]
    return found


def stalled(tmp_path: Path, *options: str) -> Finished:
    task = ["--task", f"{HANGING}:Stalled", "--batch-size", "8", "--timeout", "3"]
    command = line("torchrun", 2, "-m", "hvdtrain", *task, "--run-dir", tmp_path / "run", *options)
    return run(warm(command))


@pytest.mark.exhaustive
def test_a_stalled_data_loader(tmp_path: Path) -> None:
    """Named, and with a dump of every rank in the run directory, which torch's own tool reads."""
    finished = stalled(tmp_path, "--backend", "ddp", "--transport", "gloo")
    error = error_line(finished.output)
    folder = tmp_path / "run" / "hangs"
    where = f"in the data loader, at {line_in(hanging.read)}"
    assert f"rank 1 ({socket.gethostname()}) has not come: it is in step 5, {where}" in error
    assert error.endswith(f"stacks of all ranks: {folder}"), error
    assert {file.name for file in folder.iterdir()} == {
        f"{kind}" for rank in "01" for kind in (f"rank-{rank}.txt", f"flight_{rank}")
    }
    stack = (folder / "rank-1.txt").read_text()
    assert stack.startswith("thread MainThread:\n"), stack
    assert "in __getitem__" in stack, stack
    assert "in _take_step" in (folder / "rank-0.txt").read_text()
    for rank in (0, 1):
        record = pickle.loads((folder / f"flight_{rank}").read_bytes())
        assert record["entries"][-1]["profiling_name"] == "gloo:all_reduce", record
    tool = "torch.distributed.flight_recorder.fr_trace"
    read = run(warm([sys.executable, "-m", tool, str(folder)]))
    assert read.code == 0, read.output
    assert "missing ranks: {1}" in read.output, read.output


@pytest.mark.exhaustive
def test_a_dead_link(tmp_path: Path, two_hosts: tuple[str, str]) -> None:  # noqa: F811
    """Both sides say that the other one's heartbeat has ended."""
    mark = tmp_path / "mark"
    with ExitStack() as stack:
        logs: list[tuple[Started, Path]] = []
        for rank, name in enumerate(two_hosts):
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577"}
            env["GLOO_SOCKET_IFNAME"] = f"hv{os.getpid()}{'ab'[rank]}"
            inside = ["ip", "netns", "exec", name, sys.executable, str(FAILING)]
            # Names of hosts are looked up for seconds there: the limit is longer than that.
            command = warm([*inside, "ddp", "link", "0", str(mark), "gloo", "15"])
            logs.append(stack.enter_context(started(command, env=env)))
        wait_for(mark.exists, logs)
        cut = ["ip", "netns", "exec", two_hosts[1], "ip", "link", "set", f"hv{os.getpid()}b"]
        subprocess.run([*cut, "down"], check=True)
        wait_for(lambda: all("lost contact with" in log.read_text() for _, log in logs), logs)
        for rank, (_, log) in enumerate(logs):
            error = error_line(log.read_text())
            why = rf"rank {1 - rank} \(\S+\) (has not run for \d+ s|is unreachable: .*)"
            assert re.search(why + r" \(last seen in step \d+\)", error), error


def wait_for(condition: Callable[[], bool], logs: Sequence[tuple[Started, Path]]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, [log.read_text() for _, log in logs]
        time.sleep(0.05)
