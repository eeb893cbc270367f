"""Data loading: the shards of each rank, their order, and the copy of batches to the device.

Used by the Trainer, and by the hand-written loop of `hvdtrain compare`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from hvdtrain._torch.worker_info import set_worker_dataset
from hvdtrain.backends.base import Backend
from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import InputError
from hvdtrain.job.world import World, is_mpi
from hvdtrain.system import signals
from hvdtrain.system.trees import map_tree
from hvdtrain.training import determinism
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.sharding import shard_bounds

_MAX_BATCH = 1 << 40  # samples; with more, --uneven pad would fill the memory with repeats


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one optimizer step."""

    num: int
    samples: int
    """Samples of all ranks: what the position in the epoch advances by."""
    own: int
    """Samples of this rank."""
    weights: Sequence[float] | None
    """Factors of this rank's losses, so that the mean over the ranks is the mean over the samples.
    None if all micro-batches have equal sizes: then each factor is 1 / num.
    """
    last: bool
    """Whether it is the last of the epoch."""
    data: Iterator[Any]
    """Yields the micro-batches, and goes on with those of the next step."""


class ShardedBatches(Sampler[list[Any]]):
    """This rank's micro-batches: slices of one global order.

    The order is a permutation by seed and epoch, equal on every rank and at every world size. The
    k-th micro-batches of all ranks are one contiguous run of it, and each rank takes its slice. So
    one number, the position in the order, is the whole progress of an epoch.

    The last run may be short. By the policy `uneven` it is dropped, padded from the start of the
    order, or, for `join`, divided between the ranks. A rank without a part of it then gets a sample
    of another rank's, with the weight 0: it must take part in the collectives of the step.
    """

    has_state = False
    may_load_ahead = True
    order_name = ""
    """The class of the task's own sampler."""

    def __init__(
        self, num_samples: int, batch_size: int, world: World, seed: int, uneven: str
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self._world = world
        self._seed = seed
        self._uneven = uneven
        self._epoch = 0
        self._start = 0
        self.weight_0_counts = False
        """Whether a sample of weight 0 would change the result, as in SyncBatchNorm."""

    @property
    def global_micro_batch(self) -> int:
        """Samples in one micro-batch of all ranks."""
        return self.batch_size * self._world.size

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Select the epoch, which sets the order, and the position to start from.

        Every rank must pass the same values.
        """
        self._epoch, self._start = epoch, start

    def begin(self, backend: Backend, epoch: int, start: int) -> None:
        """Select the epoch and position, and check them. Collective.

        Raises InputError, on every rank, if the policy refuses what is left of the epoch.
        """
        self.set_epoch(epoch, start)
        self.check(start)

    def check(self, start: int = 0) -> None:
        """Raise InputError if the policy refuses the samples from `start` on.

        Not collective: the same on every rank.
        """
        left, span = self.num_samples - start, self.global_micro_batch
        self._check_shares(left % span and left % span < self._world.size)
        if self._uneven == "error" and left % span:
            raise InputError(
                f"--uneven error: {left} samples are not a multiple of one micro-batch of all "
                f"ranks, {self.batch_size} x {self._world.size} = {span}: {left % span} are left "
                "over; choose another batch size, or --uneven drop, pad or join",
                on_all_ranks=True,
            )

    def _check_shares(self, is_too_short: bool | int) -> None:
        if self.weight_0_counts and self._uneven == "join" and is_too_short:
            raise InputError(
                "--uneven join with --sync-bn: the last batch of an epoch has fewer samples than "
                f"there are ranks, {self._world.size}, and each needs one; choose another batch "
                "size, or --uneven pad",
                on_all_ranks=True,
            )

    def batches_from(self, start: int) -> int:
        """Return how many micro-batches each rank gets from position `start` on."""
        full, rest = divmod(max(0, self.num_samples - start), self.global_micro_batch)
        return full + (rest > 0 and self._uneven in ("pad", "join"))

    def state(self) -> None:
        """Return None: the position in the epoch is all."""

    def load_state(self, states: list[Any], start: int, print_line: Callable[[str], None]) -> None:
        """Do nothing: see `state`."""

    def leftover(self) -> int:
        """Return the samples dropped (negative) or repeated (positive) in a whole epoch."""
        return sum(self.samples_by_rank()) - self.num_samples

    def samples_by_rank(self) -> list[int]:
        """Return the samples that each rank uses in a whole epoch."""
        size, rest = self._world.size, self.num_samples % self.global_micro_batch
        if not rest or self._uneven != "join":
            return [self.batches_from(0) * self.batch_size] * size
        full = self.num_samples // self.global_micro_batch * self.batch_size
        return [full + part for part in _parts(rest, size)]

    def steps(self, accumulate: int, batches: Iterator[Any]) -> Iterator[StepBatches]:
        """Yield the steps of `accumulate` micro-batches from the selected position on."""
        start, left = self._start, self.batches_from(self._start)
        while left:
            num = min(accumulate, left)
            left -= num
            samples, own, weights = self._sizes(start, num)
            yield StepBatches(num, samples, own, weights, left == 0, batches)
            start += samples

    def _sizes(self, start: int, num: int) -> tuple[int, int, list[float] | None]:
        """Return the samples of all ranks and of this one, and the weights, of one step."""
        samples = num * self.global_micro_batch
        if self._uneven != "join" or start + samples <= self.num_samples:
            return samples, num * self.batch_size, None
        samples = self.num_samples - start
        first, end = self._last_part(samples % self.global_micro_batch)
        own = [self.batch_size] * (num - 1) + [end - first]
        return samples, sum(own), [size * self._world.size / samples for size in own]

    def _last_part(self, rest: int) -> tuple[int, int]:
        return shard_bounds(rest, self._world.rank, self._world.size)

    def place(self) -> tuple[int, int]:
        """Return the epoch, and the number of its next micro-batch, counted from 0."""
        return self._epoch, self.batches_from(0) - self.batches_from(self._start)

    def __len__(self) -> int:
        return self.batches_from(self._start)

    def __iter__(self) -> Iterator[list[Any]]:
        order = self._order()
        for batch in range(len(self)):
            first = self._start + batch * self.global_micro_batch
            left = self.num_samples - first
            if self._uneven == "join" and left < self.global_micro_batch:
                start, end = self._last_part(left)
                yield (order[first + start : first + end] if end > start else order[-1:]).tolist()
                continue
            first += self._world.rank * self.batch_size
            indices = torch.arange(first, first + self.batch_size)
            # The last batch is padded with the samples from the start of the order.
            yield order[indices % self.num_samples].tolist()

    def _order(self) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self._epoch))
        return torch.randperm(self.num_samples, generator=generator)


def _parts(num_items: int, size: int) -> list[int]:
    bounds = (shard_bounds(num_items, rank, size) for rank in range(size))
    return [end - start for start, end in bounds]


MakeSampler = Callable[[Dataset[Any], int], "Iterable[Any] | None"]
"""Task.sampler: makes a sampler of a dataset, from a seed."""

Draw = Callable[[int], "list[Any]"]
"""Draws the order of an epoch from a task's own sampler: the same on every rank."""


class SampledBatches(ShardedBatches):
    """The same slices of the order that a task's own sampler gives."""

    def __init__(
        self,
        draw: Draw,
        first: list[Any],
        batch_size: int,
        world: World,
        seed: int,
        uneven: str,
    ) -> None:
        """`first`: what `draw` has returned for epoch 0."""
        self._draw = draw
        self._items = first
        super().__init__(len(first), batch_size, world, seed, uneven)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Draw the order of the epoch, and select the position. Every rank passes the same."""
        if epoch != self._epoch:
            self._items = self._draw(epoch)
        self.num_samples = self._count()
        super().set_epoch(epoch, start)

    def begin(self, backend: Backend, epoch: int, start: int) -> None:
        """Draw the order and check it. Collective.

        Raises WorldMismatch, on every rank, if the ranks have different orders.
        """
        with backend.share_errors():
            self.set_epoch(epoch, start)
            self.check(start)
        digest = hashlib.sha256(repr(self._items).encode()).hexdigest()[:12]
        check_same(
            backend,
            {f"the order of the sampler in epoch {epoch + 1}, by its hash,": digest},
            "; make it a function of the dataset and the seed that Task.sampler is given",
        )

    def _count(self) -> int:
        return len(self._items)

    def _order(self) -> Tensor:
        return torch.arange(self.num_samples)

    def __iter__(self) -> Iterator[list[Any]]:
        for positions in super().__iter__():
            yield [self._items[position] for position in positions]


class BatchSamplerBatches(SampledBatches):
    """The batches of a task's own batch sampler, dealt to the ranks in turn.

    Each is one micro-batch of one rank. Their sizes may differ: the losses are weighted by them.
    """

    def __init__(self, draw: Draw, first: list[Any], world: World, seed: int, uneven: str) -> None:
        super().__init__(draw, first, 0, world, seed, uneven)
        self.num_samples = self._count()

    def _count(self) -> int:
        self._ends = list(itertools.accumulate(len(batch) for batch in self._items))
        self.batch_size = max(map(len, self._items))
        return self._ends[-1]

    def check(self, start: int = 0) -> None:
        """Raise InputError if the policy refuses that some ranks have a batch more."""
        left, size = len(self._items) - self._first(start), self._world.size
        self._check_shares(left % size)
        if self._uneven == "error" and left % size:
            raise InputError(
                f"--uneven error: {left} batches of the task's batch sampler are not a multiple of "
                f"{size} ranks: {left % size} are left over; give --uneven drop, pad or join",
                on_all_ranks=True,
            )

    def _first(self, start: int) -> int:
        """Return the number of batches before the position `start`, which counts samples."""
        return bisect.bisect_right(self._ends, start)

    def batches_from(self, start: int) -> int:
        """Return how many micro-batches each rank gets from position `start` on."""
        full, rest = divmod(len(self._items) - self._first(start), self._world.size)
        return full + (rest > 0 and self._uneven in ("pad", "join"))

    def samples_by_rank(self) -> list[int]:
        """Return the samples that each rank uses in a whole epoch."""
        table = self._table(0, self.batches_from(0))
        return [sum(sizes) for sizes in zip(*table, strict=True)]

    def _table(self, first: int, num: int) -> list[list[int]]:
        """Return the sizes of `num` micro-batches by rank, from the batch `first` on."""
        size = self._world.size
        return [
            [self._size(first + micro * size + rank) for rank in range(size)]
            for micro in range(num)
        ]

    def _size(self, number: int) -> int:
        if number >= len(self._items) and self._uneven == "join":
            return 0
        return len(self._items[number % len(self._items)])

    def _sizes(self, start: int, num: int) -> tuple[int, int, list[float] | None]:
        table = self._table(self._first(start), num)
        own = [sizes[self._world.rank] for sizes in table]
        samples = sum(map(sum, table))
        if len({size for sizes in table for size in sizes}) == 1:
            return samples, sum(own), None
        return samples, sum(own), [size * self._world.size / samples for size in own]

    def __iter__(self) -> Iterator[list[Any]]:
        first = self._first(self._start) + self._world.rank
        for number in range(first, first + len(self) * self._world.size, self._world.size):
            if self._size(number):
                yield self._items[number % len(self._items)]
            else:
                yield self._items[-1][-1:]


class EvalBatches(BatchSampler):
    """This rank's share of the evaluation data: each sample is on exactly one rank."""

    def __init__(self, num_samples: int, batch_size: int, world: World) -> None:
        indices = range(world.rank, num_samples, world.size)
        super().__init__(indices, batch_size, drop_last=False)


def derive_seed(*numbers: int) -> int:
    """Combine several small numbers into one seed."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed


def size_of(dataset: Dataset[Any], name: str) -> int:
    """Return `len(dataset)`. Raises InputError if it has no length or index, or is empty."""
    for method, what in (("__len__", "length"), ("__getitem__", "samples by index")):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, method):
            raise InputError(
                f"the {name} dataset ({type(dataset).__name__}) has no {what}; a task needs "
                "datasets with __len__ and __getitem__"
            )
    size = len(cast("Sized", dataset))
    if size == 0:
        raise InputError(f"the {name} dataset ({type(dataset).__name__}) is empty")
    return size


def shard(
    train: Dataset[Any],
    config: TrainConfig,
    world: World,
    sampler: MakeSampler | None = None,
) -> ShardedBatches:
    """Return the sampler of this rank's micro-batches; `sampler` is the task's. Not collective.

    Raises InputError if a rank would have no micro-batch (an epoch would have no step), if one of
    all ranks is too large for any memory, or if the options do not fit the data.
    """
    size, each = size_of(train, "training"), config.micro_batch(world.size)
    batches = _batches(train, config, world, size, each, sampler)
    if len(batches) == 0 and isinstance(batches, BatchSamplerBatches):
        raise InputError(
            f"the task's batch sampler gives fewer batches than there are ranks, {world.size}; use "
            "fewer ranks, or repeat batches with --uneven pad"
        )
    if len(batches) == 0 and config.uneven == "drop":
        raise InputError(
            f"one micro-batch of all ranks, {each} x {world.size} = {each * world.size} samples, "
            f"is larger than the training data, {batches.num_samples} samples; make it smaller, or "
            "repeat samples with --uneven pad"
        )
    if batches.global_micro_batch > _MAX_BATCH:
        raise InputError(
            f"one micro-batch of all ranks, {each} x {world.size} samples, "
            "is too large for any memory; make --batch-size smaller"
        )
    batches.weight_0_counts = config.sync_bn
    batches.check()
    return batches


def _batches(
    train: Dataset[Any],
    config: TrainConfig,
    world: World,
    size: int,
    each: int,
    sampler: MakeSampler | None,
) -> ShardedBatches:
    """Return the batches in the order of the task's sampler, else in a permutation."""

    def make_and_draw(epoch: int) -> tuple[str, list[Any]] | None:
        """Return the class of the epoch's sampler, and its order; None if the task makes none."""
        seed = derive_seed(config.seed, epoch)
        # Most samplers draw from torch's generator: the ranks must draw the same.
        with determinism.RandomState(seed):
            made = None if sampler is None else sampler(train, seed)
            return None if made is None else (type(made).__name__, draw_order(made, epoch))

    def draw(epoch: int) -> list[Any]:
        drawn = make_and_draw(epoch)
        if drawn is None:
            raise InputError(
                f"the task's method sampler returned None in epoch {epoch + 1}, and a sampler in "
                "epoch 1; return one in every epoch"
            )
        return drawn[1]

    drawn = make_and_draw(0)
    if drawn is None:
        return ShardedBatches(size, each, world, config.seed, config.uneven)
    name, first = drawn
    if not isinstance(first[0], list):
        batches = SampledBatches(draw, first, each, world, config.seed, config.uneven)
    elif config.batch_size is None and config.global_batch_size is None:
        batches = BatchSamplerBatches(draw, first, world, config.seed, config.uneven)
    else:
        raise InputError(
            "the task's batch sampler sets the batch size; leave out --batch-size and "
            "--global-batch-size"
        )
    batches.order_name = name
    return batches


def draw_order(sampler: Any, epoch: int) -> list[Any]:
    """Return the order of one epoch: indices, or lists of indices. Not collective.

    Raises InputError if it is empty, or of another length than `len(sampler)`.
    """
    name = type(sampler).__name__
    if not isinstance(sampler, Sized):
        raise InputError(f"the task's sampler ({name}) has no length; give it a method __len__")
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    # One more than its length: a sampler that never ends must not fill the memory.
    drawn = itertools.islice(cast("Iterable[Any]", sampler), len(sampler) + 1)
    order = [item.tolist() if hasattr(item, "tolist") else item for item in drawn]
    if not order or [] in order:
        raise InputError(
            f"the task's sampler ({name}) gives {'an empty batch' if order else 'nothing'}"
        )
    if len(order) != len(sampler):
        more = "more" if len(order) > len(sampler) else f"{len(order)}"
        raise InputError(
            f"the task's sampler ({name}) gives {more} instead of its len(), {len(sampler)}"
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
            "samples of training data": _length(train),
            **{
                f"samples of evaluation data{f' {name}' * bool(name)}": _length(data)
                for name, data in evaluation.items()
            },
            "evaluation data": [*evaluation],
            "samples of a micro-batch": config.micro_batch(backend.world.size),
            **{name: getattr(config, name) for name in names},
        },
        "; give every rank the same: the ranks share the samples among themselves",
    )


