"""Means, sums and metric objects over ranks: what one process finds on all samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics.classification as classification
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset, TensorDataset
from torchmetrics import MetricCollection, PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper

from hvdtrain import Backend
from hvdtrain.errors import InputError
from hvdtrain.job.world import World
from hvdtrain.training.evaluation import Evaluation
from hvdtrain.training.metrics import Sum
from hvdtrain.training.task import CheckedTask
from tests.messages import Message
from tests.methods import data_runs
from tests.methods.arms import EVERYWHERE, TWO, WITH_HOROVOD, on
from tests.methods.data_runs import Streamed
from tests.methods.test_callbacks import fit_on_rank
from tests.methods.test_weighted_loss import Tokens, sentences
from tests.parity.resume import Stateful, fit
from tests.ranks import Ranks
from tests.runs import Values, records, run_json

CLASSES = 4
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # It keeps all samples, as the test wants.
    pytest.mark.filterwarnings("ignore:Metric `.*will save all targets and predictions"),
]


def samples(num: int) -> tuple[Tensor, Tensor]:
    """Scores by class, and the class."""
    generator = torch.Generator().manual_seed(num)
    scores = torch.randn(num, CLASSES, generator=generator, dtype=torch.float64).softmax(1)
    return scores, torch.randint(CLASSES, (num,), generator=generator)


def confusion(scores: Tensor, classes: Tensor) -> Tensor:
    flat = classes * CLASSES + scores.argmax(1)
    return torch.bincount(flat, minlength=CLASSES**2).reshape(CLASSES, CLASSES)


def share(num: int, batch: int, world: World) -> BatchSampler:
    """The batches of one rank."""
    return BatchSampler(range(world.rank, num, world.size), batch, drop_last=False)


# Sums


def summed(backend: Backend, num: int, batch: int) -> Values:
    scores, classes = samples(num)
    evaluation = Evaluation()
    for indices in share(num, batch, backend.world):
        part = scores[indices], classes[indices]
        correct = part[0].argmax(1) == part[1]
        values = {
            "confusion": Sum(confusion(*part)),
            "accuracy": correct.double().mean(),
            "correct": Sum(correct.sum()),
            "huge": Sum(torch.tensor(2**53 + 1)),
            "half": Sum(torch.tensor([0.5], dtype=torch.float16)),
        }
        evaluation.add(values, len(indices))
    return evaluation.reduce(backend)


@WITH_HOROVOD
@pytest.mark.parametrize(("num", "batch"), [(1, 2), (50, 4)])
def test_sums_are_exact(ranks: Ranks, num: int, batch: int) -> None:
    scores, classes = samples(num)
    matrix = confusion(scores, classes)
    correct = int(matrix.diagonal().sum())
    batches = sum(len(share(num, batch, World(rank=r, size=ranks.n))) for r in range(ranks.n))
    wanted = {
        "accuracy": pytest.approx(correct / num, rel=1e-15),
        "confusion": matrix.tolist(),
        "correct": correct,
        "huge": batches * (2**53 + 1),  # int64, not float64
        "half": 0.5 * batches,
    }
    for found in ranks.run(summed, num, batch):
        assert found == wanted
        assert [*found] == [*wanted]
        assert type(found["correct"]) is int


# Metric objects


class Largest:
    """A metric by the protocol alone: the largest value, the number of values, the first."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.high = torch.tensor(-math.inf)
        self.seen: list[Tensor] = []

    def update(self, scores: Tensor, classes: Tensor) -> None:
        self.high = torch.maximum(self.high, scores.max())
        self.seen.append(classes)

    def compute(self) -> dict[str, Tensor]:
        seen = torch.cat(self.seen)
        return {"high": self.high, "num": torch.tensor(len(seen)), "first": seen[0]}

    @property
    def metric_state(self) -> Values:
        return {"high": self.high, "seen": self.seen}

    _reductions = {"high": lambda stacked: stacked.amax(0), "seen": None}


