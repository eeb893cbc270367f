"""A loss with a weight: the step of any ranks is that of one process on all their tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain.errors import InputError
from hvdtrain.training.evaluation import Evaluation
from hvdtrain.training.metrics import WeightedMean
from hvdtrain.training.task import CheckedTask
from tests.forkserver import warm
from tests.launching import ROOT, run
from tests.messages import Message
from tests.methods.arms import TWO, WITH_HOROVOD, on, rest
from tests.methods.data_runs import (
    CONFIG,
    Regression,
    assert_is_one_process,
    one_process,
    refusal,
    samples,
    shuffled,
    train,
)
from tests.parity.reference import seed_of
from tests.ranks import Ranks, single
from tests.runs import Values, records

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
    """Also micro-batches of padding alone, whose loss and gradient may be NaN: no step of theirs is
    skipped; and ranks without a sample at the end.
    """
    step = accumulate * batch_size * ranks.n
    # The first number of samples with which no step is of padding alone: that is refused.
    for steps in range(2, 9):
        task = Tokens(step * steps + (ranks.n > 1), sparse=True)
        batches = list(shuffled(task.num, step))
        if not any(map(math.isnan, one_process(task, batches)[1])):
            break
    options: Values = {"accumulate": accumulate, "batch_size": batch_size, "uneven": "join"}
    found = ranks.run(train, task, tmp_path, on_nonfinite="skip", **options)
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


class Weighs(Regression):
    """Returns these weights, those of each call on each rank, and then the last one; None: without.
    With the weight 0 its loss is NaN.
    """

    def __init__(self, by_rank: list[list[Any]], conv: bool = False) -> None:
        super().__init__(48, conv)
        self.by_rank = by_rank

    def loss(self, net: nn.Module, batch: Any) -> Any:
        loss = super().loss(net, batch)
        weights = self.by_rank[int(os.environ.get("RANK", 0))]
        weight = weights[min(len(self.seen), len(weights)) - 1]
        if isinstance(weight, int):
            loss = loss * weight / weight
        return loss if weight is None else (loss, weight)


@TWO
def test_weights_that_are_all_0(ranks: Ranks, tmp_path: Path, message: Message) -> None:
    message(refusal(ranks, Tokens(48, times=0), tmp_path))


@on(("ddp-gloo", 2))
def test_a_weight_on_some_ranks_only(ranks: Ranks, tmp_path: Path, message: Message) -> None:
    message(refusal(ranks, Weighs([[None], [1]]), tmp_path))


def test_a_weight_in_some_calls_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    """Over Gloo, which does not compare the calls of ranks. One error, and no rank waits."""
    weights = "by_rank=[[1,1,1,None],[1]]"
    (line,) = errors_of_a_job(tmp_path, "--transport", "gloo", "--set", weights)
    assert "Weighs.loss must return a weight with every loss, or with none; it returned" in line


def errors_of_a_job(folder: Path, *options: str) -> list[str]:
    """Train on two ranks by torchrun; return the lines of its errors."""
    command = "torchrun --standalone --nproc-per-node 2 -m hvdtrain --backend ddp --precision fp64"
    command += f" --batch-size 4 --threads 1 --task {__name__}:Weighs --run-dir {folder}/run"
    done = run(warm([*command.split(), *options]), env={"PYTHONPATH": str(ROOT)})
    assert done.code != 0
    return done.lines("error: ")


@on(("ddp-torchrun", 2), *rest(("compat-torchrun", 2)))
def test_samples_of_weight_0_count_in_synchronized_statistics(ranks: Ranks, tmp_path: Path) -> None:
    task = Weighs([[1.0], [0.0]], conv=True)
    found = ranks.run(train, task, tmp_path, sync_bn=True, max_steps=1)
    torch.manual_seed(seed_of(CONFIG.seed))
    model = task.model().double()
    optimizer = task.optimizer(model)
    inputs = samples(48)[0][sum((rank["seen"][0] for rank in found), [])]
    errors = model(inputs).squeeze(1) - inputs.prod(1)
    errors[:4].square().mean().backward()
    optimizer.step()
    for rank in found:
        wanted = nn.utils.parameters_to_vector(model.parameters())
        assert (rank["weights"] - wanted).abs().max() < 1e-12


def test_sync_batch_norm_sends_no_nan(tmp_path: Path) -> None:
    options = ("--sync-bn", "--epochs", "1", "--set", "conv=True", "--set", "by_rank=[[1],[0]]")
    lines = errors_of_a_job(tmp_path, *options)
    (line,) = [line for line in lines if "weight 0 is not finite" in line]
    assert "weight.clamp(min=1)" in line


# What a task may return


def losses_of(*weights: Any) -> Iterator[Any]:
    """Call the loss of a task that returns these weights; yield what it returns once checked."""
    task = Weighs([[*weights]])
    checked, model = CheckedTask(task), task.model().double()
    return (checked.loss(model, samples(4)) for _ in weights)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor([3.0])], ids=str)
def test_weights(weight: Any) -> None:
    assert next(losses_of(weight))[1] == 3.0


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


def test_a_mean_of_weight_0_does_not_count() -> None:
    evaluation = Evaluation()
    for value, weight in ((2.0, 3), (float("nan"), torch.tensor(0)), (6.0, 1.0)):
        evaluation.add({"a": WeightedMean(torch.tensor(value), weight)}, 100)
    assert evaluation.reduce(single()) == {"a": 3.0}
    nothing = Evaluation()
    nothing.add({"a": WeightedMean(torch.tensor(1.0), 0)}, 4)
    with pytest.raises(InputError):
        nothing.reduce(single())


@pytest.mark.parametrize("value", [torch.ones(2), 2.0], ids=str)
def test_what_is_no_mean(value: Any, message: Message) -> None:
    with message.raises(InputError):
        WeightedMean(value, 1)
