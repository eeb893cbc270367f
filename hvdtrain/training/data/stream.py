"""Data that is iterated over: `StreamBatches`, for the IterableDatasets of training and evaluation.

Every rank, and each of its loader processes, iterates over the same items; micro-batch k of all
ranks is one run of them, and rank r of n takes the items r, r + n, ... of each run. If a dataset
has a method `rank_shard(rank, size)`, that returns each rank's own part instead; one that
`split_dataset_by_node` has split is read as it is. Nobody knows the length in advance, so the ranks
exchange the sizes of their micro-batches before each step:

    rank 0   load 32 ─┐                  ┌─ train 32        load 32 ─┐              ┌─ train 32
                      ├─ all-reduce ─────┤                           ├─ all-reduce ─┤
    rank 1   load 32 ─┘ of [32, 32]      └─ train 32        load 7  ─┘ of [32, 7]   └─ by `uneven`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hvdtrain._torch.worker_info import take_worker_info
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError
from hvdtrain.job.world import World
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.on_device import moved
from hvdtrain.training.data.order import EpochBatches, StepBatches, length_of
from hvdtrain.training.determinism import RandomState, derive_seed


class RankItems(IterableDataset[tuple[int, Any]]):
    """One rank's micro-batches of a stream, as pairs of a size and a batch.

    Loader process w of W makes the rank's micro-batches w, w + W, ..., which is the order in which
    DataLoader asks for them: the number of processes changes no batch.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        world: World,
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        """`options`: arguments of DataLoader, of which `collate_fn` is used."""
        self.divides_itself, self.dataset = _divided(dataset, world)
        self._world_rank = world.rank
        self._rank, self._size = (0, 1) if self.divides_itself else (world.rank, world.size)
        self._batch_size, self._seed, self._collate = batch_size, seed, options["collate_fn"]
        self.begin(0, 0)

    def begin(self, epoch: int, skip: int) -> None:
        """Select the epoch, and how many items to skip. Not collective."""
        self._epoch, self._skip = epoch, skip
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        worker, workers = take_worker_info()
        run = self._batch_size * self._size
        # Ranks and loader processes must all see one order, also of a dataset that shuffles.
        shared = RandomState(derive_seed(self._seed, self._epoch))
        with shared:
            items = iter(self.dataset)
        position = unused = self._skip + worker * run
        while True:
            with shared:
                next(islice(items, unused, unused), None)
                # Reads the items of the other ranks, too, up to the end of the run.
                samples = [*islice(items, self._rank, run, self._size)]
            if not samples:
                return
            # The same random numbers in whichever process, and in a resumed run.
            with RandomState(derive_seed(self._seed, self._epoch, self._world_rank, position)):
                batch = self._collate(samples)
            yield len(samples), batch
            # The runs of the other loader processes are between this one and the next.
            unused = (workers - 1) * run
            position += workers * run


