"""The run directory: readable at any moment, and one writer at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from hvdtrain.errors import InputError
from hvdtrain.system import files
from hvdtrain.training.run_dir import RunDirectory, make_default
from tests.runs import Values


def opened(path: Path, resuming: bool = False) -> closing[RunDirectory]:
    return closing(RunDirectory(path, resuming))


def read(path: Path) -> Values:
    found: Values = json.loads((path / "run.json").read_text(), parse_constant=pytest.fail)
    return found


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with opened(path) as run_dir:
        run_dir.start({"config": {"clip_norm": math.inf, "set": ("a=1",)}, "path": path})
        begun = read(path)
        assert (begun["outcome"], begun["process"]["pid"]) == ("running", os.getpid())
        run_dir.update(ledger={"ranks": 2})
        run_dir.open_metrics(0)
        run_dir.log({"step": 1, "grad_norm": math.nan, "nested": [(-math.inf,)]})
        line = json.loads((path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
        assert line["step"] == 1, "a line must be there at once"
        run_dir.finish("finished", metrics={"accuracy": 0.5})
    run = read(path)
    assert run["start"] <= run["end"]
    wanted = {"format": 1, "outcome": "finished", "attempts": [], "path": str(path)}
    wanted |= {"ledger": {"ranks": 2}, "metrics": {"accuracy": 0.5}}
    assert {name: run[name] for name in wanted} == wanted
    # NaN and Infinity are no JSON: jq and a browser refuse the whole file.
    assert float(run["config"]["clip_norm"]) == math.inf
    assert math.isnan(float(line["grad_norm"]))
    assert line["nested"] == [["-inf"]]
    assert sorted(p.name for p in path.iterdir()) == [".lock", "metrics.jsonl", "run.json"]


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    with opened(tmp_path) as run_dir:
        run_dir.start({})
        run_dir.finish("finished")
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(InputError, match="holds a run already; continue it with --resume auto"):
        RunDirectory(tmp_path, resuming=False)
    assert (tmp_path / "run.json").read_bytes() == before
    with opened(tmp_path, resuming=True):
        pass
    # Else a later --resume would find the old run's checkpoints behind the new one's.
    (tmp_path / "run.json").rename(tmp_path / "checkpoints")
    with pytest.raises(InputError, match="holds a run already"):
        RunDirectory(tmp_path, resuming=False)


# The lock, held by another process

HOLDER = """
import os, sys, time
from pathlib import Path
sys.modules["torch"] = None  # not needed, and slow
from hvdtrain.training.run_dir import RunDirectory

