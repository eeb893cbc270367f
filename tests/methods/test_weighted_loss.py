"""A loss with a weight: the step of any ranks is that of one process on all their tokens."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend
from hvdtrain.errors import InputError
from hvdtrain.training.evaluation import Evaluation
from hvdtrain.training.metrics import WeightedMean
from hvdtrain.training.task import CheckedTask
from hvdtrain.training.weighted_loss import WeightedLosses
from tests.forkserver import warm
from tests.launching import ROOT, run
from tests.messages import Message
from tests.methods.arms import EVERYWHERE, TWO, WITH_HOROVOD, on, rest
from tests.methods.data_runs import (
    Regression,
    assert_is_one_process,
    loss_with,
    one_process,
    refusal,
    shuffled,
    train,
)
from tests.ranks import Ranks, single
from tests.runs import records, run_json

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES, LENGTH = 5, 6


def sentences(num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs by token, classes by token, of which -100 is padding, and the index.

    Every fourth sentence is padding alone.
    """
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(num, LENGTH, 3, generator=generator, dtype=torch.float64)
    classes = torch.randint(CLASSES, (num, LENGTH), generator=generator)
    lengths = torch.arange(num) * 3 % 4 * 2
    classes[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return inputs, classes, torch.arange(num)


class Tokens(Regression):
    """Its loss is a mean over tokens: for padding alone, it and its gradient are 0 / 0. `times`: in
    the weights. `sparse`: with an embedding of sparse gradients.
    """

    def __init__(
        self, num: int, times: int = 1, sparse: bool = False, evaluates: bool = False
    ) -> None:
        super().__init__(num)
        self.times, self.sparse, self.evaluates = times, sparse, evaluates

    def model(self) -> nn.Module:
        return Tagger(self.sparse)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        data = TensorDataset(*sentences(self.num))
        return data, data if self.evaluates else None

    def loss(self, net: nn.Module, batch: Any) -> Any:
        inputs, classes, index = batch
        self.seen.append(index.tolist())
        scores = net(inputs.to(next(net.parameters()).dtype), index).flatten(0, 1)
        wanted = classes.flatten()
        mask = wanted >= 0
        each = nn.functional.cross_entropy(scores, wanted.clamp(min=0), reduction="none")
        return (each * mask).sum() / mask.sum(), mask.sum() * self.times


class Tagger(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tags = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, CLASSES))
        self.embedding = nn.Embedding(999, 3, sparse=True) if sparse else None

    def forward(self, inputs: Tensor, index: Tensor) -> Tensor:
        if self.embedding is not None:
            inputs = inputs + self.embedding(index)[:, None]
        found: Tensor = self.tags(inputs)
        return found


@WITH_HOROVOD
@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 3), (4, 2)])
def test_it_is_one_process_on_all_tokens(
    ranks: Ranks, batch_size: int, accumulate: int, tmp_path: Path
) -> None:
    """Also micro-batches of padding alone, whose loss and gradient may be NaN; and ranks without a
    sample at the end.
    """
    step = accumulate * batch_size * ranks.n
    # The first number of samples with which no step is of padding alone: that is refused.
    for steps in range(2, 9):
        task = Tokens(step * steps + (ranks.n > 1), sparse=True)
        batches = list(shuffled(task.num, step))
        if not any(map(math.isnan, one_process(task, batches)[1])):
            break
    sizes = {"accumulate": accumulate, "batch_size": batch_size}
    found = ranks.run(train, task, tmp_path, uneven="join", **sizes)
    assert_is_one_process(found, task, batches, tmp_path)


@TWO
@pytest.mark.parametrize(
    ("precision", "compression", "rest"), [("fp16", "none", 0.005), ("fp32", "powersgd", 0.05)]
)
def test_large_weights_do_not_overflow_in_half(
    ranks: Ranks, precision: str, compression: str, rest: float, tmp_path: Path
) -> None:
    """Weights of a million times the number of tokens, beyond the range of fp16."""
    wanted, _ = one_process(Tokens(48), shuffled(48, 16))
    first, second = ranks.run(
        train,
        Tokens(48, times=10**6),
        tmp_path,
        accumulate=2,
        precision=precision,
        compression=compression,
    )
    assert torch.equal(first["weights"], second["weights"])
    assert (first["weights"] - wanted).abs().max() < rest
    assert {record.get("loss_scale", 65536) for record in records(tmp_path)} == {65536}


class OnOneRank(Tokens):
    """Forgets the weight on rank 0, from its call number `calls` on."""

    def __init__(self, num: int, calls: int = 0) -> None:
        super().__init__(num)
        self.calls = calls

    def loss(self, net: nn.Module, batch: Any) -> Any:
        loss, weight = super().loss(net, batch)
        forgets = os.environ["RANK"] == "0" and len(self.seen) > self.calls
        return loss if forgets else (loss, weight)


@TWO
def test_weights_that_are_all_0(ranks: Ranks, tmp_path: Path, message: Message) -> None:
    message(refusal(ranks, Tokens(48, times=0), tmp_path))


@on(("ddp-gloo", 2))
def test_a_weight_on_some_ranks_only(ranks: Ranks, tmp_path: Path, message: Message) -> None:
    message(refusal(ranks, OnOneRank(48), tmp_path))