def _length(dataset: Dataset[Any]) -> int | None:
    return len(dataset) if isinstance(dataset, Sized) else None


def make_loader(
    dataset: Dataset[Any],
    batches: Sampler[list[int]],
    collate: Callable[[list[Any]], Any],
    world: World,
    device: torch.device,
    workers: int,
    seed: int,
) -> DataLoader[Any]:
    """Return the loader of one rank. Not collective.

    Its processes stay until it is deleted. They keep the copies of the dataset and of `collate`
    that they started with.
    """
    seeded = SeededBatches(batches, seed, world.rank)
    return DataLoader(
        SeededDataset(dataset) if workers else dataset,
        batch_sampler=cast("Any", seeded if workers else batches),
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        worker_init_fn=_begin_worker,
        multiprocessing_context=worker_context(workers, world),
        # Without one of its own, a loader draws from the program's random numbers.
        generator=torch.Generator().manual_seed(derive_seed(seed, world.rank)),
    )


class SeededBatches(Sampler[tuple[int, list[Any]]]):
    """Batches of indices, each with the seed of its random numbers in a loader process.

    The seed follows from rank, epoch and the batch's number in the epoch: a process that has begun
    in another epoch, or in the middle of one, draws the same numbers.
    """

    def __init__(self, batches: Sampler[list[int]], seed: int, rank: int) -> None:
        self._batches, self._seed, self._rank = batches, seed, rank

    def __len__(self) -> int:
        return len(cast("Sized", self._batches))

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        epoch, first = 0, 0
        if isinstance(self._batches, ShardedBatches):
            epoch, first = self._batches.place()
        for number, batch in enumerate(self._batches, first):
            yield derive_seed(self._seed, self._rank, epoch, number), batch


