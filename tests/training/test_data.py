"""Every sample where it belongs, at any number of ranks."""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable
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
    TensorDataset,
    get_worker_info,
)

from hvdtrain import Backend, TrainConfig
from hvdtrain.errors import InputError, WorldMismatch
from hvdtrain.job.world import World
from hvdtrain.training.data.loader import EvalData
from hvdtrain.training.data.loader_process import SeededBatches, make_loader
from hvdtrain.training.data.on_device import on_device
from hvdtrain.training.data.order import ShardedBatches, size_of
from hvdtrain.training.determinism import derive_seed
from tests.methods.arms import TWO
from tests.methods.data_runs import Stream, WithLength
from tests.parity.resume import Stateful, fit_on
from tests.ranks import Ranks
from tests.runs import Values

CPU = torch.device("cpu")
UNEVEN = st.sampled_from(["drop", "pad"])
quick = settings(max_examples=60, deadline=None, database=None)


def world(rank: int, size: int) -> World:
    return World(rank, size, rank, size)


def stub(rank: int, size: int) -> Any:
    """What loaders use of a backend."""
    return SimpleNamespace(world=world(rank, size), device=CPU)


def divided(num: int, batch: int, rank: int, size: int, **options: Any) -> ShardedBatches:
    config = TrainConfig(batch_size=batch, **{"seed": 0, **options})
    data: Any = range(num)
    return ShardedBatches(data, config, world(rank, size))


def on_all_ranks(
    num: int, batch: int, size: int, epoch: int = 0, start: int = 0, **options: Any
) -> list[list[list[int]]]:
    """The micro-batches of each rank, by rank."""
    found = []
    for rank in range(size):
        batches = divided(num, batch, rank, size, **options)
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


