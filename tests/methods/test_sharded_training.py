"""`--shard-optimizer` on live ranks: bits, files and resumptions as without it."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain import Backend, Callback, TrainConfig, Trainer
from hvdtrain.errors import InputError
from hvdtrain.optim.sharded_optimizer import ShardedOptimizer
from tests.methods import arms
from tests.methods.arms import SEVERAL, TWO
from tests.parity.resume import CONFIG, Asks, Net, Stateful
from tests.ranks import Ranks, single
from tests.runs import Values, run_json


class WideNet(Net):
    """Layers that are divided among the ranks, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 97), nn.BatchNorm1d(97), nn.Dropout(0.3))
        self.head = nn.Linear(97, 1)


class Wide(Stateful):
    """Two parameter groups, one parameter that is never trained."""

    def model(self) -> nn.Module:
        model = WideNet()
        model.head.bias.requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        bias = [p for name, p in named.items() if "bias" in name]
        groups: Any = [
            {"params": [p for name, p in named.items() if "bias" not in name]},
            {"params": bias, "weight_decay": 0.0, "lr": 0.01},
        ]
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.02, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.02, amsgrad=True)


def train(
    backend: Backend,
    /,
    folder: Path,
    *callbacks: Callback,
    stop: int = 0,
    optimizer: str = "adamw",
    **changes: Any,
) -> str:
    """Train, and return the digest."""
    config: TrainConfig = replace(
        CONFIG, **{"run_dir": str(folder), "epochs": 2, "checkpoint_every": 0, **changes}
    )
    task = Wide(evaluates=config.ema is not None, optimizer=optimizer)
    with arms.options_of(backend, config):
        stops = Asks("on_step_end", [stop - 1], "stop", "the test")
        return Trainer(task, backend, config, callbacks=[stops, *callbacks]).fit().params_sha256


SETTINGS: list[Values] = [
    {"optimizer": "sgd", "accumulate": 2, "clip_norm": 0.1, "lr": 0.1},
    {"ema": 0.9, "on_nonfinite": "skip"},
    {"precision": "fp16", "clip_norm": 0.5},
    {"precision": "fp16", "opt_level": "O2"},
    {"unused_parameters": "zero", "schedule": "one-cycle", "warmup_steps": 0},
]


def train_by_each(backend: Backend, folder: Path, shards: bool) -> list[str]:
    """Train by each of `SETTINGS`."""
    return [
        train(backend, folder / str(number), epochs=1, shard_optimizer=shards, **changes)
        for number, changes in enumerate(SETTINGS)
    ]


@SEVERAL
def test_the_bits_are_those_of_a_run_without_it(ranks: Ranks, tmp_path: Path) -> None:
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    assert ranks.run(train_by_each, mine, True) == ranks.run(train_by_each, plain, False)
    for number in map(str, range(len(SETTINGS))):
        assert_same_files(plain / number, mine / number)
        assert run_json(mine / number)["backend"]["optimizer_shares"] == [ranks.n]


def contents(path: Path) -> dict[str, bytes]:
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def assert_same_files(one: Path, other: Path) -> None:
    """Compare the last checkpoints: model, optimizer and masters byte by byte."""
    first, second = (max((run / "checkpoints").glob("step-*")) for run in (one, other))
    assert first.name == second.name
    for name in ("model.pt", "optimizer.pt", "masters.pt"):
        assert contents(first / name) == contents(second / name)


def resumed(backend: Backend, folder: Path) -> dict[str, str]:
    """Stop after five steps and resume, with the option in one part of the run. With it in both:
    tests/parity.
    """
    found = {"whole": train(backend, folder / "whole")}
    for first in (False, True):
        run = folder / f"{first}"
        train(backend, run, stop=5, shard_optimizer=first)
        found[f"{first} first"] = train(backend, run, resume="must", shard_optimizer=not first)
    return found


@SEVERAL
def test_resuming_with_and_without_it(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(resumed, tmp_path):
        assert set(found.values()) == {found["whole"]}, found


@pytest.mark.usefixtures("one_thread")
@SEVERAL
def test_resuming_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """One process, then these ranks, then one process again."""
    digests = []
    for name, shards in (("plain", False), ("mine", True)):
        train(single(), tmp_path / name, stop=5)
        part = ranks.run(train, tmp_path / name, resume="must", shard_optimizer=shards)
        digests.append(part[0])
        digests.append(train(single(), tmp_path / name, resume="must", epochs=3))
    assert digests[:2] == digests[2:]


class Clamps(Callback):
    """Changes the weights after a step, on every rank."""

    def __init__(self, unshares: bool) -> None:
        self.unshares = unshares

    def on_step_end(self, trainer: Trainer) -> None:
        if self.unshares and isinstance(trainer.optimizer, ShardedOptimizer):
            trainer.optimizer.unshare_parameters()
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(0.99)


def changed_weights(backend: Backend, folder: Path, shards: bool, unshares: bool) -> str:
    try:
        return train(backend, folder, Clamps(unshares), epochs=1, shard_optimizer=shards)
    except InputError as error:
        return str(error)


@TWO
def test_a_callback_that_changes_weights(ranks: Ranks, tmp_path: Path) -> None:
    refused = ranks.run(changed_weights, tmp_path / "refused", True, False)
    assert len(set(refused)) == 1
    assert "head.weight was changed outside step()" in refused[0]
    assert "call unshare_parameters() of the optimizer on every rank before" in refused[0]
    mine = ranks.run(changed_weights, tmp_path / "mine", True, True)
    assert mine == ranks.run(changed_weights, tmp_path / "plain", False, True)


def prepared_with_local_gradients(backend: Backend) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with arms.options_of(backend, TrainConfig(shard_optimizer=True)):
        backend.prepare(model, optimizer, "local")


@TWO
def test_ranks_that_step_on_gradients_of_their_own_are_refused(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(prepared_with_local_gradients)
    assert [out.kind for out in outcomes] == ["InputError"] * ranks.n
