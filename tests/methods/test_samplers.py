"""A task's own sampler or batch sampler: the ranks divide its order, and resume in it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, TensorDataset

from hvdtrain.errors import InputError
from hvdtrain.job.world import World
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.order import ShardedBatches, StepBatches, draw_order
from hvdtrain.training.determinism import RandomState, derive_seed
from hvdtrain.training.task import CheckedTask
from tests.messages import Message
from tests.methods.arms import SEVERAL, TWO
from tests.methods.data_runs import (
    Regression,
    Sampled,
    assert_is_one_process,
    flat,
    lengths,
    refusal,
    train,
)
from tests.ranks import Ranks

quick = settings(max_examples=60, deadline=None, database=None)
NUM = 26


def order_of(kind: str, epoch: int) -> list[Any]:
    """The sampler's order in plain torch."""
    task, seed = Sampled(NUM, kind), derive_seed(5, epoch)
    torch.manual_seed(seed)
    sampler = task.sampler(task.datasets()[0], seed)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return list(sampler)


@SEVERAL
@pytest.mark.parametrize("kind", ["weighted", "subset", "by epoch"])
def test_the_ranks_divide_the_order(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    batch = 2 if kind == "subset" else 4
    found = ranks.run(train, Sampled(NUM, kind), tmp_path, batch_size=batch)
    wanted: list[int] = []
    for epoch in range(2):
        order = order_of(kind, epoch)
        wanted += order[: len(order) // (batch * ranks.n) * batch * ranks.n]
    assert flat(found) == wanted


@SEVERAL
def test_batches_are_dealt_in_turn_and_weighted(ranks: Ranks, tmp_path: Path) -> None:
    """Batches of 1 to 4 samples: the mean is that of one process on each step's samples."""
    task = Sampled(NUM, "lengths")
    found = ranks.run(train, task, tmp_path, batch_size=None, uneven="join")
    used: list[Any] = []
    for epoch in range(2):
        batches = order_of("lengths", epoch)
        steps = (batches[first : first + ranks.n] for first in range(0, len(batches), ranks.n))
        used += [sum(step, []) for step in steps]
    assert_is_one_process(found, task, used, tmp_path)


@TWO
@pytest.mark.parametrize("kind", ["by rank", "endless", "lengths"])
def test_a_sampler_that_cannot_be_used(
    ranks: Ranks, kind: str, tmp_path: Path, message: Message
) -> None:
    """Its order differs between ranks or has no end, or it sets the batch size a second time."""
    text = re.sub(r"[0-9a-f]{8,}", "<hash>", refusal(ranks, Sampled(NUM, kind), tmp_path))
    message(re.sub(r"(rank \d) on \S+", r"\1", text))


def test_what_a_sampler_must_be() -> None:
    with pytest.raises(InputError, match=r"sampler \(list_iterator\) has no length"):
        draw_order(iter([1]), 0)
    for order in ([], [[1], []]):
        with pytest.raises(InputError, match=r"sampler \(list\) gives . items .* no empty batch"):
            draw_order(order, 0)
    assert draw_order(torch.arange(3), 0) == [0, 1, 2]

    class Distributed(Regression):
        def sampler(self, dataset: Any, seed: int) -> Any:
            return DistributedSampler(dataset, num_replicas=2, rank=0)

    task = Distributed(4)
    with pytest.raises(InputError, match="must return a sampler of all data"):
        CheckedTask(task).sampler(task.datasets()[0], 0)


def test_a_sampler_in_the_first_epoch_only_is_refused() -> None:
    """The batches of the next one would have a sample each."""
    config = TrainConfig(uneven="join")
    batches = ShardedBatches(
        TensorDataset(torch.ones(8)), config, World(), lambda _, seed: next(made)
    )
    with pytest.raises(InputError, match="returned None in epoch 2, but a sampler in epoch 1"):
        batches.set_epoch(1)


made = iter([[[0, 1], [2, 3, 4]], None])


@quick
@given(
    num=st.integers(1, 60),
    size=st.integers(1, 5),
    after=st.integers(1, 5),
    steps=st.integers(0, 20),
    uneven=st.sampled_from(["drop", "pad", "join"]),
)
def test_no_batch_is_lost_or_used_twice(
    num: int, size: int, after: int, steps: int, uneven: str
) -> None:
    """Also when the run is resumed with another number of ranks."""
    data, config = TensorDataset(torch.arange(num)), TrainConfig(uneven=uneven)

    def taken(rank: int, of: int, start: int) -> list[tuple[StepBatches, list[int]]]:
        """Return the steps of a rank, with its samples; those of weight 0 do not count."""
        batches = ShardedBatches(
            data, config, World(rank, of, rank, of), lambda _, seed: lengths(num, seed)
        )
        batches.set_epoch(1, start)
        pairs = zip(batches.steps(iter(())), batches, strict=True)
        return [(step, batch * bool(step.sizes[0][rank])) for step, batch in pairs]

    most = len(lengths(num, derive_seed(0, 1)))
    if uneven == "drop" and most < max(size, after):
        return
    whole = [taken(rank, size, 0) for rank in range(size)]
    done = min(steps, len(whole[0]) - 1)
    start = sum(step.samples for step, _ in whole[0][:done])
    parts = [pairs[:done] for pairs in whole] + [taken(rank, after, start) for rank in range(after)]
    counts = Counter(i for pairs in parts for _, batch in pairs for i in batch)
    if uneven == "join":
        assert counts == Counter(range(num))
    elif uneven == "pad":
        assert set(counts) == set(range(num))
    else:
        assert set(counts.values()) <= {1}


def test_random_state_leaves_the_programs_own() -> None:
    torch.manual_seed(1)
    own = RandomState(7)
    with own:
        first = torch.rand(2)
    outside = torch.rand(1)
    other = RandomState(0, own.state)
    with own, other:
        pass
    with other:
        rest = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(outside, torch.rand(1))
    torch.manual_seed(7)
    assert torch.equal(torch.cat([first, rest]), torch.rand(4))
