"""`Loader`: the batches of a loop of one's own are the Trainer's, and go on where they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from hvdtrain import Backend, Loader
from hvdtrain.errors import InputError, WorldMismatch
from tests.methods.arms import EVERYWHERE, TWO
from tests.methods.data_runs import Stream
from tests.parity.resume import CONFIG, train
from tests.ranks import Ranks
from tests.runs import Values


def numbers(size: int = 50) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def batches(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


def take_epochs(backend: Backend, folder: Path) -> Values:
    each = 12 // backend.world.size
    loader = Loader(backend, numbers(), each, seed=CONFIG.seed)
    found = [batches(loader) for _ in range(3)]
    assert len(loader) == len(found[0])
    return {"loader": found, "trainer": train(backend, folder)["seen"]}


@EVERYWHERE
def test_the_batches_are_the_trainers(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(take_epochs, tmp_path)
    for rank in found:
        assert sum(rank["loader"], []) == rank["trainer"]
    for epoch in range(3):
        taken = [index for rank in found for batch in rank["loader"][epoch] for index in batch]
        assert len(set(taken)) == len(taken) == 48
    assert found[0]["loader"][0] != found[0]["loader"][1]


def go_on(backend: Backend) -> None:
    whole = Loader(backend, numbers(), 4)
    first, second = batches(whole), batches(whole)
    for workers in (0, 2):
        loader = Loader(backend, numbers(), 4, workers=workers)
        states = [loader.state_dict() for _ in loader]
        again = Loader(backend, numbers(), 4, workers=workers)
        again.load_state_dict(states[1])
        assert batches(again) == first[2:]
        assert batches(again) == second
        again.load_state_dict(states[-1])
        assert batches(again) == []
        for _ in loader:
            break
        assert loader.epoch == 1
        assert len(batches(loader)) == len(first)
        assert loader.epoch == 3  # the second epoch was left in the middle


@EVERYWHERE
def test_it_goes_on_after_a_state_is_loaded(ranks: Ranks) -> None:
    ranks.run(go_on)


def refuse(backend: Backend) -> None:
    with pytest.raises(WorldMismatch, match="batch size = 4, but rank 1"):
        Loader(backend, numbers(), 4 + backend.world.rank)
    with pytest.raises(WorldMismatch, match="samples of data = 50, but rank 1"):
        Loader(backend, numbers(50 + backend.world.rank), 4)
    with pytest.raises(InputError, match="choose drop, pad or error"):
        Loader(backend, numbers(), 4, uneven="join")
    with pytest.raises(InputError, match="has no length"):
        Loader(backend, Stream(50), 4)
    with pytest.raises(InputError, match="larger than the training data"):
        Loader(backend, numbers(), 40)
    with pytest.raises(InputError, match="2 are left over"):
        batches(Loader(backend, numbers(), 4, uneven="error"))
    padded = batches(Loader(backend, numbers(), 4, uneven="pad"))
    assert [len(batch) for batch in padded] == [4] * 7


@TWO
def test_bad_arguments(ranks: Ranks) -> None:
    ranks.run(refuse)
