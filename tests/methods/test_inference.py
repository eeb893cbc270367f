"""Evaluation with trained weights, and training that starts from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, Task, TrainConfig, Trainer
from hvdtrain.training import weights
from hvdtrain.training.inference import Inference
from hvdtrain.training.metrics import fingerprint
from tests.methods.arms import TWO, WITH_HOROVOD
from tests.methods.data_runs import Regression, samples
from tests.ranks import Ranks
from tests.runs import Values, newest, run_json, saved_steps

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = TrainConfig(seed=5, epochs=5, batch_size=2, precision="fp64", threads=1, keep=99, lr=0.01)


class Layered(Regression):
    """With layers whose evaluation differs from training."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        return TensorDataset(*samples(20)), TensorDataset(*samples(self.num))


def train(backend: Backend, /, task: Task, folder: Path, **changes: Any) -> tuple[Values, str]:
    """Train; return the last evaluation, and the digest of the weights."""
    result = Trainer(task, backend, replace(CONFIG, run_dir=str(folder), **changes)).fit()
    return result.metrics, result.params_sha256


def evaluated(backend: Backend, /, task: Task, path: Path, **changes: Any) -> tuple[Values, str]:
    """Evaluate; return the same as `train`."""
    ema = changes.get("ema") is not None
    found = weights.find(path, ema=ema) if backend.world.rank == 0 else None
    inference = Inference(task, backend, replace(CONFIG, **changes), found)
    digest = fingerprint(inference.model.state_dict())
    return inference.evaluate(), digest


@WITH_HOROVOD
def test_an_evaluation_repeats_the_last_one_of_the_run(ranks: Ranks, tmp_path: Path) -> None:
    trained = ranks.run(train, Layered(13), tmp_path, checkpoint_every="2e")
    steps = 20 // (2 * ranks.n)
    assert saved_steps(tmp_path) == [steps * epoch for epoch in (2, 4, 5)]
    # Rank 0 alone has the weights; bits are equal on all ranks.
    assert ranks.run(evaluated, Layered(13), tmp_path) == trained
    earlier = tmp_path / "checkpoints" / f"step-{2 * steps:08d}"
    assert ranks.run(evaluated, Layered(13), earlier)[0] != trained[0]


@TWO
@pytest.mark.parametrize(
    "method", [{"sync_bn": True}, {"precision": "fp16", "opt_level": "O2"}], ids=str
)
def test_an_evaluation_of_a_method(ranks: Ranks, tmp_path: Path, method: Values) -> None:
    trained = ranks.run(train, Layered(13), tmp_path, uneven="pad", **method)
    assert ranks.run(evaluated, Layered(13), tmp_path, uneven="pad", **method) == trained


@TWO
def test_an_evaluation_of_an_average(ranks: Ranks, tmp_path: Path) -> None:
    trained = ranks.run(train, Layered(13), tmp_path, ema=0.9)
    average = ranks.run(evaluated, Layered(13), tmp_path, ema=0.9)
    plain = ranks.run(evaluated, Layered(13), tmp_path)
    for (metrics, digest), found, own in zip(trained, average, plain, strict=True):
        assert (metrics, digest) == (found[0], own[1])
        assert own[0] != metrics


# Training that starts from weights


def started(backend: Backend, /, task: Task, path: Path, folder: Path, **changes: Any) -> str:
    config = replace(CONFIG, init_from=str(path), run_dir=str(folder), **changes)
    trainer = Trainer(task, backend, config)
    trainer.set_up(record="resume" in changes)
    return fingerprint(trainer.model.state_dict())


@TWO
def test_training_starts_from_weights(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, trained = ranks.run(train, Layered(5), run)[0]
    file = tmp_path / "ddp.pt"
    state = weights.read(weights.find(run))
    torch.save({f"module.{name}": value for name, value in state.items()}, file)
    for path in (run, newest(run), file):
        assert ranks.run(started, Layered(5), path, tmp_path / "x") == [trained] * ranks.n
    other = tmp_path / "other.pt"
    torch.save({name: value + 1 for name, value in state.items()}, other)
    # A checkpoint that is resumed replaces them.
    resumed = ranks.run(started, Layered(5), other, run, resume="must")
    assert resumed == [trained] * ranks.n
    assert run_json(run)["config"]["init_from"] == str(other)
