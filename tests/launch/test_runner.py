"""`hvdtrain.run`: a function on the ranks of this host, or of several; and an elastic one."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdtrain.hvd as hvd
from hvdtrain.launch import runner
from tests import launching
from tests.environments import EXHAUSTIVE, rest
from tests.forkserver import warm
from tests.launch.drivers import fail, train_elastically
from tests.launching import started
from tests.messages import Message

PYTHON = sys.executable


@wraps(runner.run)
def run(*args: Any, **kwargs: Any) -> Any:
    """Run with ranks that start fast."""
    return runner.run(*args, **{"executable": warm([PYTHON])[0], **kwargs})


@pytest.fixture(autouse=True)
def _nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No file stays behind, and no signal is taken from us."""
    warm([PYTHON])  # before, as its files stay
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    assert list((tmp_path / "temporary").iterdir()) == []
    assert {number: signal.getsignal(number) for number in handlers} == handlers


# Results


def test_results_come_in_rank_order() -> None:
    factor = 3

    def work(values: list[float], *, name: str) -> tuple[int, int, list[float], Any]:
        hvd.init()
        total = hvd.allreduce(torch.tensor(values) * (hvd.rank() + 1), op=hvd.Sum, name=name)
        mine = hvd.rank() * factor
        return hvd.rank(), hvd.size(), total.tolist(), lambda: mine

    hosts = f"{socket.gethostname()}:2"  # this host
    results = run(work, ([1.0, 2.0],), {"name": "values"}, hosts=hosts, use_gloo=True)
    assert [result[:3] for result in results] == [(0, 2, [3.0, 6.0]), (1, 2, [3.0, 6.0])]
    assert [result[3]() for result in results] == [0, 3]


def test_output_goes_to_files_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Called from another thread."""

    def speak() -> None:
        print("said by", os.environ["RANK"])

    options = {"num_proc": 2, "output_filename": f"{tmp_path}/output", "verbose": 1}
    thread = threading.Thread(target=run, args=(speak,), kwargs=options)
    thread.start()
    thread.join(60)
    output = "".join(capfd.readouterr())
    assert "-m hvdtrain.launch.supervisor" in output
    assert "[1]<stdout>:said by 1\n" in output
    assert (tmp_path / "output" / "rank.1" / "stdout").read_text() == "said by 1\n"


@EXHAUSTIVE
def test_what_a_rank_sees_of_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our path and folder, the interfaces, and that it is alone on the first host of a file."""
    (tmp_path / "only_here.py").write_text(
        "import os\n"
        "def work():\n"
        "    names = ('WORLD_SIZE', 'GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')\n"
        "    return [os.getcwd(), *(os.environ[name] for name in names)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import only_here  # type: ignore[import-not-found]

    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1\n")
    options = {"num_proc": 1, "hostfile": f"{tmp_path}/hosts"}
    seen = run(only_here.work, network_interfaces=["lo", "eth0"], **options)
    assert seen == [[str(tmp_path), "1", "lo,eth0", "lo,eth0"]]


# Failures


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "raise",
            r"rank 1 failed:\nTraceback \(most recent call last\):\n.* in end\n"
            r"(.|\n)*\nArithmeticError: as asked$",
        ),
        ("kill", "rank 1 on localhost was killed by SIGKILL"),
        rest(lambda: os._exit(7), "rank 1 on localhost exited with code 7"),
        rest(sys.exit, "rank 1 ended without returning"),
        rest(threading.Lock, "rank 1 failed:\n(.|\n)*the result cannot be pickled"),
    ],
    ids=["raise", "kill", "exit", "sys-exit", "result"],
)
def test_a_rank_may_end_in_any_way(how: Any, message: str) -> None:
    """While the other one waits for it, or has returned."""

    def end() -> Any:
        if isinstance(how, str):
            fail(1, how)
        return how() if os.environ["RANK"] == "1" else 0

    with pytest.raises(RuntimeError, match=f"^{message}"):
        run(end, num_proc=2)


# Arguments


def test_what_does_not_apply_is_refused(message: Message) -> None:
    refused: list[dict[str, Any]] = [
        {"num_proc": 0},
        {"use_mpi": True},
        {"use_mpi": True, "use_gloo": True},
        {"hosts": "localhost:1", "hostfile": "hosts"},
        {"hosts": "localhost:1", "num_proc": 2},
        {"max_num_proc": 4, "reset_limit": 1},
        {"min_num_proc": 0},
        {"min_num_proc": 1, "cooldown_range": [3]},
        {"hosts": "no-such-host.invalid:1"},
        {"args": [threading.Lock()]},
    ]
    for arguments in refused:
        with message.raises(ValueError):
            run(lambda: 0, **arguments)


def test_what_changes_nothing_is_warned_about() -> None:
    for arguments, category, name in (
        ({"mpi_args": "-q"}, UserWarning, "mpi_args"),
        ({"network_interface": "lo"}, DeprecationWarning, "network_interfaces"),
        ({"np": -1}, DeprecationWarning, "num_proc"),
    ):
        with pytest.warns(category, match=name) as caught, pytest.raises(ValueError, match="least"):
            run(lambda: 0, **{"num_proc": 0, **arguments})  # so that it starts no processes
        assert caught[0].filename == __file__


def test_it_may_be_elastic(tmp_path: Path) -> None:
    """A rank dies after the first commit, and is replaced."""
    options = {"num_proc": 3, "min_num_proc": 2, "max_num_proc": 3, "cooldown_range": [1, 2]}
    results = run(train_elastically, (f"{tmp_path}/died",), **options)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({result[2] for result in results}) == 1


# Where it is called

# Without the `if __name__ == "__main__"` that multiprocessing would need.
SCRIPT = """
import os
from horovod import run
class Result:
    def __init__(self, rank): self.rank = rank
def work(offset):
    import horovod.torch as h; h.init()
    return Result(int(os.environ["RANK"]) + offset)
print([result.rank for result in run(work, (5,), num_proc=2)])
"""


def test_a_horovod_script_calls_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = launching.run(warm([PYTHON, "-m", "hvdtrain.hvd", "script.py"]), cwd=tmp_path)
    assert (done.code, done.output) == (0, "[5, 6]\n"), done.output


@pytest.mark.parametrize("number", [signal.SIGINT, rest(signal.SIGKILL)])
def test_the_ranks_end_with_us(number: signal.Signals, tmp_path: Path) -> None:
    script = "import time, hvdtrain; hvdtrain.run(lambda: [print('ready'), time.sleep(300)], "
    script += f"num_proc=2, executable={warm([PYTHON])[0]!r})"
    with started([PYTHON, "-c", script], env={"TMPDIR": str(tmp_path)}) as (process, log):
        launching.wait_for(log, "ready", 2)
        process.send_signal(number)
        process.ends(-number)
        launching.wait_until(lambda: not launching.members(process.marker), "their end")
    if number != signal.SIGKILL:
        assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
