"""Data with an index: the order of an epoch, and the part of it that each rank takes.

`RunData` and `Loader` use `ShardedBatches`. The order is a permutation by seed and epoch, equal on
every rank and at every number of ranks, or that of the task's own sampler. Its items are samples,
or the batches of a batch sampler. The k-th micro-batches of all ranks are one contiguous run of it:

    order      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 | 16 17 18     2 ranks, 4 items each
    rank 0     0 1 2 3         | 8 9 10 11             | by `uneven`
    rank 1             4 5 6 7 |           12 13 14 15 |

So one number, the samples before a position in the order, is the whole progress of an epoch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from hvdtrain.backends.base import Backend
from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import InputError
from hvdtrain.job.world import World
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.determinism import RandomState, derive_seed
from hvdtrain.training.sharding import shard_bounds

_MAX_BATCH = 1 << 40  # samples; with more, --uneven pad would fill the memory with repeats

MakeSampler = Callable[[Dataset[Any], int], "Iterable[Any] | None"]
"""Task.sampler: makes a sampler of a dataset, from a seed."""


@dataclass
class StepBatches:
    """The micro-batches of one optimizer step."""

    sizes: list[list[int]]
    """The samples of each micro-batch, by rank."""
    rank: int
    data: Iterator[Any]
    """Yields the micro-batches, and may go on with those of the next step."""
    last: bool = False
    """Whether it is the last of the epoch."""

    @property
    def num(self) -> int:
        """The number of micro-batches."""
        return len(self.sizes)

    @property
    def samples(self) -> int:
        """Samples of all ranks: what the position in the epoch advances by."""
        return sum(map(sum, self.sizes))

    @property
    def weights(self) -> list[float] | None:
        """Factors of this rank's losses, so that the mean over the ranks is the mean over the
        samples. None if all micro-batches have equal sizes: then each factor is 1 / num.
        """
        if len({size for row in self.sizes for size in row}) == 1:
            return None
        samples = self.samples
        return [row[self.rank] * len(row) / samples for row in self.sizes]


class EpochBatches(ABC):
    """This rank's micro-batches of an epoch, of data with an index or of a stream: their number,
    and what the policy `uneven` makes of the last run, which may be short.
    """

    order_name = ""
    """The class of the task's sampler or stream; empty for a permutation."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._config, self._world = config, world
        self.batch_size = self._each = config.micro_batch(world.size)
        self._starts: Sequence[int] = range(1)
        """The position of each item of the order, and the end of the last one. A range, except for
        the batches of a batch sampler; of a stream without a length the 0 alone.
        """

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None if they are not known."""
        return self._starts[-1] or None

    @property
    def global_micro_batch(self) -> int:
        """Samples in one micro-batch of all ranks."""
        return self.batch_size * self._world.size

    @property
    def _run(self) -> int:
        """Items in one micro-batch of all ranks."""
        return self._each * self._world.size

    def _items_left(self, start: int) -> int:
        """Return how many items there are from a position on, which counts samples."""
        return len(self._starts) - bisect_right(self._starts, start)

    def _position(self, item: int) -> int:
        """Return how many samples are before an item of the order, which repeats itself."""
        rounds, item = divmod(item, len(self._starts) - 1)
        return rounds * self._starts[-1] + self._starts[item]

    def batches_from(self, start: int) -> int:
        """Return how many micro-batches each rank gets from position `start` on; 0 if that is not
        known.
        """
        full, rest = divmod(self._items_left(start), self._run)
        return full + (rest > 0 and self._config.uneven in ("pad", "join"))

    def leftover(self) -> int | None:
        """Return the samples dropped (< 0) or repeated (> 0) in an epoch; None if not known."""
        if self.num_samples is None:
            return None
        if self._config.uneven == "join":
            return 0
        return self._position(self.batches_from(0) * self._run) - self.num_samples

    def samples_by_rank(self) -> list[int] | None:
        """Return the samples that each rank uses in a whole epoch; None if not known."""
        return None

    @abstractmethod
    def begin(self, backend: Backend, epoch: int, start: int) -> None:
        """Select the epoch and the position to start from. May be collective."""

    @abstractmethod
    def steps(self, batches: Iterator[Any]) -> Iterator[StepBatches]:
        """Yield the steps from the selected position on, given their micro-batches. May be
        collective.
        """

    def check(self, start: int = 0) -> None:
        """Raise InputError if the policy refuses the samples from `start` on.

        Not collective: the same on every rank.
        """
        left = self._items_left(start)
        rest = left % self._run
        if 0 < rest < self._world.size:
            self._check_shares()
        if rest and self._config.uneven == "error":
            self._refuse_rest(left, rest)

    def _check_shares(self) -> None:
        """Raise InputError if a rank without a sample in the last batch cannot take part in it."""
        if self._config.uneven == "join" and self._config.sync_bn:
            raise InputError(
                "--uneven join with --sync-bn: the last batch of an epoch has no sample for some "
                f"of the {self._world.size} ranks, and each needs one; choose another batch size, "
                "or --uneven drop",
                on_all_ranks=True,
            )

    def _refuse_rest(self, left: int, rest: int) -> None:
        raise InputError(
            f"--uneven error: {left} {self._unit} are not a multiple of one micro-batch of all "
            f"ranks, {self._each} x {self._world.size} = {self._run}: the rest is {rest}; choose "
            "another batch size, or --uneven drop or join",
            on_all_ranks=True,
        )

    @property
    def _unit(self) -> str:
        """What the items are, for messages."""
        return "samples" if isinstance(self._starts, range) else "batches of the task's sampler"

    def state(self) -> list[dict[str, int]] | None:
        """Return what a checkpoint needs beside the position, of all ranks; None if nothing."""
        return None

    def load_state(  # noqa: B027
        self, state: list[Any], start: int, print_line: Callable[[str], None]
    ) -> None:
        """Continue at the position `start`, with the `state` there. Not collective."""


class ShardedBatches(EpochBatches):
    """This rank's micro-batches of data with an index, as lists of indices.

    The last run of the order is dropped, padded from the start of the order, or, for `join`,
    divided between the ranks. A rank without a part of it then gets a sample of another rank's,
    with the weight 0: it must take part in the collectives of the step.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        config: TrainConfig,
        world: World,
        sampler: MakeSampler | None = None,
    ) -> None:
        """`sampler`: that of the task, if it has one. Raises InputError for data without an index,
        and for a sampler that gives no order.
        """
        super().__init__(config, world)
        self._dataset, self._sampler = dataset, sampler
        self._size, self.epoch = size_of(dataset, "training"), -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Select the epoch, which sets the order, and the position to start from.

        Every rank must pass the same values.
        """
        if epoch != self.epoch:
            self._items: Sequence[Any] = []  # only one order is in memory
            self._items = self._draw(epoch)
            self._starts = range(len(self._items) + 1)
            if isinstance(self._items[0], list):
                sizes = [*map(len, self._items)]
                self._starts = [*accumulate(sizes, initial=0)]
                self._each, self.batch_size = 1, max(sizes)
        self.epoch, self._start = epoch, start

    def _draw(self, epoch: int) -> Sequence[Any]:
        """Return the order of the task's sampler, and keep its class name; else a permutation."""
        seed = derive_seed(self._config.seed, epoch)
        if self._sampler is not None:
            # Most samplers draw from torch's generator: the ranks must draw the same.
            with RandomState(seed):
                made = self._sampler(self._dataset, seed)
                if made is not None:
                    self.order_name = type(made).__name__
                    return draw_order(made, epoch)
        if self.order_name:
            raise InputError(
                f"the task's method sampler returned None in epoch {epoch + 1}, but a sampler in "
                "epoch 1; return a sampler in every epoch"
            )
        order = torch.randperm(self._size, generator=torch.Generator().manual_seed(seed))
        return order.numpy().data  # as fast as a list, in a fifth of the memory

    def begin(self, backend: Backend, epoch: int, start: int) -> None:
        """Select the epoch and position, and check them. Collective with a sampler of the task.

        Raises InputError, on every rank, if the policy refuses what is left of the epoch, and
        WorldMismatch if the ranks have different orders.
        """
        with nullcontext() if self._sampler is None else backend.share_errors():
            self.set_epoch(epoch, start)
            self.check(start)
        if self._sampler is not None:
            digest = hashlib.sha256(repr([*self._items]).encode()).hexdigest()[:12]
            check_same(
                backend,
                {f"hash of the sampler's order in epoch {epoch + 1}": digest},
                "; let the order depend on the dataset and the seed of Task.sampler only",
            )

    def check(self, start: int = 0) -> None:
        """Raise InputError if an epoch would have no step, or if the options do not fit."""
        config = self._config
        has_size = config.batch_size or config.global_batch_size
        if has_size and not isinstance(self._starts, range):
            raise InputError(
                "the task's batch sampler sets the batch size; leave out --batch-size and "
                "--global-batch-size"
            )
        super().check(start)
        if start == 0 and not self.batches_from(0):
            raise InputError(
                f"one micro-batch of all ranks, {self._each} x {self._world.size} = {self._run} "
                f"{self._unit}, is larger than the training data, {len(self._items)} {self._unit}; "
                "make it smaller, or repeat samples with --uneven pad",
                on_all_ranks=True,
            )
        if self.global_micro_batch > _MAX_BATCH:
            raise InputError(
                f"one micro-batch of all ranks, {self.batch_size} x {self._world.size} samples, is "
                "too large for any memory; make --batch-size smaller"
            )

    def samples_by_rank(self) -> list[int]:
        """Return the samples that each rank uses in a whole epoch."""
        # All runs of a permutation but the last are full.
        full = max(0, self.batches_from(0) - 1) if isinstance(self._starts, range) else 0
        in_full = [full * self._each] * self._world.size
        return [sum(sizes) for sizes in zip(in_full, *self._sizes(full * self._run), strict=True)]

    def steps(self, batches: Iterator[Any]) -> Iterator[StepBatches]:
        """Yield the steps from the selected position on, given their micro-batches."""
        runs, left = self._sizes(self._start), len(self)
        while left:
            sizes = [*islice(runs, self._config.accumulate)]
            left -= len(sizes)
            yield StepBatches(sizes, self._world.rank, batches, left == 0)

    def _sizes(self, start: int) -> Iterator[list[int]]:
        """Yield the samples of each rank in each run from a position on."""
        for bounds in self._runs(start):
            yield [end - start for start, end in pairwise(map(self._position, bounds))]

    def _runs(self, start: int) -> Iterator[Sequence[int]]:
        """Yield the runs from a position on: the first item of each rank, and the item after that
        of the last rank; those beyond the end of the order are the first ones again.
        """
        num, size = len(self._items), self._world.size
        first = num - self._items_left(start)
        for _ in range(self.batches_from(start)):
            end = first + self._run
            if num < end and self._config.uneven == "join":
                starts = [first + shard_bounds(num - first, rank, size)[0] for rank in range(size)]
                yield [*starts, num]
            else:
                yield range(first, end + 1, self._each)
            first = end

    def __len__(self) -> int:
        return self.batches_from(self._start)

    def __iter__(self) -> Iterator[list[Any]]:
        items, rank = self._items, self._world.rank
        for bounds in self._runs(self._start):
            start, end = bounds[rank : rank + 2]
            own = [items[item % len(items)] for item in range(start, end)] or [items[-1]]
            samples = own[0] if isinstance(own[0], list) else own
            yield samples if end > start else samples[-1:]


