"""`--checkpoint-async`: the same bytes as without, whatever the steps do that are taken meanwhile.

The thread that writes is held until the run has changed everything that the checkpoint is of.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hvdtrain import Backend, Callback, Trainer
from hvdtrain.errors import CheckpointError
from hvdtrain.training import checkpoint
from hvdtrain.training.background import BackgroundCall
from hvdtrain.training.snapshot import Snapshot
from tests.launching import run, wait_until
from tests.parity.resume import CASES, CONFIG, Stateful, train
from tests.ranks import Ranks, single
from tests.runs import run_json

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 12
"""The steps of a run of tests/parity/resume.py."""


@contextmanager
def held(until: Callable[[int], object]) -> Iterator[None]:
    """Let each save in a thread end only when `until(its step)`."""
    real = checkpoint.Writer.finish

    def finish(writer: checkpoint.Writer, about: Mapping[str, Any]) -> Path:
        if threading.current_thread() is not threading.main_thread():
            wait_until(lambda: until(writer.step), f"what the save of step {writer.step} needs")
        return real(writer, about)

    with mock.patch.object(checkpoint.Writer, "finish", finish):
        yield


class Follow(Callback):
    """Notes the newest step that has been taken, and what on_checkpoint is called with."""

    step = 0

    def __init__(self) -> None:
        self.saved: list[tuple[int, int, bool]] = []
        Follow.step = 0

    def on_step_end(self, trainer: Trainer) -> None:
        Follow.step = trainer.progress.step

    def on_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        is_valid = path is None or checkpoint.problem(path) is None
        self.saved.append((trainer.saved_step, trainer.progress.step, is_valid))


FOLLOW = (f"{__name__}:Follow",)


def train_held(backend: Backend, /, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Train; each checkpoint is written two steps after it was taken, or later."""
    with held(lambda step: Follow.step >= min(step + 2, LAST)):
        return train(backend, run_dir, checkpoint_async=True, callback=FOLLOW, **changes)


