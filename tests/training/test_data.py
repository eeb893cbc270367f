"""Every sample where it belongs, at any number of ranks."""

from __future__ import annotations

import copy
import multiprocessing
import re
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from hvdtrain import Backend, TrainConfig, Trainer
from hvdtrain.errors import InputError, WorldMismatch
from hvdtrain.job.world import World
from hvdtrain.training.data.loader import EvalData
from hvdtrain.training.data.loader_process import SeededBatches, make_loader
from hvdtrain.training.data.on_device import on_device
from hvdtrain.training.data.order import ShardedBatches, size_of
from hvdtrain.training.determinism import derive_seed
from tests.parity.resume import Stateful
from tests.ranks import Ranks

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None, database=None)


def world(rank: int, size: int) -> World:
    return World(rank, size, rank, size)


def stub(world: World) -> Any:
    """What loaders use of a backend."""
    return SimpleNamespace(world=world, device=CPU)


def divided(
    num_samples: int, batch: int, world: World, seed: int = 0, uneven: str = "drop"
) -> ShardedBatches:
    config = TrainConfig(batch_size=batch, seed=seed, uneven=uneven)
    data: Any = range(num_samples)
    return ShardedBatches(data, config, world)


def in_turn(num: int, batch: int) -> Any:
    """The batches of an evaluation on one rank."""
    return BatchSampler(range(num), batch, drop_last=False)


def on_all_ranks(
    num_samples: int,
    batch: int,
    size: int,
    uneven: str,
    epoch: int = 0,
    start: int = 0,
    seed: int = 0,
) -> list[list[list[int]]]:
    """The micro-batches of each rank, by rank."""
    found = []
    for rank in range(size):
        batches = divided(num_samples, batch, world(rank, size), seed, uneven)
        batches.set_epoch(epoch, start)
        mine = list(batches)
        assert len(mine) == len(batches) == batches.batches_from(start)
        assert all(len(indices) == batch for indices in mine)
        found.append(mine)
    return found


def flat(ranks: list[list[list[int]]]) -> list[int]:
    return [index for batches in ranks for indices in batches for index in indices]


def by_step(ranks: list[list[list[int]]]) -> list[list[int]]:
    """What all ranks together get in each micro-batch, in rank order."""
    return [[i for indices in step for i in indices] for step in zip(*ranks, strict=True)]


sizes = {
    "num_samples": st.integers(1, 200),
    "batch": st.integers(1, 12),
    "size": st.integers(1, 5),
    "epoch": st.integers(0, 3),
}


@quick
@given(**sizes)
def test_drop_takes_no_sample_twice_and_pad_takes_every_one(
    num_samples: int, batch: int, size: int, epoch: int
) -> None:
    for uneven in ("drop", "pad"):
        counts = Counter(flat(on_all_ranks(num_samples, batch, size, uneven, epoch)))
        leftover = divided(num_samples, batch, world(0, size), 0, uneven).leftover() or 0
        assert counts.total() == num_samples + leftover
        assert set(counts) <= set(range(num_samples))
        if uneven == "drop":
            assert -batch * size < leftover <= 0
            assert set(counts.values()) <= {1}
        else:
            assert 0 <= leftover < batch * size
            assert len(counts) == num_samples
            assert max(counts.values()) - min(counts.values()) <= 1  # the repeats are spread


