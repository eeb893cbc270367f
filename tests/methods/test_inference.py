"""Evaluation and prediction with trained weights, and training that starts from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, Task, TrainConfig, Trainer
from hvdtrain.errors import HvdtrainError
from hvdtrain.training import weights
from hvdtrain.training.inference import Inference
from hvdtrain.training.metrics import fingerprint
from tests.messages import Message
from tests.methods.arms import TWO, WITH_HOROVOD
from tests.methods.data_runs import Divided, Regression, Stream, samples
from tests.ranks import Ranks
from tests.runs import Values, newest, run_json, saved_steps

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = TrainConfig(seed=5, epochs=5, batch_size=2, precision="fp64", threads=1, keep=99)


class Indexed(Regression):
    """Predicts from each sample its index, in the form that `kind` names."""

    def __init__(self, num: int, data: str = "by index", kind: str = "tensor") -> None:
        super().__init__(num)
        self.data, self.kind = data, kind

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        streams: dict[str, Dataset[Any]] = {
            "stream": ByOrder(self.num),
            "divided": Divided(self.num),
        }
        data = streams.get(self.data, TensorDataset(*samples(self.num)))
        return TensorDataset(*samples(20)), data

    def predict(self, net: nn.Module, batch: Any) -> Any:
        assert not net.training
        assert not torch.is_grad_enabled()
        inputs, index = batch
        if self.kind == "list":
            return [{"index": int(i), "x": x} for i, x in zip(index, inputs, strict=True)]
        if self.kind == "dict":
            return {"index": index, "output": net(inputs).double()}
        if self.kind == "too few":
            return index[1:]
        if self.kind == "ragged":
            return torch.zeros(len(index), 1 + (int(index[0]) > 3))
        return "index" if self.kind == "text" else index


class ByOrder(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*samples(self.num), strict=True)))


class Plain(Indexed):
    predict = Task.predict


def indices(found: Any) -> list[int]:
    if isinstance(found, list):
        return [item["index"] for item in found]
    return (found["index"] if isinstance(found, dict) else found).tolist()  # type: ignore[no-any-return]


def predicted(backend: Backend, task: Task) -> Any:
    try:
        return Inference(task, backend, CONFIG, None).predict()
    except HvdtrainError as error:
        return f"{error.on_all_ranks} {error}"


@WITH_HOROVOD
@pytest.mark.parametrize("data", ["by index", "stream", "divided"])
def test_each_sample_is_predicted_once_and_in_order(ranks: Ranks, data: str) -> None:
    for num, kind in ((1, "dict"), (12, "list"), (13, "tensor")):
        first, *others = ranks.run(predicted, Indexed(num, data, kind))
        assert indices(first) == list(range(num)), (num, kind)
        assert others == [None] * (ranks.n - 1), "rank 0 alone has them"


@TWO
def test_a_task_without_predict_predicts_what_the_model_returns(ranks: Ranks) -> None:
    found, alone = ranks.run(outputs, Plain(13))[0]
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)
    assert found.shape == (13, 1)


def outputs(backend: Backend, task: Task) -> tuple[Any, Tensor]:
    """Return what is predicted, and what one process computes."""
    inference = Inference(task, backend, CONFIG, None)
    found = inference.predict()
    with torch.no_grad():
        return found, inference.model(samples(13)[0])


@TWO
@pytest.mark.parametrize("kind", ["too few", "ragged", "text"])
def test_what_predict_must_return(ranks: Ranks, kind: str, message: Message) -> None:
    texts = set(ranks.run(predicted, Indexed(12, kind=kind)))
    message("\n".join(texts))


# Evaluation


def train(backend: Backend, /, task: Task, folder: Path, **changes: Any) -> Values:
    result = Trainer(task, backend, replace(CONFIG, run_dir=str(folder), **changes)).fit()
    return {"metrics": result.metrics, "digest": result.params_sha256}


def evaluated(backend: Backend, /, task: Task, path: Path, **changes: Any) -> Values:
    ema = changes.get("ema") is not None
    found = weights.find(path, ema=ema) if backend.world.rank == 0 else None
    inference = Inference(task, backend, replace(CONFIG, **changes), found)
    digest = fingerprint(inference.model.state_dict())
    return {"metrics": inference.evaluate(), "digest": digest}


@WITH_HOROVOD
def test_an_evaluation_repeats_the_last_one_of_the_run(ranks: Ranks, tmp_path: Path) -> None:
    trained = ranks.run(train, Indexed(13), tmp_path, checkpoint_every="2e")
    steps = 20 // (2 * ranks.n)
    assert saved_steps(tmp_path) == [steps * epoch for epoch in (2, 4, 5)]
    # Rank 0 alone has the weights; bits are equal on all ranks.
    assert ranks.run(evaluated, Indexed(13), tmp_path) == trained
    earlier = tmp_path / "checkpoints" / f"step-{2 * steps:08d}"
    assert ranks.run(evaluated, Indexed(13), earlier)[0] != trained[0]


@TWO
@pytest.mark.parametrize(
    "method", [{"sync_bn": True}, {"precision": "fp16", "opt_level": "O2"}], ids=str
)
def test_an_evaluation_of_a_method(ranks: Ranks, tmp_path: Path, method: Values) -> None:
    trained = ranks.run(train, Indexed(13), tmp_path, uneven="pad", **method)
    assert ranks.run(evaluated, Indexed(13), tmp_path, uneven="pad", **method) == trained


@TWO
def test_an_evaluation_of_an_average(ranks: Ranks, tmp_path: Path) -> None:
    trained = ranks.run(train, Indexed(13), tmp_path, ema=0.9)
    average = ranks.run(evaluated, Indexed(13), tmp_path, ema=0.9)
    plain = ranks.run(evaluated, Indexed(13), tmp_path)
    for one, two, three in zip(trained, average, plain, strict=True):
        assert (one["metrics"], one["digest"]) == (two["metrics"], three["digest"])
        assert three["metrics"] != one["metrics"]


# Training that starts from weights


def started(backend: Backend, /, task: Task, path: Path, folder: Path, **changes: Any) -> str:
    config = replace(CONFIG, init_from=str(path), run_dir=str(folder), **changes)
    trainer = Trainer(task, backend, config)
    trainer.set_up(record="resume" in changes)
    return fingerprint(trainer.model.state_dict())


@TWO
def test_training_starts_from_weights(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = ranks.run(train, Indexed(5), run)[0]["digest"]
    file = tmp_path / "ddp.pt"
    state = weights.read(weights.find(run))
    torch.save({f"module.{name}": value for name, value in state.items()}, file)
    for path in (run, newest(run), file):
        assert ranks.run(started, Indexed(5), path, tmp_path / "x") == [trained] * ranks.n
    other = tmp_path / "other.pt"
    torch.save({name: value + 1 for name, value in state.items()}, other)
    # A checkpoint that is resumed replaces them.
    resumed = ranks.run(started, Indexed(5), other, run, resume="must")
    assert resumed == [trained] * ranks.n
    assert run_json(run)["config"]["init_from"] == str(other)
