"""Interruptions of a run on live ranks, and what each must leave: see test_interruption.py.

A kind of interruption trains in two parts. It returns the last part, which must end with the bits
of a run that was left alone, and in it the first one.

    stop      an exception before a step; resumed from the newest checkpoint
    signals   SIGUSR1: all ranks save after the same step and end; resumed from that checkpoint

Restarts by real launchers, with killed processes: tests/launch/test_restart.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain import Backend
from tests.methods.arms import SETTINGS, TASK, options_of
from tests.parity.resume import CASES, CONFIG, train
from tests.runs import Values, run_json

CONFIGURATIONS: dict[str, Values] = {
    **CASES,
    "schedule by step": {"own_schedule": "step"},
    "schedule by epoch": {"own_schedule": "by epoch"},
    "own plateau": {"own_schedule": "plateau"},
    "accumulate": {"accumulate": 3},
    "fp64": {"precision": "fp64"},
    # Two epochs are enough for a method, where it does not say otherwise.
    **{name: {"epochs": 2, **changes, **TASK.get(name, {})} for name, changes in SETTINGS.items()},
}
"""By name: changes to the options of tests/parity/resume.py, and to its task."""

At = int | dict[int, int]
"""The step of the interruption; for signals also by rank, else it is the last rank's."""


def train_with(backend: Backend, /, folder: Path, name: str, **more: Any) -> Values:
    """Train with a configuration, or with part of a run that is interrupted."""
    changes = {**CONFIGURATIONS[name], **more}
    options = {key: value for key, value in changes.items() if hasattr(CONFIG, key)}
    with options_of(backend, replace(CONFIG, **options)):
        return train(backend, folder, **changes)


def stop(backend: Backend, /, folder: Path, name: str, at: int) -> Values:
    every = at - 1
    first = train_with(backend, folder, name, stop_at=at, checkpoint_every=every)
    assert first["digest"] == "stopped"
    return {
        **train_with(backend, folder, name, resume="auto", checkpoint_every=every),
        "first": first,
    }


def signals(backend: Backend, /, folder: Path, name: str, at: At) -> Values:
    at = at if isinstance(at, dict) else {backend.world.size - 1: at}
    first = train_with(backend, folder, name, signals=at, checkpoint_every=0)
    saved, earliest = first["step"], min(at.values())
    cause = f"SIGUSR1 at rank {min(at, key=at.__getitem__)}"
    assert first["digest"] == f"code 143: {cause}; saved after step {saved}"
    # A rank may have begun the next step, and every rank takes one more.
    assert earliest < saved <= earliest + 2
    if backend.world.rank == 0:  # it writes the record
        about = run_json(folder)
        assert (about["outcome"], about["last_step"]) == ("preempted", saved)
    return {**train_with(backend, folder, name, resume="must", checkpoint_every=0), "first": first}