@quick
@given(
    num_samples=st.integers(8, 100), uneven=st.sampled_from(["drop", "pad"]), seed=st.integers(0, 9)
)
def test_a_global_micro_batch_is_the_same_however_it_is_divided(
    num_samples: int, uneven: str, seed: int
) -> None:
    one, *others = (
        by_step(on_all_ranks(num_samples, 8 // size, size, uneven, seed=seed))
        for size in (1, 2, 4, 8)
    )
    assert one
    assert all(other == one for other in others)


def test_orders_differ_by_epoch_and_by_seed() -> None:
    orders = {
        tuple(flat(on_all_ranks(64, 8, 1, "drop", epoch, seed=seed)))
        for epoch in range(5)
        for seed in range(5)
    }
    assert len(orders) == 25
    again = on_all_ranks(64, 8, 1, "drop", 3, seed=2)
    assert again == on_all_ranks(64, 8, 1, "drop", 3, seed=2)


@quick
@given(
    num_samples=st.integers(1, 150),
    batch=st.integers(1, 6),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    steps=st.integers(0, 10),
    uneven=st.sampled_from(["drop", "pad"]),
)
def test_resuming_at_another_world_size(
    num_samples: int, batch: int, before: int, after: int, steps: int, uneven: str
) -> None:
    """Mid-epoch, no sample is lost or seen twice beyond what the end of an epoch drops or pads."""
    first = by_step(on_all_ranks(num_samples, batch, before, uneven))
    steps = min(steps, len(first) - 1) if first else 0
    start = steps * batch * before
    seen = [index for step in first[:steps] for index in step]
    rest = flat(on_all_ranks(num_samples, batch, after, uneven, start=start))
    span = batch * after
    if uneven == "drop":
        assert len({*seen, *rest}) == len(seen) + len(rest)
        assert 0 <= num_samples - len(seen) - len(rest) < span
    else:
        assert {*seen, *rest} == set(range(num_samples))
        assert 0 <= len(seen) + len(rest) - num_samples < span


def test_resuming_continues_in_the_same_order() -> None:
    whole = by_step(on_all_ranks(50, 3, 2, "pad", epoch=2))
    for step in range(len(whole)):
        assert by_step(on_all_ranks(50, 3, 2, "pad", epoch=2, start=6 * step)) == whole[step:]
    assert on_all_ranks(50, 3, 2, "pad", start=54) == [[], []]


def test_padding_costs_no_memory() -> None:
    """A wrong --batch-size must not repeat the data a million times over on every rank."""
    batches = divided(10, 4, world(0, 1 << 40), 0, "pad")
    assert len(list(batches)) == 1


@quick
@given(num_samples=st.integers(1, 100), batch=st.integers(1, 9), size=st.integers(1, 9))
def test_evaluation_takes_every_sample_once(num_samples: int, batch: int, size: int) -> None:
    lists = []
    for rank in range(size):
        backend, options = stub(world(rank, size)), {"collate_fn": lambda s: [int(x) for (x,) in s]}
        data = EvalData(
            TensorDataset(torch.arange(num_samples)), batch, backend, TrainConfig(), options
        )
        found = list(data.batches(lambda t: t))
        assert all(0 < size == len(indices) <= batch for size, indices in found)
        lists.append([indices for _, indices in found])
    assert sorted(flat(lists)) == list(range(num_samples))
    counts = [sum(map(len, batches)) for batches in lists]
    assert max(counts) - min(counts) <= 1


def test_loader_processes_have_a_seed_for_each_batch() -> None:
    def seeds(rank: int, epoch: int, start: int = 0) -> list[int]:
        batches = divided(24, 4, world(rank, 2))
        batches.set_epoch(epoch, start)
        return [seed for seed, _ in SeededBatches(batches, 7, rank)]

    every = [seed for rank in range(2) for epoch in range(3) for seed in seeds(rank, epoch)]
    assert len(set(every)) == len(every) == 2 * 3 * 3
    assert seeds(1, 2, start=8) == seeds(1, 2)[1:]


def test_seeds_are_distinct_where_it_matters() -> None:
    """torch's CPU generator looks at 32 bits of its seed alone."""
    numbers = [(seed, step, rank) for seed in range(3) for step in range(1000) for rank in range(9)]
    assert len({derive_seed(*each) % (1 << 32) for each in numbers}) == len(numbers)
    short = [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0)]
    assert len({derive_seed(*each) for each in short}) == len(short)
    huge = derive_seed(10**30, 10**30)
    torch.Generator().manual_seed(huge)


# Datasets and loaders


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 3


def test_size_of() -> None:
    assert size_of(TensorDataset(torch.arange(3)), "training") == 3
    for dataset in (NoLength(), Stream(), SizedStream()):
        with pytest.raises(InputError, match=rf"training dataset \({type(dataset).__name__}\) has"):
            size_of(dataset, "training")
    with pytest.raises(InputError, match=r"evaluation dataset \(TensorDataset\) is empty"):
        size_of(TensorDataset(torch.empty(0)), "evaluation")


def loader_of(dataset: Any, batches: Any, world: World, workers: int, **options: Any) -> Any:
    return make_loader(dataset, batches, stub(world), TrainConfig(workers=workers), options)


def batches_of(workers: int) -> list[Any]:
    dataset = TensorDataset(torch.arange(40.0), torch.arange(40))
    batches = divided(40, 4, world(1, 2))
    loader = loader_of(dataset, batches, world(1, 2), workers)
    found = []
    for epoch, start in ((0, 0), (1, 0), (2, 16)):
        batches.set_epoch(epoch, start)
        found += list(on_device(loader, CPU, lambda t: t))
    return found


def test_loader_processes_change_nothing() -> None:
    alone, helped = batches_of(0), batches_of(2)
    assert len(alone) == len(helped) == 13
    for (x, y), (u, v) in zip(alone, helped, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    assert not multiprocessing.active_children()


def test_mpi_ranks_are_not_forked() -> None:
    mpi = World(0, 2, 0, 2, launcher="openmpi")
    for workers, method in ((0, None), (1, "forkserver")):
        context = loader_of(range(4), in_turn(4, 2), mpi, workers).multiprocessing_context
        assert (context and context.get_start_method()) == method


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


def test_loader_processes_draw_other_numbers_on_other_ranks() -> None:
    drawn = []
    for rank in range(2):
        loader = loader_of(Noise(), in_turn(8, 2), world(rank, 2), 1)
        drawn += torch.cat(list(loader)).flatten().tolist()
    assert len(set(drawn)) == 16


def test_a_task_gives_further_arguments_of_dataloader() -> None:
    loader = loader_of(Noise(), in_turn(8, 2), world(0, 1), 1, prefetch_factor=5)
    assert loader.prefetch_factor == 5
    assert list(loader_of(Noise(), in_turn(8, 2), world(0, 1), 0, prefetch_factor=5, timeout=9))
    for options in ({"num_workers": 2}, {"fast": True}):
        with pytest.raises(InputError, match=rf"arguments of .* do not fit: .*{[*options][0]}"):
            loader_of(Noise(), in_turn(8, 2), world(0, 1), 0, **options)


class OfWorker(Noise):
    """Reads its own attributes through torch's worker info, as torch's manual shows."""

    first = 5

    def __getitem__(self, index: int) -> Tensor:
        info: Any = get_worker_info()
        return torch.tensor(info.dataset.first + index)


def test_a_loader_process_knows_the_dataset_of_the_task() -> None:
    def collate(samples: list[Tensor]) -> list[int]:
        info: Any = get_worker_info()
        return [type(info.dataset) is OfWorker, info.id, *map(int, samples)]

    loader = loader_of(OfWorker(), in_turn(8, 4), world(0, 1), 1, collate_fn=collate)
    assert list(loader) == [[True, 0, 5, 6, 7, 8], [True, 0, 9, 10, 11, 12]]


class Uneven(Stateful):
    """The last rank has other data, to train on or to evaluate."""

    def __init__(self, last: bool, of: str) -> None:
        super().__init__()
        self.sizes = {"train": 50, "evaluation": 20}
        if last and of in self.sizes:
            self.sizes[of] += 30

    def datasets(self) -> Any:
        return tuple(TensorDataset(torch.ones(n, 5), torch.arange(n)) for n in self.sizes.values())


def train_on_other_data(backend: Backend, of: str, run_dir: Path) -> tuple[str, bool]:
    last = backend.world.rank == backend.world.size - 1
    batch = 8 if last and of == "batch" else 4
    of_evaluation = 8 if last and of == "evaluation batch" else 4
    config = TrainConfig(
        batch_size=batch, eval_batch_size=of_evaluation, epochs=1, run_dir=str(run_dir)
    )
    try:
        Trainer(Uneven(last, of), backend, config).fit()
    except WorldMismatch as error:
        return str(error), error.on_all_ranks
    return "no error", False


@pytest.mark.parametrize("ranks", [("ddp-torchrun", 2)], indirect=True)
def test_the_ranks_must_have_the_same_data(ranks: Ranks, tmp_path: Path) -> None:
    """One line, before the first step, on every rank; and no run directory."""
    wanted = {
        "train": "has samples of training data = 50, but rank {} on .* has 80; give",
        "evaluation": "has samples of evaluation data = 20, but rank {} on .* has 50; give",
        "batch": "has samples of a micro-batch = 4, but rank {} on .* has 8; give",
        "evaluation batch": "has eval_batch_size = 4, but rank {} on .* has 8; give",
    }
    for of, text in wanted.items():
        for said, on_all_ranks in ranks.run(train_on_other_data, of, tmp_path / of):
            assert re.search("rank 0 on .* " + text.format(ranks.n - 1), said), said
            assert on_all_ranks
        assert not (tmp_path / of).exists()


# Batches on their device


class Encoding(UserDict[str, Tensor]):
    """As BatchEncoding of transformers: a UserDict that moves itself."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: t.to(device) for name, t in self.data.items()}
        return self


class Graph:
    """As a batch of PyTorch Geometric: no dict, and not iterable."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


@dataclass(frozen=True)
class Pair:
    x: Tensor
    note: str
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.x.sum())


class Attributes(OrderedDict[str, Any]):
    """As ModelOutput of transformers, which has no update."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no update")

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


BATCHES: dict[str, tuple[Any, Callable[[Any], list[Tensor]]]] = {
    "tensors": ((torch.ones(2), [{"x": torch.ones(2)}]), lambda b: [b[0], b[1][0]["x"]]),
    "encoding": (Encoding(x=torch.ones(2)), lambda b: [b["x"]]),
    "graph": ([Graph(torch.ones(2)), "a note"], lambda b: [b[0].x]),
    "packed": (pack_sequence([torch.ones(3), torch.ones(2)]), lambda b: [b.data]),
    "mapping": (UserDict({"x": torch.ones(2)}), lambda b: [b["x"]]),
    "dataclass": ({"pair": Pair(torch.ones(2), "a")}, lambda b: [b["pair"].x, b["pair"].total]),
    "attributes": (Attributes(x=torch.ones(2)), lambda b: [b.x]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_whatever_can_be_moved_is_on_the_device(kind: str) -> None:
    batch, tensors = BATCHES[kind]
    (moved,) = on_device([copy.deepcopy(batch)], torch.device("meta"), lambda t: t)
    assert type(moved) is type(batch)
    assert {t.device.type for t in tensors(moved)} == {"meta"}
    (wide,) = on_device([copy.deepcopy(batch)], CPU, torch.Tensor.double)
    if kind not in ("graph", "packed"):
        assert {t.dtype for t in tensors(wide)} == {torch.float64}
