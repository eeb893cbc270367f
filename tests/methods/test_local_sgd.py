"""Local SGD and DiLoCo, against a loop that plays all ranks in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, TrainConfig, Trainer
from tests.methods.arms import TWO
from tests.parity.trained import Regression
from tests.ranks import Ranks
from tests.runs import snapshot

CONFIG = TrainConfig(
    precision="fp64",
    batch_size=5,
    max_steps=10,
    epochs=9,
    threads=1,
    seed=3,
    log_every=100,
    eval_every=0,
)

on_live_ranks = pytest.mark.parametrize(
    "ranks", [("ddp-torchrun", 2), ("compat-torchrun", 3), ("horovod-mpi", 3)], indirect=True
)


class PlainSGD(Regression):
    """Without momentum, so that averaging after every step is synchronous training."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02)


class Words(PlainSGD):
    """A table of words whose gradients are sparse: in each step the ranks have other rows."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(300, 4, sparse=True), nn.Linear(4, 3))

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        words = torch.randint(300, (200, 2), generator=torch.Generator().manual_seed(5))
        data = TensorDataset(words, torch.stack([words.sum(1), words[:, 0], words[:, 1]], 1) / 300)
        return data, data


def trained(
    backend: Backend, /, folder: Path, kind: type[Regression] = Regression, **changes: Any
) -> dict[str, Any]:
    """Train; return the weights, and how many elements were reduced."""
    reduced: list[int] = []
    whole = type(backend).all_reduce

    def counted(self: Backend, t: Tensor, op: Any = "mean") -> Tensor:
        reduced.append(t.numel())
        return whole(self, t, op)

    trainer = Trainer(kind(), backend, replace(CONFIG, run_dir=str(folder), **changes))
    type(backend).all_reduce = counted  # type: ignore[method-assign]
    try:
        result = trainer.fit()
    finally:
        type(backend).all_reduce = whole  # type: ignore[method-assign]
    return {
        "weights": snapshot(trainer.model),
        "digest": result.params_sha256,
        "reduced": sum(n for n in reduced if n > 100),
    }


@on_live_ranks
@pytest.mark.parametrize(("kind", "changes"), [(PlainSGD, {}), (Words, {"local_warmup": 7})])
def test_averaging_after_every_step_is_synchronous_training(
    ranks: Ranks, kind: type[Regression], changes: dict[str, Any], tmp_path: Path
) -> None:
    local = ranks.run(trained, tmp_path / "local", kind, sync_every=1, **changes)
    whole = ranks.run(trained, tmp_path / "whole", kind)
    for one, other in zip(local, whole, strict=True):
        for name, t in one["weights"].items():
            torch.testing.assert_close(t, other["weights"][name], rtol=0, atol=1e-12)


@on_live_ranks
def test_the_average_of_ranks_that_step_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Two windows of three steps, and the last window, which the end of the run cuts short."""
    got = ranks.run(by_hand, 3, tmp_path)
    for trainer_weights, own_weights in got:
        for name, t in trainer_weights.items():
            torch.testing.assert_close(t, own_weights[name], rtol=0, atol=1e-12)


def by_hand(backend: Backend, every: int, folder: Path) -> tuple[Any, Any]:
    """Return the Trainer's weights, and those of this loop, whose ranks step alone."""
    mine = trained(backend, folder, sync_every=every)["weights"]
    trainer = Trainer(Regression(), backend, replace(CONFIG, sync_every=every))
    trainer.set_up(record=False)
    twin = copy.deepcopy(trainer.model)
    optimizer = trainer.task.optimizer(twin)
    batches: list[Any] = []
    trainer.on_batch = batches.append
    steps = trainer.steps()
    for step in range(1, 11):
        next(steps)
        inputs, targets = batches[-1]
        optimizer.zero_grad()
        (twin(inputs) - targets).square().mean().backward()
        optimizer.step()
        if step % every == 0 or step == 10:
            for p in twin.parameters():
                p.data.copy_(backend.all_reduce(p.data, "mean"))
    return mine, snapshot(twin)


@TWO
def test_evaluation_and_checkpoints_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [{}, {"eval_every": 1, "checkpoint_every": 1}]
    digests = {
        ranks.run(trained, tmp_path / str(i), sync_every=3, **way)[0]["digest"]
        for i, way in enumerate(ways)
    }
    assert len(digests) == 1


@TWO
def test_an_outer_step_of_rate_one_is_the_average(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(trained, tmp_path / "plain", sync_every=3)
    diloco, nesterov = (
        ranks.run(trained, tmp_path / outer, sync_every=3, outer_optimizer=outer)
        for outer in ("sgd:1:0", "nesterov:1")
    )
    for name, t in diloco[0]["weights"].items():
        torch.testing.assert_close(t, plain[0]["weights"][name], rtol=0, atol=1e-12)
    assert nesterov[0]["digest"] != plain[0]["digest"]


@TWO
def test_fewer_elements_are_sent(ranks: Ranks, tmp_path: Path) -> None:
    elements = 4 * 9 + 4 + 64 * 16 + 16 + 16 * 3 + 3
    for every, averages in ((4, 3), (16, 1)):
        sent = ranks.run(trained, tmp_path / str(every), sync_every=every)[0]["reduced"]
        assert sent == averages * elements
    warm = ranks.run(trained, tmp_path / "warm", sync_every=16, local_warmup=2)[0]["reduced"]
    assert warm == 3 * elements, "two steps of the warm-up, and the last"


@TWO
def test_an_averaged_state_is_another(ranks: Ranks, tmp_path: Path) -> None:
    own = ranks.run(trained, tmp_path / "own", sync_every=3)
    averaged = ranks.run(trained, tmp_path / "averaged", sync_every=3, local_state="average")
    assert own[0]["digest"] != averaged[0]["digest"]
