"""Runs of the Trainer on live ranks, on data that tell which samples each rank used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from hvdtrain import Backend, Task, TrainConfig, Trainer, shard_bounds
from hvdtrain.errors import HvdtrainError
from tests.methods.arms import options_of
from tests.parity.reference import epoch_order, seed_of
from tests.ranks import Ranks
from tests.runs import Values, fit_watched, records

CONFIG = TrainConfig(seed=5, epochs=2, batch_size=4, precision="fp64", log_every=1, threads=1)


def samples(num: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num, 3, generator=generator, dtype=torch.float64), torch.arange(num)


class Regression(Task):
    """Its loss is a mean over samples. It records the indices of the samples of each batch."""

    def __init__(self, num: int, conv: bool = False) -> None:
        self.num, self.conv = num, conv
        self.seen: list[list[int]] = []

    def model(self) -> nn.Module:
        first: list[nn.Module] = [nn.Linear(3, 4)]
        if self.conv:  # BatchNorm over 4 values of each sample
            first = [nn.Linear(3, 4), nn.Unflatten(1, (1, 4)), nn.BatchNorm1d(1), nn.Flatten(1)]
        return nn.Sequential(*first, nn.Tanh(), nn.Linear(4, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        return TensorDataset(*samples(self.num)), None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        inputs, index = batch
        self.seen.append(index.tolist())
        loss: Tensor = (net(inputs).squeeze(1) - inputs.prod(1)).square().mean()
        return loss


def lengths(num: int, seed: int) -> list[list[int]]:
    """Return a batch sampler: batches of 1 to 4 samples, in an order of its own."""
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).tolist()
    batches: list[list[int]] = []
    while order:
        batches.append(order[: 1 + len(batches) % 4])
        order = order[len(batches[-1]) :]
    return batches


class ByEpoch:
    """A sampler whose order is set by `set_epoch` alone."""

    epoch = -1

    def __init__(self, num: int, order: Callable[[int], Iterable[int]]) -> None:
        self.num, self.order = num, order

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch))


SAMPLERS: dict[str, Callable[[int, int], Iterable[Any]]] = {
    # Draws from torch's own generator.
    "weighted": lambda num, _: WeightedRandomSampler([1.0] * 5 + [9.0] * (num - 5), num),
    "subset": lambda num, _: SubsetRandomSampler(range(0, num, 2)),
    "lengths": lengths,
    "by epoch": lambda num, _: ByEpoch(num, lambda epoch: [(i + epoch) % num for i in range(num)]),
    "endless": lambda num, _: ByEpoch(num, lambda epoch: repeat(0)),
    # As that of a sampler with a seed of its own.
    "by rank": lambda num, _: torch.randperm(
        num, generator=torch.Generator().manual_seed(os.getpid())
    ),
}
"""By kind: a sampler of a number of samples, given a seed."""


class Sampled(Regression):
    def __init__(self, num: int, kind: str) -> None:
        super().__init__(num)
        self.kind = kind

    def sampler(self, dataset: Dataset[Any], seed: int) -> Iterable[Any]:
        return SAMPLERS[self.kind](self.num, seed)


class Stream(IterableDataset[Any]):
    """`num` items, of a length that it does not tell, in an order drawn while it is read."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        inputs, index = samples(self.num)
        left = list(range(self.num))
        while left:
            i = left.pop(int(torch.randint(min(6, len(left)), ())))
            yield inputs[i], index[i]


class Divided(Stream):
    """Divides itself: rank 0 has `more` items more than its part."""

    def __init__(self, num: int, more: int = 0) -> None:
        super().__init__(num)
        self.more = more
        self.items = range(num)

    def rank_shard(self, rank: int, size: int) -> Divided:
        part = Divided(self.num)
        start, end = shard_bounds(self.num - self.more, rank, size)
        later = range(self.num - self.more, self.num) if rank == 0 else range(0)
        part.items = [*range(start, end), *later]  # type: ignore[assignment]
        return part

    def __iter__(self) -> Iterator[Any]:
        inputs, index = samples(self.num)
        return ((inputs[i], index[i]) for i in self.items)


