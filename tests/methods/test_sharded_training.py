"""`--shard-optimizer` on live ranks: bits, files and resumptions as without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain import Backend, Callback, TrainConfig, Trainer
from hvdtrain.errors import InputError
from tests.methods import arms
from tests.methods.arms import SEVERAL, TWO
from tests.parity.interruption import train_with
from tests.parity.resume import Asks, Net, Stateful
from tests.ranks import Ranks
from tests.runs import Values, bits_of, run_json, saved_parts


class Wide(Stateful):
    """Layers that are divided among the ranks, two parameter groups, and a parameter that is never
    trained.
    """

    def model(self) -> nn.Module:
        net = Net(97)
        net.head.bias.requires_grad_(False)
        return net

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        made = super().optimizer(model.body)
        made.add_param_group({"params": [*model.head.parameters()], "lr": 0.01})
        return made


def train(
    backend: Backend, /, folder: Path, stop: int = 0, optimizer: str = "adamw", **changes: Any
) -> str:
    """Train, and stop after some steps; return the digest."""
    stops = [Asks("on_step_end", [stop], "stop", "the test")]
    task = partial(Wide, optimizer=optimizer)
    options = {"task": task, "epochs": 2, "checkpoint_every": 0, **changes}
    digest: str = train_with(backend, folder, "plain", callbacks=stops, **options)["digest"]
    return digest


SETTINGS: list[Values] = [
    {"optimizer": "sgd", "accumulate": 2, "clip_norm": 0.1, "lr": 0.1},
    {"ema": 0.9, "on_nonfinite": "skip"},
    {"precision": "fp16", "clip_norm": 0.5},
    {"precision": "fp16", "opt_level": "O2"},
    {"unused_parameters": "zero", "schedule": "one-cycle", "warmup_steps": 0},
]


@SEVERAL
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_the_bits_are_those_of_a_run_without_it(
    ranks: Ranks, changes: Values, tmp_path: Path
) -> None:
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    digests = ranks.run(train, mine, epochs=1, shard_optimizer=True, **changes)
    assert digests == ranks.run(train, plain, epochs=1, **changes)
    assert_same_files(plain, mine)
    assert run_json(mine)["backend"]["optimizer_shares"] == [ranks.n]


def assert_same_files(one: Path, other: Path) -> None:
    """Compare the last checkpoints bit by bit."""
    assert bits_of(saved_parts(one)) == bits_of(saved_parts(other))


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


class Clamps(Callback):
    """Changes the weights after a step, on every rank."""

    @torch.no_grad()
    def on_step_end(self, trainer: Trainer) -> None:
        for p in trainer.model.parameters():
            p.mul_(0.99)


def changed_weights(backend: Backend, folder: Path) -> str:
    with pytest.raises(InputError) as refused:
        train_with(backend, folder, "plain", callbacks=[Clamps()], shard_optimizer=True)
    return str(refused.value)


@TWO
def test_a_callback_that_changes_weights(ranks: Ranks, tmp_path: Path) -> None:
    (refused,) = set(ranks.run(changed_weights, tmp_path))
    assert "head.weight was changed outside step()" in refused
    assert "call optimizer.unshare_parameters() on " in refused


def prepared_with_local_gradients(backend: Backend) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with arms.options_of(backend, TrainConfig(shard_optimizer=True)):
        backend.prepare(model, optimizer, "local")


@TWO
def test_ranks_that_step_on_gradients_of_their_own_are_refused(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(prepared_with_local_gradients)
    assert [out.kind for out in outcomes] == ["InputError"] * ranks.n
