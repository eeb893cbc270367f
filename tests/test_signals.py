"""Signal handlers for the time of a block."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from hvdtrain import TrainConfig
from hvdtrain.job.world import guess_world
from hvdtrain.liveness import failure
from hvdtrain.system import signals
from hvdtrain.training.preemption import Preemption
from tests.ranks import single


@pytest.mark.parametrize("error", [None, ValueError()])
def test_deferred_signals_act_after_the_block(error: Exception | None) -> None:
    """Also after one that ends with an exception."""
    steps = []

    def interrupted() -> None:
        with signals.deferred(*signals.STOP):
            signal.raise_signal(signal.SIGINT)
            steps.append("the block goes on")
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupted()
    assert steps == ["the block goes on"]
    assert raised.value.__context__ is error


def test_a_signal_can_raise_system_exit() -> None:
    with pytest.raises(SystemExit, match="143"), signals.raised_as_exit(signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)


def test_uninterrupted_ignores_requests_to_stop() -> None:
    with signals.uninterrupted():
        for number in signals.STOP:
            signal.raise_signal(number)


def test_handlers_are_restored_after_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        with signals.handled(signal.SIG_IGN, signal.SIGTERM):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            raise ValueError

    with pytest.raises(ValueError, match="^$"):
        fail()
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored() -> None:
    """As nohup, and a shell for its background jobs, start a command."""
    found: list[int] = []
    world = guess_world()
    with signals.handled(signal.SIG_IGN, signal.SIGINT):
        with signals.handled(lambda number, frame: found.append(number), signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
        with failure.guard(world), Preemption(single(), TrainConfig()):
            signal.raise_signal(signal.SIGINT)
    assert not found


def test_a_second_signal_ends_a_rank_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's repetition of the first, within two seconds, does not."""
    now, codes = 100.0, list[int]()
    monkeypatch.setattr(failure, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(failure, "_requested", [])
    monkeypatch.setattr(os, "_exit", codes.append)
    stop = failure._RaiseOnce()
    with pytest.raises(KeyboardInterrupt):
        stop(signal.SIGINT, None)
    now += 1
    stop(signal.SIGTERM, None)
    assert not codes
    now += 2
    stop(signal.SIGTERM, None)
    assert codes == [143]


def test_another_thread_runs_the_block_unchanged() -> None:
    found = []

    def run() -> None:
        with signals.uninterrupted(), signals.deferred(signal.SIGTERM):
            found.append(signal.getsignal(signal.SIGTERM))
        signals.set_handler(signal.SIG_IGN, signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]
    assert signal.getsignal(signal.SIGTERM) is before