class StreamBatches(EpochBatches):
    """This rank's micro-batches of a stream. The number of steps is known only if the dataset has a
    length.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        config: TrainConfig,
        backend: Backend,
        options: Mapping[str, Any],
    ) -> None:
        """`options`: arguments of DataLoader. Raises InputError if no policy, or not this one, can
        divide the data.
        """
        super().__init__(config, backend.world)
        self._backend = backend
        length = length_of(dataset)
        self._starts = range((length or 0) + 1)
        self.items = RankItems(dataset, self.batch_size, backend.world, config.seed, options)
        self.order_name = type(self.items.dataset).__name__
        self._used = [0] * backend.world.size
        if length == 0:
            raise InputError(f"the training dataset ({type(dataset).__name__}) is empty")
        if config.uneven == "pad" or (config.uneven == "error" and length is None):
            raise InputError(
                f"--uneven {config.uneven} cannot be used with the stream {self.order_name}: pad "
                "needs an index, and error a method __len__; choose drop or join"
            )

    def begin(self, backend: Backend, epoch: int, start: int) -> None:
        """Select the epoch and the position to start from. Not collective."""
        if start == 0:
            self._used = [0] * self._world.size
        self.items.begin(epoch, self._num_used(start))

    def _num_used(self, start: int) -> int:
        """Return how many items of this rank's stream are before the position `start`."""
        return self._used[self._world.rank] if self.items.divides_itself else start

    def steps(self, batches: Iterator[Any]) -> Iterator[StepBatches]:
        """Yield the steps from the selected position on, given their micro-batches. Collective.

        Loads one step ahead: a step must know whether it is the epoch's last.
        """
        ready = self._agree(batches)
        while ready is not None:
            step = ready
            self._used = [sum(sizes) for sizes in zip(self._used, *step.sizes, strict=True)]
            ready = self._agree(batches)
            step.last = ready is None
            yield step

    def _agree(self, batches: Iterator[Any]) -> StepBatches | None:
        """Load and return one step; None at the end of the epoch, which is the same on every rank.
        Collective.
        """
        num, rank = self._config.accumulate, self._world.rank
        mine = list(islice(batches, num))
        table = torch.zeros(num, self._world.size, dtype=torch.int64)
        for micro, (size, _) in enumerate(mine):
            table[micro, rank] = size
        rows = self._backend.all_reduce(table, "sum").tolist()
        sizes = [row for row in rows if any(row)]
        if self._config.uneven != "join":
            full = [row for row in sizes if min(row) == self.batch_size]
            if self._config.uneven == "error" and len(full) < len(sizes):
                rest = sum(map(sum, sizes[len(full) :]))
                self._refuse_rest(rest, rest)
            sizes = full
        found = [batch for _, batch in mine[: len(sizes)]]
        for micro, row in enumerate(sizes):
            if min(row) == 0:
                # The ranks without samples get those of another, with the weight 0: see
                # ShardedBatches.
                self._check_shares()
                root = row.index(max(row))
                own = moved(found[micro], torch.device("cpu")) if rank == root else None
                sent = self._backend.broadcast_object(own, root)
                if row[rank] == 0:
                    found.append(moved(sent, self._backend.device))
        return StepBatches(sizes, rank, iter(found)) if sizes else None

    # Checkpoints

    def state(self) -> list[dict[str, int]]:
        """Return how many samples each rank has used in this epoch, in rank order, after the step
        that was yielded last. Not collective.
        """
        return [{"own": num} for num in self._used]

    def load_state(self, state: list[Any], start: int, print_line: Callable[[str], None]) -> None:
        """Continue at the position `start`, with the `state` there. Not collective.

        Raises InputError if the dataset divides itself, and was divided between more or fewer
        ranks.
        """
        if len(state) == self._world.size:
            self._used = [rank["own"] for rank in state]
        elif self.items.divides_itself:
            raise InputError(
                f"the checkpoint is from the middle of an epoch, and the dataset divides itself by "
                f"rank; resume with the same number of ranks: {len(state)}"
            )
        num = self._num_used(start)
        print_line(f"data     skipping the {num} samples used before the checkpoint")


def _divided(dataset: Any, world: World) -> tuple[bool, Any]:
    """Return whether a stream divides itself, and its part for this rank; else all of it. Raises
    InputError if `split_dataset_by_node` of Hugging Face datasets has split it for another rank.
    """
    if hasattr(dataset, "rank_shard"):
        return True, dataset.rank_shard(world.rank, world.size)
    split = getattr(dataset, "_distributed", None)
    given = getattr(split, "rank", 0), getattr(split, "world_size", 1)
    if given not in ((0, 1), (world.rank, world.size)):
        raise InputError(
            f"the stream ({type(dataset).__name__}) is split for rank {given[0]} of {given[1]}, "
            f"but this is rank {world.rank} of {world.size}; return it unsplit: each rank takes "
            "its part"
        )
    return given != (0, 1), dataset