class SplitByNode(Stream):
    """Split for a rank before the task returns it, as split_dataset_by_node of Hugging Face does:
    that leaves the attribute `_distributed`.
    """

    def __init__(self, num: int, world_size: int | None = None) -> None:
        super().__init__(num)
        self.world_size = world_size

    @property
    def _distributed(self) -> Any:
        size = self.world_size or int(os.environ["WORLD_SIZE"])
        return SimpleNamespace(rank=int(os.environ["RANK"]), world_size=size)

    def __iter__(self) -> Iterator[Any]:
        given = self._distributed
        return islice(super().__iter__(), given.rank, None, given.world_size)


class ByWorker(Stream):
    """Divides itself between loader processes, as torch's manual advises."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return islice(super().__iter__(), worker, None, workers)


class WithLength(Stream):
    def __len__(self) -> int:
        return self.num


class Streamed(Regression):
    kinds: ClassVar[dict[str, Callable[[int], Stream]]] = {
        "stream": Stream,
        "with length": WithLength,
        "by worker": ByWorker,
        "divided": Divided,
        "unequal": lambda num: Divided(num, num // 2),
        "split": SplitByNode,
        "split for others": lambda num: SplitByNode(num, 8),
    }

    def __init__(self, num: int, kind: str, evaluates: bool = False) -> None:
        super().__init__(num)
        self.evaluates = evaluates
        self.stream = self.kinds[kind](num)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        return self.stream, Stream(self.num) if self.evaluates else None


def train(
    backend: Backend, /, task: Regression, run_dir: Path, stop_at: int = -1, **changes: Any
) -> Values:
    """Train, or die before step `stop_at`, after a checkpoint; return what this rank saw, and what
    came of it.
    """
    every = max(stop_at - 1, 0)
    config = replace(CONFIG, run_dir=str(run_dir), **{"checkpoint_every": every, **changes})
    with options_of(backend, config):
        trainer = Trainer(task, backend, config)
        try:
            found = fit_watched(trainer, stop_at)
        except HvdtrainError as error:
            return {"error": str(error), "on_all_ranks": error.on_all_ranks}
    return {
        **found,
        "seen": task.seen,
        "weights": nn.utils.parameters_to_vector(trainer.model.parameters()).detach().double(),
        "buffers": {name: t.clone() for name, t in trainer.model.named_buffers()},
    }


def steps(found: list[Values]) -> list[list[int]]:
    """Return the samples of all ranks, by micro-batch."""
    together = zip(*(rank["seen"] for rank in found), strict=True)
    return [sum(batches, []) for batches in together]


def flat(found: list[Values]) -> list[int]:
    """Return the samples of all ranks, in the order of `steps`."""
    return sum(steps(found), [])


def refusal(ranks: Ranks, task: Regression, run_dir: Path, **changes: Any) -> str:
    """Return the error with which a run is refused, which must be the same on every rank."""
    found = ranks.run(train, task, run_dir, **changes)
    assert all(rank["on_all_ranks"] for rank in found)
    (text,) = {rank["error"] for rank in found}
    return str(text)


def shuffled(num: int, per_step: int, config: TrainConfig = CONFIG) -> Iterator[Tensor]:
    """Yield the samples of each step of a run that drops none."""
    for epoch in range(config.max_epochs()):
        order = epoch_order(num, config.seed, epoch)
        yield from (order[start : start + per_step] for start in range(0, num, per_step))


def one_process(
    task: Regression, batches: Iterable[Tensor | list[int]]
) -> tuple[Tensor, list[float]]:
    """Train on these samples in each step, in plain torch; return the weights and each loss."""
    torch.manual_seed(seed_of(CONFIG.seed))
    model = task.model().double()
    optimizer = task.optimizer(model)
    data: Any = task.datasets()[0]
    losses = []
    for chosen in batches:
        optimizer.zero_grad()
        loss: Any = task.loss(model, data[chosen])
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return nn.utils.parameters_to_vector(model.parameters()).detach(), losses


def assert_is_one_process(
    found: list[Values], task: Regression, batches: Iterable[Tensor | list[int]], folder: Path
) -> None:
    """Compare the ranks' weights, and the losses in their run directory, with `one_process`."""
    wanted, losses = one_process(task, batches)
    for rank in found:
        assert (rank["weights"] - wanted).abs().max() < 1e-12
    assert [record["loss"] for record in records(folder)] == pytest.approx(losses, rel=1e-12)
