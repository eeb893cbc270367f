"""Interruptions of a run on live ranks, and what each must leave: see test_interruption.py.

A kind of interruption trains in two parts. It returns the last part, which must end with the bits
of a run that was left alone, and in it the first one.

    stop      an exception before a step; resumed from the newest checkpoint
    request   the same, and a callback has requested that checkpoint in the step before
    end       a callback calls `Trainer.stop` in a step; resumed from the checkpoint after it
    signals   SIGUSR1: all ranks save after the same step and end; resumed from that checkpoint

A test of something that a run must resume adds a row to CONFIGURATIONS. Restarts by real launchers,
with killed processes: tests/launch/test_restart.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hvdtrain import Backend
from tests.methods.arms import SETTINGS, TASK, options_of
from tests.methods.data_runs import Sampled, Streamed
from tests.parity.resume import CASES, CONFIG, Asks, Stateful, train
from tests.runs import Values, run_json

UNEVEN: Values = {"precision": "fp64", "schedule": "constant", "uneven": "join"}
"""For the data below: the last steps of an epoch have fewer samples, and some ranks none."""


class Remembers(Stateful):
    """Its loss depends on its state, which rank 0 saves for all."""

    calls = 0

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(net, batch) * (self.calls % 3)

    def state_dict(self) -> Values:
        return {"calls": self.calls}

    def load_state_dict(self, state: Values) -> None:
        self.calls = state["calls"]


DATA: dict[str, Values] = {
    "state of a task": {"task": partial(Remembers, evaluates=False), "uneven": "drop"},
    "weighted sampler": {"task": partial(Sampled, 26, "weighted")},
    "batch sampler": {"task": partial(Sampled, 26, "lengths"), "global_batch_size": None},
    **{kind: {"task": partial(Streamed, 27, kind)} for kind in ("stream", "unequal", "split")},
    "stream, loader processes": {"task": partial(Streamed, 27, "stream"), "workers": 2},
    "unequal, loader processes": {"task": partial(Streamed, 27, "unequal"), "workers": 2},
}
"""Tasks with other data, and one with a state."""

CONFIGURATIONS: dict[str, Values] = {
    **CASES,
    "schedule by step": {"own_schedule": "step"},
    "schedule by epoch": {"own_schedule": "by epoch"},
    "own plateau": {"own_schedule": "plateau"},
    "accumulate": {"accumulate": 3},
    "fp64": {"precision": "fp64"},
    "evaluations by step": {"eval_every": 3, "keep_best": "loss"},
    # At this rate the second evaluation, at step 8, is the best on any of the arms of its rows.
    # Stopped at 15, the run goes on with a patience that is half used up, and ends at 16.
    "decisions at once": {
        "epochs": 5,
        "lr": 0.6,
        "schedule": "constant",
        "warmup_steps": 0,
        "keep": 1,
        "early_stop": "loss:2",
        "keep_best": "loss",
        "ema": 0.9,
    },
    **{name: {**UNEVEN, **changes} for name, changes in DATA.items()},
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


def stop(backend: Backend, /, folder: Path, name: str, at: int, **more: Any) -> Values:
    more = {"checkpoint_every": at - 1, **more}
    first = train_with(backend, folder, name, stop_at=at, **more)
    assert first["digest"] == "stopped"
    return {**train_with(backend, folder, name, resume="auto", **more), "first": first}


def request(backend: Backend, /, folder: Path, name: str, at: int) -> Values:
    asks = Asks("on_gradients", [at - 2], "request_checkpoint")  # the step is not counted yet
    return stop(backend, folder, name, at, checkpoint_every=0, callbacks=[asks])


def end(backend: Backend, /, folder: Path, name: str, at: int) -> Values:
    asks = Asks("on_gradients", [at - 1], "stop", "enough")
    first = train_with(backend, folder, name, checkpoint_every=0, callbacks=[asks])
    assert run_json(folder)["stopped_early"]["step"] == first["step"] == at
    return {**train_with(backend, folder, name, resume="must", checkpoint_every=0), "first": first}


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
