"""A loop of one's own: `Loader` has the batches of the Trainer, and with `Checkpoints` it goes on
where it was, whatever happens to its checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import TensorDataset

from hvdtrain import Backend, Checkpoints, Loader
from hvdtrain.cli import runs
from hvdtrain.errors import CheckpointError, InputError, WorldMismatch
from hvdtrain.training.metrics import agreed_fingerprint
from tests.methods.arms import EVERYWHERE, TWO, on
from tests.methods.data_runs import Stream
from tests.parity import resume
from tests.ranks import Ranks, single
from tests.runs import Values
from tests.training.test_checkpoint import flip_bit, names

TWO_RANKS = on(("ddp-torchrun", 2), pytest.param(("compat-torchrun", 2), marks=pytest.mark.slow))


def make(backend: Backend, seed: int = 0, width: int = 5) -> tuple[nn.Module, Any]:
    """Return a model, and what `prepare` makes of it and of its optimizer."""
    torch.manual_seed(seed + backend.world.rank)  # `prepare` makes the ranks equal
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    return model, backend.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))


def train(backend: Backend, folder: Path, steps: int, keep: int = 2) -> tuple[int, str, list[int]]:
    """Train up to `steps`, with a checkpoint after each; return the first step, the hash of the
    model, and the steps that a dict in the checkpoints counts.
    """
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    loader = Loader(backend, TensorDataset(x, x.prod(1)), 24 // backend.world.size)
    model, (net, optimizer) = make(backend)
    counted: dict[str, Any] = {"steps": [], "last": torch.zeros(1)}
    checkpoints = Checkpoints(backend, str(folder), keep)
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "counted": counted}
    first = step = checkpoints.load(**parts)
    while step < steps:
        for inputs, targets in loader:
            with backend.gradients(optimizer):
                nn.functional.mse_loss(net(inputs).squeeze(1), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            counted["steps"] = [*counted["steps"], step]
            counted["last"].fill_(step)
            checkpoints.save(step, **parts)
            if step == steps:
                break
    assert counted["last"] == step
    return first, agreed_fingerprint(backend, model), counted["steps"]


@TWO_RANKS
def test_a_loop_goes_on_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    (first, whole, _), *_ = ranks.run(train, tmp_path / "runs" / "whole", 7)
    assert first == 0
    (_, early, _), *_ = ranks.run(train, tmp_path / "parts", 3)
    assert early != whole
    assert ranks.run(train, tmp_path / "parts", 7) == [(3, whole, list(range(1, 8)))] * 2
    assert names(tmp_path / "parts") == ["step-00000006", "step-00000007"]
    manifest = json.loads((tmp_path / "parts/step-00000007/manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert set(manifest["files"]) == {"model.pt", "optimizer.pt", "loader.pt", "counted.pt"}
    assert ranks.run(train, tmp_path / "parts", 7)[0][0] == 7  # nothing is left


@TWO_RANKS
def test_a_damaged_newest_one_is_set_aside(ranks: Ranks, tmp_path: Path) -> None:
    """Else it would count as one of those to keep, and the valid ones would be removed."""
    (_, whole, _), *_ = ranks.run(train, tmp_path, 5)
    flip_bit(tmp_path / "step-00000005" / "model.pt")
    assert ranks.run(train, tmp_path, 5) == [(4, whole, list(range(1, 6)))] * 2
    assert names(tmp_path) == ["aside-step-00000005", "step-00000004", "step-00000005"]
    for step in (4, 5):
        flip_bit(tmp_path / f"step-0000000{step}" / "COMPLETE")
    assert ranks.run(train, tmp_path, 2, 1)[0][0] == 0
    assert names(tmp_path)[-1] == "step-00000002"


@TWO_RANKS
def test_a_save_that_was_killed_before_its_rename_is_finished(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(train, tmp_path, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".staging-step-00000002-1")
    (tmp_path / ".staging-step-00000003-1").mkdir()
    assert ranks.run(train, tmp_path, 2)[0][0] == 2
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@TWO_RANKS
def test_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """From one rank to two, and back."""
    train(single(), tmp_path, 2)
    first, early, _ = train(single(), tmp_path, 2)
    assert [of_rank[:2] for of_rank in ranks.run(train, tmp_path, 2)] == [(first, early)] * 2
    (_, later, _), *_ = ranks.run(train, tmp_path, 4)
    assert later != early
    assert train(single(), tmp_path, 4) == (4, later, [1, 2, 3, 4])


def refuse(backend: Backend, folder: Path) -> None:
    """Each refusal is raised on every rank; the ranks agree on the next collective."""
    checkpoints = Checkpoints(backend, folder)
    model, (_, optimizer) = make(backend)
    checkpoints.save(0, model=model)
    assert checkpoints.load(model=model) == 0
    with pytest.raises(CheckpointError, match=r"step-00000000 has no part 'optimizer'"):
        checkpoints.load(model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="another model or optimizer: .*size mismatch"):
        checkpoints.load(model=make(backend, width=6)[0])
    if backend.world.size > 1:
        with pytest.raises(WorldMismatch, match="the parts of a checkpoint = a0, but rank 1 .* a1"):
            checkpoints.load(**{f"a{backend.world.rank}": {}})
        own = Checkpoints(backend, folder / "own")
        own.save(0, layer=nn.Linear(3, 1))
        with pytest.raises(CheckpointError, match="size mismatch"):  # on rank 1 alone
            own.load(layer=nn.Linear(3 + backend.world.rank, 1))
    with pytest.raises(InputError, match="step is -1; give the number of steps taken"):
        checkpoints.save(-1, model=model)  # it would never be found
    with pytest.raises(InputError, match="keep is 0; keep one checkpoint or more"):
        Checkpoints(backend, folder, keep=0)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-00000001: .*"):
        checkpoints.save(1, model=model, paths={"here": Path()})
    file = folder / "file"
    if backend.world.rank == 0:
        file.touch()
    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint {file}"):
        Checkpoints(backend, file).save(1, model=model)
    assert checkpoints.load() == 0


@on(("single", 1), ("ddp-torchrun", 2))
def test_what_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(refuse, tmp_path / "of-a-loop")
    own = ["own"] * (ranks.n > 1)
    assert names(tmp_path / "of-a-loop") == ["file", *own, "step-00000000"]


def test_steps_of_a_loop_before_are_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a loop that does not load: else its own would be removed as the older ones."""
    Checkpoints(single(), tmp_path).save(900, place={"step": 900})
    loop, place = Checkpoints(single(), tmp_path), {"step": 1}
    loop.save(1, place=place)
    assert names(tmp_path) == ["aside-step-00000900", "step-00000001"]
    assert "set aside" in capsys.readouterr().out
    assert (loop.load(place=place), place) == (1, {"step": 1})
    found = CliRunner().invoke(runs.command, ["--checkpoints", str(tmp_path)])
    assert (found.exit_code, found.output.split()[-1]) == (0, "valid"), found.output


# The batches


def numbers(size: int = 50) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def batches(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


def take_epochs(backend: Backend, folder: Path) -> Values:
    each = 12 // backend.world.size
    loader = Loader(backend, numbers(), each, seed=resume.CONFIG.seed)
    found = [batches(loader) for _ in range(3)]
    assert len(loader) == len(found[0])
    return {"loader": found, "trainer": resume.train(backend, folder)["seen"]}


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


def refuse_data(backend: Backend) -> None:
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
    with pytest.raises(InputError, match="the rest is 2"):
        batches(Loader(backend, numbers(), 4, uneven="error"))
    padded = batches(Loader(backend, numbers(), 4, uneven="pad"))
    assert [len(batch) for batch in padded] == [4] * 7


@TWO
def test_bad_arguments(ranks: Ranks) -> None:
    ranks.run(refuse_data)