def train_sync(backend: Backend, /, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return train(backend, run_dir, callback=FOLLOW, **changes)


def content(run_dir: Path) -> dict[str, bytes]:
    """Return every file of every checkpoint of a run."""
    root = run_dir / "checkpoints"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


EVERY: dict[str, Any] = {"checkpoint_every": 4}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_the_step(tmp_path: Path, case: str) -> None:
    changes = {**EVERY, **CASES[case]}
    sync = train_sync(single(), tmp_path / "sync", **changes)
    held = train_held(single(), tmp_path / "async", **changes)
    assert held["digest"] == sync["digest"]
    assert content(tmp_path / "async") == content(tmp_path / "sync")


@pytest.mark.parametrize(
    "ranks",
    [("ddp-torchrun", 2), pytest.param(("horovod-mpi", 2), marks=pytest.mark.exhaustive)],
    indirect=True,
)
def test_ranks(ranks: Ranks, tmp_path: Path) -> None:
    sync = ranks.run(train_sync, tmp_path / "sync", **EVERY)
    held = ranks.run(train_held, tmp_path / "async", **EVERY)
    assert [r["digest"] for r in held] == [r["digest"] for r in sync]
    assert content(tmp_path / "async") == content(tmp_path / "sync")


def test_old_ones_are_removed_as_without(tmp_path: Path) -> None:
    changes = {"checkpoint_every": 2, "keep": 1, "keep_best": "loss:max"}
    train_sync(single(), tmp_path / "sync", **changes)
    train_held(single(), tmp_path / "async", **changes)
    assert content(tmp_path / "async") == content(tmp_path / "sync")
    best = run_json(tmp_path / "async")["best_checkpoint"]
    assert best["path"].startswith(str(tmp_path / "async"))


# The copy


def test_a_copy_shares_no_memory_and_keeps_what_is_shared() -> None:
    weight = torch.arange(6.0)
    state: dict[str, Any] = {
        "tied": [weight, weight.view(2, 3)[:, 1], weight[:0]],
        "other": {"sparse": torch.eye(2).to_sparse(), "set": {1}, "bytes": bytearray(b"ab")},
        "empty": (torch.zeros(0), torch.tensor(7)),
    }
    snapshot = Snapshot()
    memory = set()
    for _ in range(2):
        before = {name: torch.tensor(0) for name in "ab"} | state
        copied = snapshot.take(before)
        tied = copied["tied"]
        assert [t.tolist() for t in tied] == [t.tolist() for t in state["tied"]]
        assert {t.untyped_storage().data_ptr() for t in tied} == {tied[0].data_ptr()}
        assert tied[0].data_ptr() != weight.data_ptr()
        memory.add(tied[0].data_ptr())
        weight.add_(1)
        state["other"]["set"].add(len(state["other"]["set"]) + 1)
        assert tied[0][0] == weight[0] - 1
        assert len(copied["other"]["set"]) == len(state["other"]["set"]) - 1
        assert copied["other"]["bytes"] is not state["other"]["bytes"]
    assert len(memory) == 1, "the memory is kept for the next copy"


def test_what_cannot_be_copied_is_said() -> None:
    with pytest.raises(CheckpointError, match="cannot copy the state .*lock.*leave --checkpoint-a"):
        Snapshot().take({"callbacks": threading.Lock()})


# The thread


@contextmanager
def slow() -> Iterator[None]:
    """Let each save in a thread last until the run waits for it."""
    waits, real = threading.Event(), BackgroundCall.wait

    def wait(self: BackgroundCall, timeout_s: float) -> None:
        waits.set()
        real(self, timeout_s)
        waits.clear()

    with mock.patch.object(BackgroundCall, "wait", wait), held(lambda step: waits.is_set()):
        yield


class Patient(Follow):
    """Waits at a step until nothing is being written."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def on_step_end(self, trainer: Trainer) -> None:
        super().on_step_end(trainer)
        if trainer.progress.step == self.at and trainer._run_dir is not None:
            background = trainer._run_dir.background
            wait_until(lambda: not background.is_running(), "the save")


def test_one_at_a_time_and_callbacks_follow(tmp_path: Path) -> None:
    follow = Follow()
    config = replace(CONFIG, run_dir=str(tmp_path), checkpoint_async=True, checkpoint_every=5)
    with slow():
        Trainer(Stateful(), single(), config, callbacks=[follow]).fit()
    # Each is complete once the next one, or the end, waits for it.
    assert follow.saved == [(5, 10, True), (10, 12, True), (12, 12, True)]
    follow = Patient(8)
    # The save of step 5 ends while `follow` waits in step 8.
    with held(lambda step: Follow.step >= min(step + 3, LAST)):
        config = replace(config, run_dir=str(tmp_path / "logged"), log_every=1)
        Trainer(Stateful(), single(), config, callbacks=[follow]).fit()
    steps = [saved for saved, _, _ in follow.saved]
    assert steps == [5, 10, 12]
    assert follow.saved[0] == (5, 8, True), "a logged step is soon enough"


def test_an_error_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    """No step is logged, and no epoch of four steps ends, before it is raised."""

    def finish(writer: checkpoint.Writer, about: Mapping[str, Any]) -> Path:
        raise CheckpointError(f"cannot write the checkpoint of step {writer.step}: No space left")

    config = replace(
        CONFIG, run_dir=str(tmp_path), checkpoint_async=True, checkpoint_every=5, log_every=9
    )
    trainer = Trainer(Stateful(), single(), config, callbacks=[Patient(6)])
    failing = mock.patch.object(checkpoint.Writer, "finish", finish)
    with failing, pytest.raises(CheckpointError, match="No space"):
        trainer.fit()
    assert trainer.progress.step < 8
    assert run_json(tmp_path)["outcome"] == "failed"
    assert "No space left" in run_json(tmp_path)["error"]


def test_an_interruption_leaves_the_thread_its_checkpoint(tmp_path: Path) -> None:
    real = BackgroundCall.start

    def start(background: BackgroundCall, call: Callable[[], None]) -> None:
        real(background, call)
        raise KeyboardInterrupt

    config = replace(CONFIG, run_dir=str(tmp_path), checkpoint_async=True, checkpoint_every=5)
    trainer = Trainer(Stateful(), single(), config)
    with held(lambda step: run_json(tmp_path)["outcome"] == "interrupted"):
        with mock.patch.object(BackgroundCall, "start", start), pytest.raises(KeyboardInterrupt):
            trainer.fit()
    newest, skipped = checkpoint.newest(tmp_path / "checkpoints")
    assert (newest, skipped) == (tmp_path / "checkpoints" / "step-00000005", [])


def fail_at_the_end(backend: Backend, /, run_dir: Path) -> str:
    real = checkpoint.Writer.finish

    def finish(writer: checkpoint.Writer, about: Mapping[str, Any]) -> Path:
        if writer.step == LAST:
            raise CheckpointError("No space left")
        return real(writer, about)

    with mock.patch.object(checkpoint.Writer, "finish", finish):
        try:
            train(backend, run_dir, checkpoint_async=True, checkpoint_every=6)
        except CheckpointError as error:
            return str(error)
    return "it ended"


@pytest.mark.parametrize("ranks", [("ddp-torchrun", 2)], indirect=True)
def test_an_error_at_the_end_is_that_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(fail_at_the_end, tmp_path) == ["rank 0: No space left"] * 2
    newest, skipped = checkpoint.newest(tmp_path / "checkpoints")
    assert (newest, skipped) == (tmp_path / "checkpoints" / "step-00000006", [])


def preempted(backend: Backend, /, run_dir: Path, at: dict[int, int]) -> dict[str, Any]:
    with slow():
        options: dict[str, Any] = {"checkpoint_async": True, "checkpoint_every": 0}
        return train(backend, run_dir, signals=at, **options)


@pytest.mark.parametrize("ranks", [("single", 1), ("ddp-torchrun", 2)], indirect=True)
def test_a_preempted_run_ends_once_its_checkpoint_is_there(ranks: Ranks, tmp_path: Path) -> None:
    at = {ranks.n - 1: 5}
    first = ranks.run(preempted, tmp_path, at)
    step = first[0]["step"]
    assert first[0]["digest"].endswith(f"saved after step {step}")
    path, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert path == checkpoint.path_of(tmp_path / "checkpoints", step)
    rest = ranks.run(train, tmp_path, resume="must", checkpoint_async=True)
    assert rest[0]["digest"] == ranks.run(train, tmp_path / "whole")[0]["digest"]


def test_a_run_that_fails_finishes_the_checkpoint(tmp_path: Path) -> None:
    with slow():
        found = train(single(), tmp_path, stop_at=6, checkpoint_async=True, checkpoint_every=5)
    assert found["digest"] == "stopped"
    assert checkpoint.problem(tmp_path / "checkpoints" / "step-00000005") is None


def test_a_disk_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends after --timeout, and keeps its lock as long as the thread may write."""
    released = threading.Event()
    options: dict[str, Any] = {"checkpoint_async": True, "checkpoint_every": 5, "timeout": 0.2}
    with held(lambda step: released.is_set()):
        try:
            with pytest.raises(CheckpointError, match=r"step 5 is not written yet, 0.2 s after .*"):
                train(single(timeout_s=0.2), tmp_path, **options, grace="0.1s")
            assert (
                "saved    nothing: the checkpoint is not written after 0.1 s (--grace)"
                in capsys.readouterr().out
            )
            lock = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), 6)"
            command = [sys.executable, "-c", lock, str(tmp_path / ".lock")]
            assert run(command).code != 0, "another run may not clean up here"
        finally:
            released.set()
        path = tmp_path / "checkpoints" / "step-00000005"
        wait_until(lambda: checkpoint.problem(path) is None, "a valid checkpoint")