@quick
@given(st.integers(8, 100), UNEVEN, st.integers(0, 9))
def test_a_global_micro_batch_is_the_same_however_it_is_divided(
    num: int, uneven: str, seed: int
) -> None:
    one, *others = (
        by_step(on_all_ranks(num, 8 // size, size, uneven=uneven, seed=seed))
        for size in (1, 2, 4, 8)
    )
    assert one
    assert all(other == one for other in others)


def test_orders_differ_by_epoch_and_by_seed() -> None:
    orders = [
        tuple(flat(on_all_ranks(64, 8, 1, epoch, seed=seed)))
        for epoch in range(5)
        for seed in range(5)
    ]
    assert len(set(orders)) == 25


@quick
@given(
    st.integers(1, 150), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data(), UNEVEN
)
def test_an_epoch_and_what_is_left_of_it_at_any_world_size(
    num: int, batch: int, before: int, after: int, data: st.DataObject, uneven: str
) -> None:
    """Mid-epoch, no sample is lost or seen twice beyond what the end of an epoch drops or pads. At
    the same world size the order is that of the whole epoch.
    """
    whole = by_step(on_all_ranks(num, batch, before, 2, uneven=uneven))
    counts = Counter(sum(whole, []))
    assert divided(num, batch, 0, before, uneven=uneven).leftover() == counts.total() - num
    if uneven == "pad":
        assert max(counts.values()) - min(counts.values()) <= 1, "the repeats are not spread"
    steps = data.draw(st.integers(0, len(whole)))
    start = steps * batch * before
    ranks = on_all_ranks(num, batch, after, 2, start, uneven=uneven)
    assert before != after or by_step(ranks) == whole[steps:]
    seen = [index for step in whole[:steps] for index in step]
    rest = flat(ranks)
    if uneven == "drop":
        assert len({*seen, *rest}) == len(seen) + len(rest)
        assert 0 <= num - len(seen) - len(rest) < batch * after
    elif start < num:
        assert {*seen, *rest} == set(range(num))
        assert 0 <= len(seen) + len(rest) - num < batch * after
    else:
        assert not rest


def test_padding_costs_no_memory() -> None:
    """A wrong --batch-size must not repeat the data a million times over on every rank."""
    assert len(list(divided(10, 4, 0, 1 << 40, uneven="pad"))) == 1


@quick
@given(st.integers(1, 100), st.integers(1, 9), st.integers(1, 9))
def test_evaluation_takes_every_sample_once(num: int, batch: int, size: int) -> None:
    lists = []
    dataset: Any = range(num)
    for rank in range(size):
        data = EvalData(dataset, batch, stub(rank, size), TrainConfig(), {"collate_fn": list})
        found = list(data.batches(lambda t: t))
        assert all(0 < size == len(indices) <= batch for size, indices in found)
        lists.append([indices for _, indices in found])
    assert sorted(flat(lists)) == list(range(num))
    counts = [len(flat([batches])) for batches in lists]
    assert max(counts) - min(counts) <= 1


def test_loader_processes_have_a_seed_for_each_batch() -> None:
    def seeds(rank: int, epoch: int, start: int = 0) -> list[int]:
        batches = divided(24, 4, rank, 2)
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


def test_size_of() -> None:
    assert size_of(TensorDataset(torch.arange(3)), "training") == 3
    for dataset in (NoLength(), Stream(3), WithLength(3)):
        with pytest.raises(InputError, match=rf"training dataset \({type(dataset).__name__}\) has"):
            size_of(dataset, "training")
    with pytest.raises(InputError, match=r"evaluation dataset \(TensorDataset\) is empty"):
        size_of(TensorDataset(torch.empty(0)), "evaluation")


def loader_of(dataset: Any, workers: int, batch: int = 2, rank: int = 0, **options: Any) -> Any:
    """A loader of 8 samples in the order of an evaluation."""
    batches: Any = BatchSampler(range(8), batch, drop_last=False)
    return make_loader(dataset, batches, stub(rank, 2), TrainConfig(workers=workers), options)


def test_mpi_ranks_are_not_forked() -> None:
    mpi: Any = SimpleNamespace(world=World(0, 2, 0, 2, launcher="openmpi"), device=CPU)
    for workers, method in ((0, None), (1, "forkserver")):
        loader = make_loader(Noise(), divided(8, 2, 0, 2), mpi, TrainConfig(workers=workers), {})
        context: Any = loader.multiprocessing_context
        assert (context and context.get_start_method()) == method


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


def test_loader_processes_draw_other_numbers_on_other_ranks() -> None:
    drawn = []
    for rank in range(2):
        drawn += torch.cat(list(loader_of(Noise(), 1, rank=rank))).flatten().tolist()
    assert len(set(drawn)) == 16


def test_a_task_gives_further_arguments_of_dataloader() -> None:
    assert loader_of(Noise(), 1, prefetch_factor=5).prefetch_factor == 5
    assert list(loader_of(Noise(), 0, prefetch_factor=5, timeout=9))
    for name in ("num_workers", "fast"):
        with pytest.raises(InputError, match=rf"arguments of .* do not fit: .*{name}"):
            loader_of(Noise(), 0, **{name: 2})


class OfWorker(Noise):
    """Reads its own attributes through torch's worker info, as torch's manual shows."""

    first = 5

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        return info.id, info.dataset.first + index


def test_a_loader_process_knows_the_dataset_of_the_task() -> None:
    loader = loader_of(OfWorker(), 1, batch=4, collate_fn=list)
    assert sum(loader, []) == [(0, 5 + index) for index in range(8)]


class OfSizes(Stateful):
    """Its data have these numbers of samples."""

    sizes: list[int]

    def datasets(self) -> Any:
        return tuple(TensorDataset(torch.ones(n, 5), torch.arange(n)) for n in self.sizes)


def train_on_other_data(backend: Backend, own: Values, folder: Path) -> tuple[str, bool]:
    """Train with numbers of samples and options, of which rank 1 has some of its own."""
    given: Values = {"sizes": [50, 20], "batch_size": 4, "eval_batch_size": 4}
    given |= own if backend.world.rank else {}
    task = OfSizes(sizes=given.pop("sizes"))
    with pytest.raises(WorldMismatch) as refused:
        fit_on(backend, folder, task=task, global_batch_size=None, **given)
    return str(refused.value), refused.value.on_all_ranks


@TWO
@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"sizes": [80, 20]}, "has samples of training data = 50, but rank 1 on .* has 80; give"),
        ({"sizes": [50, 50]}, "has samples of evaluation data = 20, but rank 1 on .* has 50; give"),
        ({"batch_size": 8}, "has samples of a micro-batch = 4, but rank 1 on .* has 8; give"),
        ({"eval_batch_size": 8}, "has eval_batch_size = 4, but rank 1 on .* has 8; give"),
        (
            {"callback": ("hvdtrain:Callback",)},
            "has callbacks = none, but rank 1 on .* has Ca",
        ),
    ],
)
def test_the_ranks_must_have_the_same_data_and_callbacks(
    ranks: Ranks, own: Values, said: str, tmp_path: Path
) -> None:
    """One line, before the first step, on every rank; and no run directory."""
    for text, on_all_ranks in ranks.run(train_on_other_data, own, tmp_path / "run"):
        assert re.search(f"rank 0 on .* {said}", text), text
        assert on_all_ranks
    assert not (tmp_path / "run").exists()


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