def size_of(dataset: Dataset[Any], name: str) -> int:
    """Return `len(dataset)`. Raises InputError if it has no length or index, or is empty."""
    size = None if isinstance(dataset, IterableDataset) else length_of(dataset)
    if size is None or not hasattr(dataset, "__getitem__"):
        what = "length" if size is None else "samples by index"
        raise InputError(
            f"the {name} dataset ({type(dataset).__name__}) has no {what}; a task needs datasets "
            "with __len__ and __getitem__"
        )
    if size == 0:
        raise InputError(f"the {name} dataset ({type(dataset).__name__}) is empty")
    return size


def draw_order(sampler: Iterable[Any], epoch: int) -> list[Any]:
    """Return the order of one epoch: indices, or lists of indices. Not collective.

    Raises InputError if it is empty, has an empty batch, or another length than `len(sampler)`.
    """
    if not isinstance(sampler, Sized):
        raise InputError(
            f"the task's sampler ({type(sampler).__name__}) has no length; give it a method __len__"
        )
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    # One more than its length: a sampler that never ends must not fill the memory.
    drawn = islice(sampler, len(sampler) + 1)
    order = [item.tolist() if hasattr(item, "tolist") else item for item in drawn]
    if [] in order or not 0 < len(order) == len(sampler):
        raise InputError(
            f"the task's sampler ({type(sampler).__name__}) gives {len(order)} items or more, but "
            f"its len() is {len(sampler)}; it must give len() items, at least one, and no "
            "empty batch"
        )
    return order


def check_same_plan(
    backend: Backend,
    train: Dataset[Any],
    evaluation: Mapping[str, Dataset[Any]],
    config: TrainConfig,
) -> None:
    """Compare the options and sizes that determine the steps between all ranks. Collective.

    Raises WorldMismatch, on every rank, if one differs: the ranks would take different numbers of
    steps, or use samples twice.
    """
    names = """seed epochs max_steps accumulate uneven eval_every eval_batch_size checkpoint_every
        early_stop keep_best""".split()
    check_same(
        backend,
        {
            "samples of training data": length_of(train),
            **{
                f"samples of evaluation data{f' {name}' * bool(name)}": length_of(data)
                for name, data in evaluation.items()
            },
            "evaluation data": [*evaluation],
            "samples of a micro-batch": config.micro_batch(backend.world.size),
            **{name: getattr(config, name) for name in names},
        },
        "; give every rank the same: the ranks share the samples among themselves",
    )


def length_of(dataset: Dataset[Any]) -> int | None:
    """Return `len(dataset)`; None for a stream without a length."""
    return len(dataset) if isinstance(dataset, Sized) else None
