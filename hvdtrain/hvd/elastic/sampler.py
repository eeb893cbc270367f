"""ElasticSampler: divides the rest of an epoch among the current ranks. For elastic scripts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice

import torch.utils.data

from hvdtrain.hvd.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """This rank's share of the indices of a dataset of constant size, in Horovod's order.

    Put it into a `TorchState`, call `record_batch` after every batch, and `set_epoch` at the end of
    an epoch: a reset divides the samples not yet processed in it among the new ranks. The last
    round is padded with the first of these samples. `seed` must be the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with its own order and no processed samples.

        Call it at the end of the epoch before, or a reset in between repeats samples.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of `batch_size` samples on every rank as processed. Not collective."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of samples processed in it, by all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a `state_dict()`, with the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch among the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            # Seeded by both, so that all ranks, also new ones, shuffle alike.
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        filled = islice(cycle(self.remaining_indices), self.total_size)
        self.indices = list(filled)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