def make_metrics() -> Values:
    """One of each kind of state: sums, joined lists, maxima, states that are not reduced; and one
    that is not of torchmetrics.
    """
    precision = classification.MulticlassPrecision(CLASSES)
    recall = classification.MulticlassRecall(CLASSES)  # shares the state of the first
    return {
        "auroc": classification.MulticlassAUROC(CLASSES),
        "matrix": classification.MulticlassConfusionMatrix(CLASSES),
        "of": ClasswiseWrapper(classification.MulticlassAccuracy(CLASSES, average=None)),
        "largest": Largest(),
        "pearson": PearsonCorrCoef(),
        "collection": MetricCollection({"precision": precision, "recall": recall}),
    }


def update(metrics: Values, scores: Tensor, classes: Tensor) -> Values:
    for name, metric in metrics.items():
        if name == "pearson":
            metric.update(scores[:, 0].float(), scores[:, 1].float())
        else:
            metric.update(scores, classes)
    others = {**metrics}
    return {**others.pop("collection"), **others}


def evaluated(backend: Backend, sizes: list[int], batch: int) -> list[Values]:
    """Evaluate several times with the same objects."""
    metrics = make_metrics()
    found = []
    for num in sizes:
        scores, classes = samples(num)
        evaluation = Evaluation()
        for indices in share(num, batch, backend.world):
            values = update(metrics, scores[indices], classes[indices])
            evaluation.add(values, len(indices))
        found.append(evaluation.reduce(backend))
    return found