run_dir = RunDirectory(Path(sys.argv[1]), resuming=False)
run_dir.start({})
child = os.fork()  # as a loader process, which outlives a kill of its parent for a while
if child == 0:
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
time.sleep(30)
"""


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            for resuming in (False, True):
                with pytest.raises(InputError, match="another run is writing to .*--run-dir"):
                    RunDirectory(tmp_path, resuming)
            holder.kill()
            holder.wait()
            os.kill(child, 0)  # it lives
            with opened(tmp_path, resuming=True) as run_dir:
                run_dir.start({})
            (attempt,) = read(tmp_path)["attempts"]
            assert attempt["outcome"] == "killed"
            assert attempt["process"]["pid"] == holder.pid
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


def test_one_writer_in_one_process(tmp_path: Path) -> None:
    """The kernel's lock is the process's: closing any descriptor of the file would release it."""
    with opened(tmp_path) as first:
        first.start({})
        for path in (tmp_path, tmp_path / ".." / tmp_path.name):
            with pytest.raises(InputError, match="another run is writing to .*--run-dir"):
                RunDirectory(path, resuming=True)
        command = [sys.executable, "-c", HOLDER, str(tmp_path)]
        other = subprocess.run(command, capture_output=True, text=True)
        assert "another run is writing to" in other.stderr


@pytest.mark.parametrize("how", ["removed", "moved", "replaced", "unlocked"])
def test_a_directory_that_is_removed_or_moved_meanwhile(tmp_path: Path, how: str) -> None:
    """Nothing is written any more, least of all into the directory of another run."""
    path = tmp_path / "run"
    with opened(path) as run_dir:
        run_dir.start({})
        run_dir.open_metrics(0)
        if how == "removed":
            shutil.rmtree(path)
        elif how == "unlocked":
            (path / ".lock").unlink()
        else:
            path.rename(tmp_path / "elsewhere")
        if how == "replaced":
            with opened(path) as second:
                second.start({"config": "the second's"})
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        for write in (
            partial(run_dir.log, {"step": 1}),
            partial(run_dir.update, last_step=1),
            partial(run_dir.finish, "finished"),
            run_dir.check,
        ):
            with pytest.raises(InputError) as lost:
                write()
            assert str(lost.value) == (
                f"the run directory {path} was removed or moved while the run goes on: its .lock "
                "is no longer the one that this run holds; leave it in place, and continue from a "
                "checkpoint with --resume"
            )
        run_dir.fail(lost.value, 1)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_a_directory_that_cannot_be_read_for_a_moment(tmp_path: Path) -> None:
    """As on a network file system: it is not "removed or moved", and the run goes on."""
    path = tmp_path / "run"
    with opened(path) as run_dir:
        run_dir.start({})
        run_dir.open_metrics(0)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(path)  # too many levels of symbolic links
        run_dir.check()
        run_dir.log({"step": 1})
        with pytest.raises(InputError, match="cannot write the run directory .*: Too many levels"):
            run_dir.update(last_step=1)
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
        run_dir.finish("finished")
    assert steps(path) == [1]
    assert read(path)["outcome"] == "finished"


def test_a_lock_that_is_replaced_while_another_waits_for_it(tmp_path: Path) -> None:
    """The one who waits must lock the file that is there, not the one that was."""
    with opened(tmp_path) as first:
        (tmp_path / ".lock").unlink()
        with opened(tmp_path, resuming=True) as second:
            first.close()
            with pytest.raises(InputError, match="another run is writing to"):
                RunDirectory(tmp_path, resuming=True)
            second.check()


# Resuming


def test_attempts_add_up(tmp_path: Path) -> None:
    failed = {"error": "ValueError: no", "last_step": 7, "resumed_from": "step-00000005"}
    for number in range(3):
        with opened(tmp_path, resuming=number > 0) as run_dir:
            run_dir.start({"config": {"epochs": 1}})
            run_dir.finish("failed" if number < 2 else "finished", **failed if number < 2 else {})
    run = read(tmp_path)
    assert run["outcome"] == "finished"
    assert len(run["attempts"]) == 2
    for attempt in run["attempts"]:
        assert attempt.items() >= {"outcome": "failed", "end": attempt["end"], **failed}.items()
    assert "error" not in run


def test_a_damaged_run_json_does_not_stop_a_resume(tmp_path: Path) -> None:
    for damaged in (b"", b"[]", b"\xff"):
        (tmp_path / "run.json").write_bytes(damaged)
        with opened(tmp_path, resuming=True) as run_dir:
            run_dir.start({})
        assert read(tmp_path)["attempts"] == []


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 12, "lo',
        b"12",
        b'{"loss": 1}',
        b'{"step": "x"}',
        b'{"step": Infinity}',
        b"\xff\xfe",
    ],
)
def test_later_and_incomplete_lines_are_deleted(tmp_path: Path, torn: bytes) -> None:
    lines = "".join(f'{{"step": {step}}}\n' for step in (5, 10, 10, 11, 15))
    (tmp_path / "metrics.jsonl").write_bytes(lines.encode() + torn)
    with opened(tmp_path, resuming=True) as run_dir:
        run_dir.open_metrics(10)
        run_dir.log({"step": 12})
    assert steps(tmp_path) == [5, 10, 10, 12]


def test_an_evaluation_that_is_done_again_is_dropped(tmp_path: Path) -> None:
    records = [{"step": 5, "eval_loss": 3}, {"step": 10, "loss": 2}, {"step": 10, "eval_loss": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    with opened(tmp_path, resuming=True) as run_dir:
        run_dir.open_metrics(10)
        run_dir.open_metrics(10, with_evaluation=False)
        before = time.time()
        run_dir.log({"step": 10, "eval_loss": 1})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    *kept, last = [json.loads(line) for line in lines]
    assert kept == records[:2]
    assert before - 0.001 <= last.pop("time") <= time.time() + 0.001
    assert last == {"step": 10, "eval_loss": 1}


# Default names


def test_default_names_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [make_default("some/where/my_task.py:MyTask", "ddp") for _ in range(20)]
    assert len(set(made)) == 20
    assert all(path.is_dir() and path.parent == Path("runs") for path in made)
    assert all("-mytask-ddp" in path.name for path in made)


def test_runs_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a disk that is not there must not make it look for a free name for ever."""
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to("/not/mounted")
    with pytest.raises(InputError, match="cannot write the run directory runs"):
        make_default("digits", "ddp")


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced = tmp_path / "run.json", list[tuple[int, bool]]()
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((os.fstat(fd).st_size, file.exists()))
    )
    files.write_atomically(file, "whole")
    assert synced == [(len("whole"), False)]
    files.write_atomically(file, "later", sync=False)
    assert len(synced) == 1
