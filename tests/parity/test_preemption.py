"""Signals that are repeated, late, or not the run's; the others: test_interruption.py."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain import TrainConfig
from hvdtrain.liveness import failure
from hvdtrain.system import signals
from hvdtrain.training import preemption
from tests.parity.resume import train
from tests.ranks import single

pytestmark = pytest.mark.usefixtures("one_thread")


def preemption_of(**world: Any) -> preemption.Preemption:
    backend = single()
    backend.world = replace(backend.world, **world)
    return preemption.Preemption(backend, TrainConfig())


@pytest.mark.parametrize(("launcher", "within_s"), [("none", 0.19), ("openmpi", 1.9)])
def test_a_signal_that_is_repeated_at_once_counts_as_one(
    monkeypatch: pytest.MonkeyPatch, launcher: str, within_s: float
) -> None:
    """A launcher passes on what the rank has received directly, too. One after that is another."""
    now, found = 100.0, list[int]()
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: now))
    with signals.handled(lambda number, frame: found.append(number), signal.SIGUSR1):
        with preemption_of(launcher=launcher):
            signal.raise_signal(signal.SIGUSR1)
            now += within_s
            signal.raise_signal(signal.SIGUSR1)
            assert not found
            now += 0.2
            signal.raise_signal(signal.SIGUSR1)
    assert found == [signal.SIGUSR1]


def test_no_step_is_left_for_the_others_to_end_after(tmp_path: Path) -> None:
    """The step after the signal is the last of the run, which so ends as any other."""
    whole = train(single(), tmp_path / "whole", checkpoint_every=0)
    found = train(single(), tmp_path / "last", signals={0: 11}, checkpoint_every=0)
    assert found["digest"] == whole["digest"]


def test_the_last_step_is_the_one_after_the_furthest_rank_s() -> None:
    """Rank 0 decides once all ranks have said which step they have begun."""
    ended = preemption_of(size=2, rank=0)
    assert not ended.begin_step(6)
    ended._on_message(0, ["hold", "SIGTERM at rank 1"], b"")
    ended._on_message(1, ["begun", 7], b"")
    assert not ended.begin_step(7)
    assert ended.begin_step(8)


def test_the_loss_of_rank_0_in_the_grace_period_keeps_the_cause() -> None:
    """No one decides on a last step any more, and --grace may end the run."""
    ended = preemption_of(size=2, rank=1)
    ended._on_message(0, ["hold", "SIGINT at rank 1"], b"")
    ended._on_lost(0, "it has ended")
    assert not ended.begin_step(1)
    assert failure.exit_code(ended.end(0)) == 130
    assert str(ended.end(0)).startswith("SIGINT at rank 1; ")
