"""Training and evaluation data that is iterated over: `StreamBatches`, for IterableDataset.

Used by the Trainer, in place of the samplers of data_loading. Every rank, and each of its loader
processes, iterates over the same items; micro-batch k of all ranks is one run of them, and rank r
of n takes the items r, r + n, ... of each run. If a dataset has a method `rank_shard(rank, size)`,
that returns each rank's own part instead; one that `split_dataset_by_node` has split is read as it
is. Nobody knows the length in advance, so the ranks exchange
the sizes of their micro-batches before each step:

    rank 0   load 32 ─┐                  ┌─ train 32        load 32 ─┐              ┌─ train 32
                      ├─ all-reduce ─────┤                           ├─ all-reduce ─┤
    rank 1   load 32 ─┘ of [32, 32]      └─ train 32        load 7  ─┘ of [32, 7]   └─ by `uneven`
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterator, Sized
from contextlib import closing
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain._torch.worker_info import take_worker_info
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError
from hvdtrain.job.world import World
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import (
    StepBatches,
    derive_seed,
    moved,
    outlive_signals,
    worker_context,
)
from hvdtrain.training.determinism import RandomState

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:  # an option: `pip install 'hvdtrain[data]'`
    StatefulDataLoader = None

Collate = Callable[[list[Any]], Any]


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
        pad: bool,
        collate: Collate,
    ) -> None:
        has_shards = hasattr(dataset, "rank_shard")
        self.divides_itself = has_shards or _is_split(dataset, world)
        self._world_rank = self._rank = world.rank
        self._size = world.size
        if has_shards:
            dataset = cast("Any", dataset).rank_shard(world.rank, world.size)
        if self.divides_itself:
            self._rank, self._size = 0, 1
        self.dataset: Any = dataset
        self._batch_size, self._pad, self._collate = batch_size, pad, collate
        self._seed = seed
        self._number = 0
        self.begin(0, 0)

    def begin(self, epoch: int, skip: int) -> None:
        """Select the epoch, and how many items to skip. Not collective."""
        self._epoch, self._skip = epoch, skip
        self._random = RandomState(derive_seed(self._seed, epoch))
        self._items: Any = None
        self._state: dict[str, Any] | None = None
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        worker, workers = take_worker_info()
        # Ranks and loader processes must all see one order, also of a dataset that shuffles.
        self._random = RandomState(derive_seed(self._seed, self._epoch))
        state, self._state = self._state, None
        self._number, self._skip = (state["number"], state["skip"]) if state else (0, self._skip)
        if state is not None:
            self._random.load_state_dict(state["random"])
        with self._random:
            if state is not None and state["items"] is not None:
                self._items = self._restored(state["items"])
            else:
                self._items = iter(self.dataset)
                next(islice(self._items, self._skip, self._skip), None)
        while True:
            mine = self._number % workers == worker
            with self._random:
                found, samples = self._read(mine)
            position = self._skip + self._number * self._batch_size * self._size
            self._number += 1
            if not found:
                return
            if samples:
                # The same random numbers in whichever process, and in a resumed run.
                with RandomState(derive_seed(self._seed, self._epoch, self._world_rank, position)):
                    batch = self._collate(samples)
                yield len(samples), batch

    def _restored(self, state: Any) -> Any:
        """Return an iterator over the dataset in `state`."""
        if hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state)
            return iter(self.dataset)
        items: Any = iter(self.dataset)
        items.load_state_dict(state)
        return items

    def _read(self, mine: bool) -> tuple[int, list[Any]]:
        """Read one run; return how many items it has, and those of this rank if it is `mine`."""
        found, samples, length = 0, [], self._batch_size * self._size
        for slot, item in enumerate(islice(self._items, length)):
            found += 1
            if mine and slot % self._size == self._rank:
                samples.append(item)
        if self._pad and mine and 0 < found < length:
            with RandomState(derive_seed(self._seed, self._epoch)):
                # Closed at once: the next epoch must start at the first item again.
                with closing(self._again()) as again:
                    for slot, item in zip(range(found, length), again, strict=False):
                        if slot % self._size == self._rank:
                            samples.append(item)
        return found, samples

    def _again(self) -> Generator[Any, None, None]:
        """Yield the items from the start, over and over."""
        has_state = hasattr(self.dataset, "load_state_dict")
        # A copy: a dataset may return what it goes on changing.
        state = copy.deepcopy(self.dataset.state_dict()) if has_state else None
        try:
            while True:
                is_empty = True
                for item in self.dataset:
                    is_empty = False
                    yield item
                if is_empty:
                    raise InputError(
                        f"--uneven pad: {type(self.dataset).__name__} cannot be iterated over "
                        "twice; choose drop or join"
                    )
        finally:
            if has_state:
                self.dataset.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this process, for StatefulDataLoader."""
        if self._items is None:  # a loader process that has not begun
            begin = {"number": 0, "skip": self._skip, "random": None, "items": None}
            return begin if self._state is None else self._state
        owner = self.dataset if hasattr(self.dataset, "state_dict") else self._items
        return {
            "number": self._number,
            "skip": self._skip,
            "random": self._random.state_dict(),
            # A copy: the next items are read before a step ends, and before a loader process has
            # compared it with the last one and sent it.
            "items": copy.deepcopy(owner.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration where `state_dict` was called."""
        self._state = state


class StreamBatches:
    """This rank's micro-batches of a stream. Has the interface of ShardedBatches, as the Trainer
    uses it; the number of steps is known only if the dataset has a length.
    """

    has_state = True
    may_load_ahead = False  # the state of the loader must be that of the current step

    def __init__(
        self,
        dataset: IterableDataset[Any],
        config: TrainConfig,
        backend: Backend,
        collate: Collate,
    ) -> None:
        self._config, self._backend, self._world = config, backend, backend.world
        self.batch_size = config.micro_batch(self._world.size)
        self.num_samples = len(dataset) if isinstance(dataset, Sized) else None
        self.items = RankItems(
            dataset,
            self.batch_size,
            self._world,
            config.seed,
            config.uneven == "pad",
            collate,
        )
        stream = self.items.dataset
        self.order_name = type(stream).__name__
        self.why_skip = (
            f"{type(stream).__name__} has no state_dict"
            if not _is_stateful(stream)
            else "torchdata is not installed; pip install 'hvdtrain[data]'"
            if StatefulDataLoader is None
            else ""
        )
        """Why a resumed run skips the items that are used; empty if it need not."""
        self.loader = make_stream_loader(
            self.items, self._world, backend.device, config.workers, not self.why_skip
        )
        self._own = 0
        self._state: dict[str, Any] | None = None
        self._check_length()

    @property
    def global_micro_batch(self) -> int:
        """Samples in one micro-batch of all ranks."""
        return self.batch_size * self._world.size

    def _check_length(self) -> None:
        name = type(self.items.dataset).__name__
        if self.num_samples == 0:
            raise InputError(f"the training dataset ({name}) is empty")
        if self._config.uneven != "error":
            return
        if self.num_samples is None:
            raise InputError(
                f"--uneven error needs the number of samples, and {name} has no len(); give it a "
                "method __len__, or choose drop, pad or join"
            )
        if rest := self.num_samples % self.global_micro_batch:
            raise InputError(self._refusal(self.num_samples, rest))

    def _refusal(self, samples: int, rest: int) -> str:
        return (
            f"--uneven error: {samples} samples are not a multiple of one micro-batch of all "
            f"ranks, {self.batch_size} x {self._world.size} = {self.global_micro_batch}: {rest} "
            "are left over; choose another batch size, or --uneven drop, pad or join"
        )

    def begin(self, backend: Backend, epoch: int, start: int) -> None:
        """Select the epoch and the position to start from. Not collective."""
        if start == 0:
            self._own = 0
        self.items.begin(epoch, self._own if self.items.divides_itself else start)

    def samples_by_rank(self) -> list[int] | None:
        """Return None: what each rank will use is not known in advance."""
        return None

    def leftover(self) -> int | None:
        """Return the samples dropped (< 0) or repeated (> 0) in an epoch; None if not known."""
        if self.num_samples is None:
            return None
        if self._config.uneven == "join":
            return 0
        return self.batches_from(0) * self.global_micro_batch - self.num_samples

    def batches_from(self, start: int) -> int:
        """Return the number of micro-batches from `start` on; 0 if it is not known."""
        if self.num_samples is None:
            return 0
        full, rest = divmod(max(0, self.num_samples - start), self.global_micro_batch)
        return full + (rest > 0 and self._config.uneven in ("pad", "join"))

    def steps(self, accumulate: int, batches: Iterator[Any]) -> Iterator[StepBatches]:
        """Yield the steps of `accumulate` micro-batches from the selected position on. Collective.

        Loads one step ahead: a step must know whether it is the epoch's last.
        """
        ready = self._agree(batches, accumulate)
        while ready is not None:
            sizes, mine = ready
            own = [row[self._world.rank] for row in sizes]
            self._own += sum(own)
            # Now: the next step is loaded before this one may be saved.
            loader = None if self.why_skip else self.loader.state_dict()
            workers = self._config.workers
            self._state = {"own": self._own, "workers": workers, "loader": loader}
            following = self._agree(batches, accumulate)
            samples = sum(map(sum, sizes))
            weights = None
            if any(size != self.batch_size for row in sizes for size in row):
                weights = [size * self._world.size / max(1, samples) for size in own]
            yield StepBatches(len(sizes), samples, sum(own), weights, following is None, iter(mine))
            ready = following

    def _agree(self, batches: Iterator[Any], num: int) -> tuple[list[list[int]], list[Any]] | None:
        """Load one step, and return the sizes of its micro-batches by rank, and this rank's own.
        Collective. Returns None at the end of the epoch, which is the same on every rank.
        """
        mine, rank = list(islice(batches, num)), self._world.rank
        table = torch.zeros(num, self._world.size, dtype=torch.int64)
        for micro, (size, _) in enumerate(mine):
            table[micro, rank] = size
        rows: list[list[int]] = self._backend.all_reduce(table, "sum").tolist()
        sizes = [row for row in rows if any(row)]
        uneven = self._config.uneven
        if uneven in ("drop", "error"):
            full = [row for row in sizes if min(row) == self.batch_size]
            if uneven == "error" and len(full) < len(sizes):
                rest = sum(map(sum, sizes[len(full) :]))
                raise InputError(self._refusal(rest, rest), on_all_ranks=True)
            sizes = full
        found = [batch for _, batch in mine[: len(sizes)]]
        for micro, row in enumerate(sizes):
            if min(row) == 0:
                self._stand_in(found, micro, row)
        return (sizes, found) if sizes else None

    def _stand_in(self, found: list[Any], micro: int, row: list[int]) -> None:
        """Give the ranks without samples those of another rank. Collective.

        They count for `pad`, and have the weight 0 for `join`: see ShardedBatches.
        """
        if self._config.sync_bn and self._config.uneven == "join":
            raise InputError(
                f"--uneven join with --sync-bn: the ranks have {row} samples in a "
                "micro-batch, and each needs one; choose another batch size, or --uneven drop or "
                "pad",
                on_all_ranks=True,
            )
        largest = max(row)
        root = row.index(largest)
        sent = None
        if self._world.rank == root:
            sent = moved(found[micro], torch.device("cpu"))
        sent = self._backend.broadcast_object(sent, root)
        if row[self._world.rank] == 0:
            found.append(moved(sent, self._backend.device))
        if self._config.uneven == "pad":
            row[:] = [size or largest for size in row]

    # Checkpoints

    def state(self) -> dict[str, Any] | None:
        """Return this rank's position after the current step, for a checkpoint. Not collective."""
        return self._state

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
        mine: dict[str, Any] = states[self._world.rank] if same else {"own": 0, "loader": None}
        self._own, loaded = mine["own"], mine["loader"]
        if loaded is not None and not self.why_skip and mine["workers"] == self._config.workers:
            self.loader.load_state_dict(loaded)
            return
        why = self.why_skip or "another number of ranks or loader processes"
        items = self._own if self.items.divides_itself else start
        print_line(f"data     skipping the {items} samples used before the checkpoint ({why})")


def _is_split(dataset: Any, world: World) -> bool:
    """Return whether `split_dataset_by_node` of Hugging Face datasets has split the stream for this
    rank. Raises InputError if it has for others.
    """
    split = getattr(dataset, "_distributed", None)
    given = getattr(split, "rank", 0), getattr(split, "world_size", 1)
    if given == (0, 1):
        return False
    if given != (world.rank, world.size):
        raise InputError(
            f"the stream ({type(dataset).__name__}) is split for rank {given[0]} of {given[1]}, "
            f"and this is rank {world.rank} of {world.size}; return it whole, and each rank takes "
            "its part"
        )
    return True


def _is_stateful(dataset: Any) -> bool:
    """Return whether the dataset, or its iterator, has a state that torchdata can save."""
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        return True
    items = iter(dataset)
    return hasattr(items, "state_dict") and hasattr(items, "load_state_dict")


def _as_it_is(pair: Any) -> Any:
    return pair


def make_stream_loader(
    items: RankItems, world: World, device: torch.device, workers: int, stateful: bool = False
) -> Any:
    """Return the loader of one rank: torchdata's if it is to be `stateful`. Not collective."""
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 calls deprecated.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return (StatefulDataLoader if stateful else DataLoader)(
            items,
            batch_size=None,  # RankItems makes the batches
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=outlive_signals,
            # Not persistent: each epoch begins with the dataset as it was before the first one.
            multiprocessing_context=worker_context(workers, world),
            generator=torch.Generator(),
        )
