"""StreamBatches on a backend that goes on without a lost rank, as `ps` does: the peers' part of
each exchange is given, and the ranks after the first are lost at one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hvdtrain import BackendOptions, TrainConfig, World
from hvdtrain.backends.base import Op
from hvdtrain.backends.single import Single
from hvdtrain.training.data_loading import StepBatches
from hvdtrain.training.streams import StreamBatches


class Numbers(IterableDataset[Any]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.num))


class WithLength(Numbers):
    def __len__(self) -> int:
        return self.num


class Divided(Numbers):
    def rank_shard(self, rank: int, size: int) -> Numbers:
        return Numbers(self.num // size)


class Peers(Single):
    """Rank 0 of 3. The others send `by_exchange[k]` as their sizes; None is a lost rank."""

    def __init__(self, by_exchange: list[tuple[int | None, int | None]]) -> None:
        super().__init__(World(rank=0, size=3, local_rank=0, local_size=3), BackendOptions())
        self.by_exchange = by_exchange

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        total = t.clone()
        for rank, size in enumerate(self.by_exchange.pop(0), 1):
            if size is not None:
                total[:-1, rank] = size
                total[-1, rank] = 1
        return total


def windows(
    uneven: str, peers: list[tuple[int | None, int | None]], data: Numbers
) -> list[tuple[int, Any, bool]]:
    """Return samples, weights and `last` of each step, with 2 samples of a rank."""
    backend = Peers(peers)
    config = TrainConfig(batch_size=2, uneven=uneven)
    batches = StreamBatches(data, config, backend, torch.tensor)
    batches.begin(backend, 0, 0)
    found: list[StepBatches] = list(batches.steps(1, iter(batches.loader)))
    return [(window.samples, window.weights, window.last) for window in found]


@pytest.mark.parametrize("uneven", ["drop", "join", "pad", "error"])
def test_the_epoch_goes_on_without_a_lost_rank(uneven: str) -> None:
    """Rank 2 is lost before the third step, for which the others have full batches."""
    peers: list[tuple[int | None, int | None]] = [(2, 2), (2, 2), (2, None), (2, None), (0, None)]
    assert windows(uneven, peers, WithLength(24)) == [
        (6, None, False),
        (6, None, False),
        (6, None, False),  # with the items of rank 2, which are passed over
        (6, None, True),
    ]


def test_weights_count_the_ranks_that_are_left() -> None:
    """The last step has 2 and 1 samples; before, rank 2 is lost."""
    peers: list[tuple[int | None, int | None]] = [(2, 2), (1, None), (0, None)]
    (_, first, _), (samples, weights, last) = windows("join", peers, Divided(12))
    assert first is None
    assert (samples, last) == (3, True)
    # The mean over two ranks of (2 x 2/3, 1 x 2/3) times their means is the mean of all samples.
    assert weights == [pytest.approx(2 * 2 / 3)]


def test_a_rank_that_is_lost_after_the_exchange_of_a_step() -> None:
    """A step is loaded one ahead: its samples of rank 2 are not trained."""
    peers: list[tuple[int | None, int | None]] = [(1, 2), (0, None)]
    ((samples, weights, last),) = windows("join", peers, Divided(6))
    assert (samples, last) == (3, True)
    assert weights == [pytest.approx(2 * 2 / 3)]