@WITH_HOROVOD
def test_torchmetrics_finds_what_it_finds_in_one_process(ranks: Ranks) -> None:
    sizes = [50, 31, 40]
    everyone = ranks.run(evaluated, sizes, 4)
    assert all(found == everyone[0] for found in everyone), "the same bits on all ranks"
    for num, found in zip(sizes, everyone[0], strict=True):
        plain = make_metrics()
        named = update(plain, *samples(num))
        expected: Values = {}
        for name, metric in named.items():
            result = metric.compute()
            several = result if isinstance(result, dict) else {"": result}
            expected |= {f"{name}_{k}" if k else name: v.tolist() for k, v in several.items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            rtol = 1e-5 if name == "pearson" else 1e-12
            torch.testing.assert_close(
                torch.tensor(found[name]), torch.tensor(value), rtol=rtol, atol=0, msg=name
            )
        assert sum(map(sum, found["matrix"])) == num


@on(("ddp-torchrun", 3))
def test_a_rank_without_samples(ranks: Ranks) -> None:
    """Two samples on three ranks: the third has no batch, and knows of no metric."""
    everyone = ranks.run(evaluated, [2, 50], 4)
    # As text: NaN, of a class without a sample, is not equal to itself.
    assert len({repr(found) for found in everyone}) == 1
    assert [sum(map(sum, found["matrix"])) for found in everyone[0]] == [2, 50]


# What is refused


def test_a_new_object_for_every_batch_is_refused(message: Message) -> None:
    evaluation = Evaluation()
    evaluation.add({"x": Largest()}, 2)
    with message.raises(InputError):
        evaluation.add({"x": Largest()}, 2)


def unlike(backend: Backend, kind: str, warn: Any = None) -> Values:
    """Rank 0 differs from the others."""
    evaluation = Evaluation(warn)
    first = backend.world.rank == 0
    if kind == "shape":
        evaluation.add({"x": Sum(torch.ones(1 if first else 2))}, 1)
    elif kind == "kind":
        evaluation.add({"x": torch.ones(1) if first else Sum(torch.ones(1))}, 1)
    elif not first:
        evaluation.add({"x": Largest()}, 1)
    return evaluation.reduce(backend)


@TWO
@pytest.mark.parametrize("kind", ["shape", "kind", "missing"])
def test_ranks_that_differ_all_raise(ranks: Ranks, kind: str, message: Message) -> None:
    outcomes = ranks.outcomes(unlike, kind)
    assert [out.kind for out in outcomes] == ["InputError"] * ranks.n
    message(outcomes[0].text)
    if kind == "missing":  # later batches may have it
        assert all(math.isnan(found["x"]) for found in ranks.run(unlike, kind, print))


# In a run


@EVERYWHERE
@pytest.mark.parametrize("kind", ["tokens", "stream"])
def test_an_evaluation_is_that_of_one_process(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """A mean over tokens, of batches of other lengths on other ranks; and one of a stream."""
    num = 13 if ranks.n == 3 else 14
    is_stream = kind == "stream"
    task = Streamed(num, kind, True) if is_stream else Tokens(num, evaluates=True)
    batch: Any = data_runs.samples(num) if is_stream else sentences(num)
    found = ranks.run(data_runs.train, task, tmp_path, epochs=1, max_steps=1)
    model = task.model().double()
    nn.utils.vector_to_parameters(found[0]["weights"], model.parameters())
    loss: Any = task.loss(model, batch)
    wanted = loss.item() if is_stream else loss[0].item()
    assert run_json(tmp_path)["metrics"]["loss"] == pytest.approx(wanted, rel=1e-12)


class Sizes(Stateful):
    """Notes the sizes of the batches of its evaluation, of 7 samples."""

    def metrics(self, net: nn.Module, batch: Any) -> Values:
        self.seen.append([len(batch[0])])
        return super().metrics(net, batch)


@pytest.mark.parametrize(
    ("changes", "sizes"), [({}, [[3], [3], [1]]), ({"eval_batch_size": 5}, [[5], [2]])]
)
def test_the_batches_of_an_evaluation(
    changes: Values, sizes: list[list[int]], tmp_path: Path
) -> None:
    task = Sizes()
    fit(tmp_path, task=task, global_batch_size=3, max_steps=1, no_check=True, **changes)
    assert task.seen[1:] == sizes  # after the batch of the step


class Named(Stateful):
    """Evaluates twice: on 7 samples, and on other 11; also by a sum, an object and a derivation."""

    largest: Largest

    def datasets(self) -> tuple[Dataset[Any], Any]:
        train, _ = super().datasets()
        inputs = torch.randn(18, 5, generator=torch.Generator().manual_seed(5))
        parts = {"near": inputs[:7], "far": 3 * inputs[7:]}
        return train, {name: TensorDataset(x, torch.arange(len(x))) for name, x in parts.items()}

    def metrics(self, net: nn.Module, batch: Any) -> Values:
        self.largest.update(batch[1], batch[1])
        return {**super().metrics(net, batch), "sum": Sum(batch[1].sum()), "top": self.largest}

    def derived_metrics(self, totals: Values) -> Values:
        return {"root": math.sqrt(totals["loss"])}


@on(("single", 1), ("ddp-torchrun", 2))
def test_several_evaluation_data_by_name(ranks: Ranks, tmp_path: Path) -> None:
    task = Named(largest=Largest())
    ranks.run(
        fit_on_rank, tmp_path, task=task, early_stop="near_loss:min:9", keep_best="far_root:min"
    )
    metrics = run_json(tmp_path)["metrics"]
    names = ["loss", "sum", "top_high", "top_num", "top_first", "root"]
    assert [*metrics] == [f"{part}_{name}" for part in ("near", "far") for name in names]
    assert metrics["near_loss"] < metrics["far_loss"] == pytest.approx(metrics["far_root"] ** 2)
    assert (metrics["far_sum"], metrics["far_top_high"]) == (sum(range(11)), 10)
    evaluated = [record for record in records(tmp_path) if "eval_far_loss" in record]
    assert [record["step"] for record in evaluated] == [4, 8, 12]
    assert run_json(tmp_path)["best_checkpoint"]["metric"] == "far_root"


def test_a_name_of_evaluation_data_is_a_word(message: Message) -> None:
    class Unnamed(Stateful):
        def datasets(self) -> Any:
            return None, {"near and far": None}

    with message.raises(InputError):
        CheckedTask(Unnamed()).datasets()
