"""What live ranks are asked for: a trace of an arm's first steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.optim.optimizer as torch_optimizer
from torch import nn

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
        "attention": faulty.Attention(),
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


def hooks_left(opened: Backend, /, name: str) -> dict[str, object]:
    """What is still there of the watching when it is over. Runs on live ranks."""
    made = trainer(opened, name, "digits", {})
    steps = made.steps()
    before = _hooks(made)
    trace = record_trace(made, steps, 2)
    after = _hooks(made)
    next(steps)
    return {"before": before, "after": after, "grew": len(trace.steps) - 2}


def _hooks(made: Trainer) -> dict[str, object]:
    optimizer: Any = made.optimizer
    return {
        "call": nn.Module.__call__,
        "of all": (
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
        ),
        "pre": len(optimizer._optimizer_step_pre_hooks),
        "of parameters": sum(len(p._backward_hooks or ()) for p in made.model.parameters()),
    }
