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

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain._torch.worker_info import take_worker_info
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError
from hvdtrain.job.world import World
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.loader_process import make_loader
from hvdtrain.training.data.on_device import moved
from hvdtrain.training.data.order import EpochBatches, StepBatches, length_of
from hvdtrain.training.determinism import RandomState, derive_seed

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:  # an option: `pip install 'hvdtrain[data]'`
    StatefulDataLoader = None


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
        self._epoch = epoch
        self._items: Any = None
        self._state: dict[str, Any] = {"number": 0, "skip": skip, "random": None, "items": None}
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        worker, workers = take_worker_info()
        state, length = self._state, self._batch_size * self._size
        self._number, skip = state["number"], state["skip"]
        # Ranks and loader processes must all see one order, also of a dataset that shuffles.
        self._random = RandomState(derive_seed(self._seed, self._epoch), state["random"])
        with self._random:
            items, has_state = state["items"], hasattr(self.dataset, "load_state_dict")
            if items is not None and has_state:
                self.dataset.load_state_dict(items)
            self._items = iter(self.dataset)
            if items is None:
                next(islice(self._items, skip, skip), None)
            elif not has_state:
                self._items.load_state_dict(items)
        while True:
            mine, found, samples = self._number % workers == worker, 0, []
            with self._random:
                for slot, item in enumerate(islice(self._items, length)):
                    found += 1
                    if mine and slot % self._size == self._rank:
                        samples.append(item)
            position = skip + self._number * length
            self._number += 1
            if not found:
                return
            if samples:
                # The same random numbers in whichever process, and in a resumed run.
                with RandomState(derive_seed(self._seed, self._epoch, self._world_rank, position)):
                    batch = self._collate(samples)
                yield len(samples), batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this process, for StatefulDataLoader."""
        if self._items is None:  # a loader process that has not begun
            return self._state
        owner = self.dataset if hasattr(self.dataset, "state_dict") else self._items
        return {
            "number": self._number,
            "skip": self._state["skip"],
            "random": self._random.state,
            # A copy: the next items are read before a step ends, and before a loader process has
            # compared it with the last one and sent it.
            "items": copy.deepcopy(owner.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration where `state_dict` was called."""
        self._state = state


class StreamBatches(EpochBatches):
    """This rank's micro-batches of a stream. The number of steps is known only if the dataset has a
    length.
    """

    has_state = True

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
        stream = self.items.dataset
        self.order_name = type(stream).__name__
        self.why_skip = ""
        """Why a resumed run skips the items that are used; empty if it need not."""
        if not (_has_state(stream) or _has_state(iter(stream))):
            self.why_skip = f"{self.order_name} has no state_dict"
        elif StatefulDataLoader is None:
            self.why_skip = "torchdata is not installed; pip install 'hvdtrain[data]'"
        kind = DataLoader if self.why_skip else StatefulDataLoader
        self.loader = make_loader(self.items, None, backend, config, options, kind)
        self._own = 0
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
            self._own = 0
        self.items.begin(epoch, self._own if self.items.divides_itself else start)

    def steps(self, batches: Iterator[Any]) -> Iterator[StepBatches]:
        """Yield the steps from the selected position on, given their micro-batches. Collective.

        Loads one step ahead: a step must know whether it is the epoch's last.
        """
        ready = self._agree(batches)
        while ready is not None:
            step = ready
            self._own += sum(row[step.rank] for row in step.sizes)
            # Now: the next step is loaded before this one may be saved.
            loader = None if self.why_skip else self.loader.state_dict()
            self.state = {"own": self._own, "workers": self._config.workers, "loader": loader}
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

    def load_state(self, states: list[Any], start: int, print_line: Callable[[str], None]) -> None:
        """Continue at the position `start`, with every rank's `state`. Not collective.

        Raises InputError if the dataset divides itself, and was divided between more or fewer
        ranks.
        """
        same = len(states) == self._world.size
        if not same and self.items.divides_itself:
            raise InputError(
                f"the checkpoint is from the middle of an epoch with {len(states)} ranks, and the "
                f"dataset divides itself; resume with {len(states)} ranks"
            )
        mine = states[self._world.rank] if same else {"own": 0}
        self._own, loaded = mine["own"], mine.get("loader")
        if loaded is not None and not self.why_skip and mine["workers"] == self._config.workers:
            self.loader.load_state_dict(loaded)
            return
        why = self.why_skip or "another number of ranks or loader processes"
        items = self._own if self.items.divides_itself else start
        print_line(f"data     skipping the {items} samples used before the checkpoint ({why})")


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
            f"and this is rank {world.rank} of {world.size}; return it whole, and each rank takes "
            "its part"
        )
    return given != (0, 1), dataset


def _has_state(owner: object) -> bool:
    """Return whether a dataset, or its iterator, has a state that torchdata can save."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