def test_a_weight_in_some_calls_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    """Over Gloo, which does not compare the calls of ranks. One error, and no rank waits."""
    (line,) = errors_of_a_job(
        tmp_path, "OnOneRank", "--transport", "gloo", "--set", "num=48", "--set", "calls=3"
    )
    assert "OnOneRank.loss must return a weight with every loss, or with none; it returned" in line


def errors_of_a_job(folder: Path, task: str, *options: str) -> list[str]:
    """Train a task of this file on two ranks by torchrun; return the lines of its errors."""
    command = "torchrun --standalone --nproc-per-node 2 -m hvdtrain --backend ddp --precision fp64"
    command += f" --batch-size 4 --threads 1 --task {__name__}:{task} --run-dir {folder}/run"
    done = run(warm([*command.split(), *options]), env={"PYTHONPATH": str(ROOT)})
    assert done.code != 0
    return done.lines("error: ")


def differences_from_one_process(backend: Backend) -> list[float]:
    """Return the largest difference of each gradient of a model with SyncBatchNorm from that of one
    process with all samples. The loss of rank 1 has weight 0; its samples are in the statistics.
    """
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    alone, inputs = nn.Sequential(*layers).double(), torch.randn(8, 3, dtype=torch.float64)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))  # type: ignore[no-untyped-call]
    alone(inputs)[:4].square().mean().backward()
    net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, losses = backend.world.rank, WeightedLosses(backend, model.parameters(), 1, True)
    with backend.gradients(optimizer):
        loss = net(inputs[4 * rank : 4 * rank + 4]).square().mean()
        losses.scale(loss, 4.0 * (rank == 0)).backward()  # type: ignore[no-untyped-call]
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return [float((p.grad - q.grad).abs().max()) for p, q in pairs]


@on(("ddp-torchrun", 2), *rest(("compat-torchrun", 2)))
def test_samples_of_weight_0_count_in_synchronized_statistics(ranks: Ranks) -> None:
    for differences in ranks.run(differences_from_one_process):
        assert max(differences) < 1e-12, differences


class NothingOnRank1(Regression):
    """Divides by its weight, which is 0 on rank 1."""

    def __init__(self) -> None:
        super().__init__(48, conv=True)

    def loss(self, net: nn.Module, batch: Any) -> Any:
        weight = torch.tensor(float(os.environ["RANK"] == "0"))
        return super().loss(net, batch) * weight / weight, weight


def test_sync_batch_norm_sends_no_nan(tmp_path: Path) -> None:
    lines = errors_of_a_job(tmp_path, "NothingOnRank1", "--sync-bn", "--epochs", "1")
    (line,) = [line for line in lines if "weight 0 is not finite" in line]
    assert "weight.clamp(min=1)" in line


# What a task may return


class Returns(Tokens):
    def __init__(self, *weights: Any) -> None:
        super().__init__(4)
        self.weights = list(weights)

    def loss(self, net: nn.Module, batch: Any) -> Any:
        loss = net(batch[0], batch[2]).square().mean()
        weight = self.weights.pop(0)
        return loss if weight is None else (loss, weight)


def losses_of(*weights: Any) -> Iterator[Any]:
    """Call the loss of a task that returns these weights; yield what it returns once checked."""
    task = Returns(*weights)
    checked, model = CheckedTask(task), task.model().double()
    return (checked.loss(model, sentences(4)) for _ in weights)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor([3.0])])
def test_weights(weight: Any) -> None:
    ((_, found),) = losses_of(weight)
    assert found == float(weight)


@pytest.mark.parametrize(
    "weight", [-1, math.nan, torch.tensor(math.inf), "3", torch.ones(2)], ids=str
)
def test_no_weights(weight: Any, message: Message) -> None:
    with message.raises(InputError):
        next(losses_of(weight))


@pytest.mark.parametrize("weights", [(3, None), (None, 3)])
def test_a_weight_with_every_loss_or_with_none(weights: tuple[Any, Any]) -> None:
    calls = losses_of(*weights)
    next(calls)
    with pytest.raises(InputError):
        next(calls)


# Evaluation


@EVERYWHERE
def test_the_evaluation_is_a_mean_over_tokens(ranks: Ranks, tmp_path: Path) -> None:
    """13 or 14 sentences: batches of other lengths on other ranks."""
    num = 13 if ranks.n == 3 else 14
    task = Tokens(num, evaluates=True)
    found = ranks.run(train, task, tmp_path, max_steps=1)
    wanted = loss_with(found[0]["weights"], task, sentences(num))
    assert run_json(tmp_path)["metrics"]["loss"] == pytest.approx(wanted, rel=1e-12)


def test_a_mean_of_weight_0_does_not_count() -> None:
    evaluation = Evaluation()
    for value, weight in ((2.0, 3), (float("nan"), torch.tensor(0)), (6.0, 1.0)):
        evaluation.add({"a": WeightedMean(torch.tensor(value), weight)}, 100)
    assert evaluation.reduce(single()) == {"a": 3.0}


@pytest.mark.parametrize("value", [torch.ones(2), 2.0], ids=str)
def test_what_is_no_mean(value: Any, message: Message) -> None:
    with message.raises(InputError):
        WeightedMean(value, 1)


def test_an_evaluation_without_a_weight_has_no_mean() -> None:
    evaluation = Evaluation()
    evaluation.add({"a": WeightedMean(torch.tensor(1.0), 0)}, 4)
    with pytest.raises(InputError):
        evaluation.reduce(single())
