"""Evaluation with trained weights, and training that starts from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain import Backend, Trainer
from hvdtrain.training import weights
from hvdtrain.training.inference import Inference
from hvdtrain.training.metrics import fingerprint
from tests.methods.arms import SETTINGS, TWO, WITH_HOROVOD
from tests.methods.test_callbacks import fit_on_rank
from tests.parity.resume import CONFIG, Stateful
from tests.ranks import Ranks
from tests.runs import Values, newest, run_json, saved_steps

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: Values = {"global_batch_size": None, "batch_size": 2, "precision": "fp64"}


def train(ranks: Ranks, folder: Path, **changes: Any) -> list[tuple[Values, str]]:
    """Train; return the last evaluation, and the digest of the weights, for every rank."""
    ranks.run(fit_on_rank, folder, **{**OPTIONS, **changes})
    about = run_json(folder)
    return [(about["metrics"], about["params_sha256"])] * ranks.n


def evaluated(backend: Backend, /, path: Path, **changes: Any) -> tuple[Values, str]:
    """Evaluate; return the same as `train`."""
    config = replace(CONFIG, **{**OPTIONS, **changes})
    found = weights.find(path, ema=config.ema is not None) if backend.world.rank == 0 else None
    inference = Inference(Stateful(), backend, config, found)
    digest = fingerprint(inference.model.state_dict())
    return inference.evaluate(), digest


@WITH_HOROVOD
def test_an_evaluation_repeats_the_last_one_of_the_run(ranks: Ranks, tmp_path: Path) -> None:
    trained = train(ranks, tmp_path, checkpoint_every="2e")
    steps = 50 // (2 * ranks.n)
    assert saved_steps(tmp_path) == [2 * steps, 3 * steps]
    # Rank 0 alone has the weights; bits are equal on all ranks.
    assert ranks.run(evaluated, tmp_path) == trained
    earlier = tmp_path / "checkpoints" / f"step-{2 * steps:08d}"
    assert ranks.run(evaluated, earlier)[0] != trained[0]


@TWO
@pytest.mark.parametrize("method", ["SyncBatchNorm", "O2: fp16 weights"])
def test_an_evaluation_of_a_method(ranks: Ranks, tmp_path: Path, method: str) -> None:
    trained = train(ranks, tmp_path, **SETTINGS[method])
    assert ranks.run(evaluated, tmp_path, **SETTINGS[method]) == trained


@TWO
def test_an_evaluation_of_an_average(ranks: Ranks, tmp_path: Path) -> None:
    (metrics, digest), *_ = train(ranks, tmp_path, ema=0.9)
    average = ranks.run(evaluated, tmp_path, ema=0.9)
    for found, own in zip(average, ranks.run(evaluated, tmp_path), strict=True):
        assert (found[0], own[1]) == (metrics, digest)
        assert own[0] != metrics


# Training that starts from weights


def started(backend: Backend, /, path: Path, folder: Path, **changes: Any) -> str:
    config = replace(CONFIG, init_from=str(path), run_dir=str(folder), **{**OPTIONS, **changes})
    trainer = Trainer(Stateful(), backend, config)
    trainer.set_up(record="resume" in changes)
    return fingerprint(trainer.model.state_dict())


@TWO
def test_training_starts_from_weights(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, trained = train(ranks, run)[0]
    file = tmp_path / "ddp.pt"
    state = weights.read(weights.find(run))
    torch.save({f"module.{name}": value for name, value in state.items()}, file)
    for path in (run, newest(run), file):
        assert ranks.run(started, path, tmp_path / "x") == [trained] * ranks.n
    other = tmp_path / "other.pt"
    torch.save({name: value + 1 for name, value in state.items()}, other)
    # A checkpoint that is resumed replaces them.
    assert ranks.run(started, other, run, resume="must") == [trained] * ranks.n
    assert run_json(run)["config"]["init_from"] == str(other)
