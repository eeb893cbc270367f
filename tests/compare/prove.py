"""What live ranks are asked for: a trace of an arm's first steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hvdtrain import Backend, TrainConfig, Trainer
from hvdtrain.backends import load
from hvdtrain.compare.probe.hvdtrain_probe import Probe
from hvdtrain.compare.proof.work_trace import RankTrace, trace_of
from hvdtrain.tasks.digits import Digits
from hvdtrain.training.task import Task
from tests.compare import faulty

STEPS = 4
CONFIG = TrainConfig(seed=3, batch_size=8, threads=1, epochs=1)


def record_trace(made: Trainer, steps: Iterator[Any], num_steps: int) -> RankTrace:
    """Take steps of a loop in this process; return what the probe records of them."""
    probe = Probe()
    probe._left = num_steps + 1  # it waits for no call
    handles = probe.hook()
    try:
        for _ in range(num_steps):
            next(steps)
        probe.call_trace(num_steps)
    finally:
        for handle in handles:
            handle.remove()
    assert probe._finish is not None
    return trace_of(probe._finish())


def tasks() -> dict[str, Task]:
    """By name."""
    return {
        "digits": Digits(width=8),
        "images": faulty.Images(),
        "biased": faulty.Biased(),
    }


def trainer(opened: Backend, name: str, task: str, changes: dict[str, Any]) -> Trainer:
    """`name`: a backend on the opened one's process group; empty for that itself."""
    config = replace(CONFIG, **changes)
    asked = config.backend_options()
    names = ("buffers", "compression", "shard_optimizer")
    options = replace(opened.options, **{name: getattr(asked, name) for name in names})
    backend = opened
    backend.options = options
    if name:
        backend = load(name)(opened.world, options)
        backend.open()
    made = Trainer(tasks()[task], backend, config)
    made.set_up(record=False)
    return made


def prove(opened: Backend, /, name: str, task: str, **changes: Any) -> RankTrace:
    """The trace of this rank. Runs on live ranks."""
    made = trainer(opened, name, task, changes)
    return record_trace(made, made.steps(), STEPS)