class SeededDataset(Dataset[Any]):
    """A dataset in a loader process, which is seeded for each of the `SeededBatches`."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.inner: Any = dataset

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getitems__(self, seeded: tuple[int, list[Any]]) -> Any:
        """Return the samples of one batch: torch's loaders call it in place of `__getitem__`."""
        seed, batch = seeded
        determinism.seed_all(seed)
        if hasattr(self.inner, "__getitems__"):
            return self.inner.__getitems__(batch)
        return [self.inner[index] for index in batch]


def _begin_worker(worker: int) -> None:
    """Prepare a loader process. Its worker info has the task's own dataset, as without hvdtrain."""
    outlive_signals(worker)
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SeededDataset):
        set_worker_dataset(info.dataset.inner)


def worker_context(workers: int, world: World) -> str | None:
    """Return how loader processes start; None: as torch's default. Not collective."""
    if not (workers and is_mpi(world)):
        return None
    # A process that is forked after MPI_Init can crash in its first MPI call. The fork server
    # imports torch once, instead of every process for itself, which takes a second.
    multiprocessing.set_forkserver_preload(["__main__", __name__])
    return "forkserver"


def outlive_signals(worker: int) -> None:
    """Make a loader process ignore the signals that are sent to all processes of a job.

    Its rank handles them, and needs its loaders until the last checkpoint. A loader is ended by a
    SIGTERM that its own rank sends, or by the exit of the rank, which torch's loaders watch.
    """
    signals.set_handler(signal.SIG_IGN, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    rank = multiprocessing.parent_process()
    # A handler is not told who has sent a signal; a thread that waits for one is.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while rank is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
            pass
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="signals", daemon=True).start()


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers at the end: a sample of weight 0 changes no statistics.

    Also one in whose place the model has put another tensor.
    """
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                buffer.copy_(value)
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)


class Movable(ABC):
    """A tensor, or a batch of any library that moves itself: whatever has a method `to`."""

    @abstractmethod
    def to(self, device: torch.device) -> Any:
        """Return it on the device."""

    # Not a Protocol, whose check of each number and string in a batch is slow.
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "to")


def moved(batch: Any, device: torch.device) -> Any:
    """Return `batch` with all that can be moved on `device`, however it is nested."""
    return _map_parts(lambda part: part.to(device), batch)


def _map_parts(function: Callable[[Movable], Any], batch: Any) -> Any:
    """Return a copy of `batch` with `function` applied to what can be moved."""
    kind: Any = Movable  # abstract
    return map_tree(function, kind, batch, keep_dict_types=True)


def on_device(
    loader: Iterable[Any],
    device: torch.device,
    convert: Callable[[Tensor], Tensor],
    ahead: bool = True,
) -> Iterator[Any]:
    """Yield the batches on `device`, with `convert` applied to every tensor in dicts, lists, tuples
    and dataclasses.

    On CUDA, the copy of the next batch overlaps with the computation on the current one, unless
    `ahead` is false: then no batch is loaded before it is asked for.
    """
    loader = _without_worker_traceback(loader)

    def finish(batch: Any) -> Any:
        return map_tree(convert, Tensor, moved(batch, device), keep_dict_types=True)

    if device.type != "cuda" or not ahead:
        for batch in loader:
            yield finish(batch)
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    # Of the tensors alone: what moves itself does so when it is handed over.
    def copy_ahead(part: Any) -> Any:
        return part.to(device, non_blocking=True) if isinstance(part, Tensor) else part

    def start_copy(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(copies):
            copied = _map_parts(copy_ahead, batch)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(copies)
        return copied, done

    def hand_over(batch: Any, done: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(device)
        current.wait_event(done)

        # The allocator must not reuse this memory before the consuming stream has finished with it.
        def record(part: Any) -> Any:
            if isinstance(part, Tensor):
                part.record_stream(current)
            return part

        _map_parts(record, batch)
        return finish(batch)

    pending: tuple[Any, torch.cuda.Event] | None = None
    for batch in loader:
        ready, pending = pending, start_copy(batch)
        if ready is not None:
            yield hand_over(*ready)
            del ready
    if pending is not None:
        yield hand_over(*pending)


def _without_worker_traceback(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; remove the traceback that DataLoader prepends to a worker's InputError."""
    try:
        yield from batches
    except InputError as error:
        last = str(error).rstrip().rpartition("\n")[2]
        raise InputError(last.removeprefix("hvdtrain.errors.InputError: ")) from None
