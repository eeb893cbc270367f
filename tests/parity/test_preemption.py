"""A signal to any rank: all save after the same step and end; resumed, nothing has changed."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain import TrainConfig, failure, signals
from hvdtrain.training import checkpoint, preemption
from tests.conftest import TWO_RANKS
from tests.parity.resume import train
from tests.ranks import Ranks, single
from tests.runs import run_json

pytestmark = pytest.mark.usefixtures("one_thread")

Case = tuple[tuple[str, int], dict[int, int], dict[str, Any]]
CASES: list[Case] = [(arm, {1: 6}, {}) for arm in [*TWO_RANKS, ("ddp-torchrun", 3)]]
# Both ranks, at different steps; the last step of an epoch; between two averages of local SGD.
CASES += [
    (("ddp-torchrun", 2), {0: 6, 1: 5}, {}),
    (("ddp-torchrun", 2), {0: 3}, {"early_stop": "loss:9"}),
    (("ddp-torchrun", 2), {1: 5}, {"sync_every": 5, "epochs": 6}),
]


@pytest.mark.parametrize(("ranks", "at", "changes"), CASES, indirect=["ranks"])
def test_all_ranks_end_after_the_same_step(
    ranks: Ranks, at: dict[int, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"checkpoint_every": 0, **changes}
    whole = ranks.run(train, tmp_path / "whole", **changes)
    parts = tmp_path / "parts"
    first = ranks.run(train, parts, signals=at, **changes)
    last = first[0]["step"]
    check_saved(parts, last, first[0]["digest"], f"rank {min(at, key=at.__getitem__)}")
    assert {r["step"] for r in first} == {last}
    earliest = min(at.values())
    # A rank may have begun the next step, and every rank takes one more.
    limit = earliest + 2
    if every := changes.get("sync_every"):
        limit = -(-limit // every) * every
    assert earliest < last <= limit
    second = ranks.run(train, parts, resume="must", **changes)
    assert [r["digest"] for r in second] == [r["digest"] for r in whole]
    for rank in range(ranks.n):
        assert first[rank]["seen"] + second[rank]["seen"] == whole[rank]["seen"]


def check_saved(run_dir: Path, step: int, digest: str, whose: str) -> None:
    assert digest == f"code 143: SIGUSR1 at {whose}; saved after step {step}"
    newest, skipped = checkpoint.newest(run_dir / "checkpoints")
    assert not skipped
    assert newest is not None
    assert checkpoint.path_of(run_dir / "checkpoints", step) == newest
    about = run_json(run_dir)
    assert about["outcome"] == "preempted"
    assert about["last_step"] == step


@pytest.mark.parametrize("step", [1, 4, 11])
def test_one_process(tmp_path: Path, step: int) -> None:
    whole = train(single(), tmp_path / "whole", checkpoint_every=0)
    first = train(single(), tmp_path / "parts", signals={0: step}, checkpoint_every=0)
    if step == 11:  # the next step is the run's last
        assert first["digest"] == whole["digest"]
        return
    check_saved(tmp_path / "parts", step + 1, first["digest"], "rank 0")
    second = train(single(), tmp_path / "parts", resume="must", checkpoint_every=0)
    assert second["digest"] == whole["digest"]
    assert first["seen"] + second["seen"] == whole["seen"]


@pytest.mark.parametrize(("launcher", "within_s"), [("none", 0.19), ("openmpi", 1.9)])
def test_a_signal_that_is_repeated_at_once_counts_as_one(
    monkeypatch: pytest.MonkeyPatch, launcher: str, within_s: float
) -> None:
    """A launcher passes on what the rank has received directly, too. One after that is another."""
    now, found = 100.0, list[int]()
    backend = single()
    backend.world = replace(backend.world, launcher=launcher)
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: now))
    with signals.handled(lambda number, frame: found.append(number), signal.SIGUSR1):
        with preemption.Preemption(backend, TrainConfig(checkpoint_signals="USR1")):
            signal.raise_signal(signal.SIGUSR1)
            now += within_s
            signal.raise_signal(signal.SIGUSR1)
            assert not found
            now += 0.2
            signal.raise_signal(signal.SIGUSR1)
    assert found == [signal.SIGUSR1]


def test_the_loss_of_rank_0_in_the_grace_period_keeps_the_cause() -> None:
    """No one decides on a last step any more, and --grace may end the run."""
    backend = single()
    backend.world = replace(backend.world, size=2, rank=1)
    ended = preemption.Preemption(backend, TrainConfig())
    ended._on_message(0, ["hold", "SIGINT at rank 1"], b"")
    ended._on_lost(0, "it has ended")
    assert not ended.begin_step(1)
    assert failure.exit_code(ended.end(0)) == 130
    assert str(ended.end(0)).startswith("SIGINT at rank 1; ")


def test_signals_may_be_left_to_the_program(tmp_path: Path) -> None:
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: found.append(number))
    try:
        left = train(single(), tmp_path / "left", signals={0: 2}, checkpoint_signals="TERM")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [signal.SIGUSR1]
    assert left["step"] == 12
