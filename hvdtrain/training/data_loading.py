"""Data loading: the shards of each rank, their order, and the copy of batches to the device.

Used by the Trainer, and by the hand-written loop of `hvdtrain compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from hvdtrain.backends.base import Backend, check_same
from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.trees import map_tree
from hvdtrain.world import World, is_mpi

_MAX_BATCH = 1 << 40  # samples; with more, --uneven pad would fill the memory with repeats


class ShardedBatches(Sampler[list[int]]):
    """This rank's micro-batches: slices of one global order.

    The order is a permutation by seed and epoch, equal on every rank and at every world size. The
    k-th micro-batches of all ranks are one contiguous run of it, and each rank takes its slice. So
    one number, the position in the order, is the whole progress of an epoch.
    """

    def __init__(
        self, num_samples: int, batch_size: int, world: World, seed: int, uneven: str
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self._world = world
        self._seed = seed
        self._pad = uneven == "pad"
        self._epoch = 0
        self._start = 0

    @property
    def global_micro_batch(self) -> int:
        """Samples in one micro-batch of all ranks."""
        return self.batch_size * self._world.size

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Select the epoch, which sets the order, and the position to start from.

        Every rank must pass the same values.
        """
        self._epoch, self._start = epoch, start

    def batches_from(self, start: int) -> int:
        """Return how many micro-batches each rank gets from position `start` on."""
        left = max(0, self.num_samples - start)
        return -(-left // self.global_micro_batch) if self._pad else left // self.global_micro_batch

    def leftover(self) -> int:
        """Return the samples dropped (negative) or repeated (positive) in a whole epoch."""
        return self.batches_from(0) * self.global_micro_batch - self.num_samples

    def __len__(self) -> int:
        return self.batches_from(self._start)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self._epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        offset = self._start + self._world.rank * self.batch_size
        for batch in range(len(self)):
            first = offset + batch * self.global_micro_batch
            indices = torch.arange(first, first + self.batch_size)
            # The last batch is padded with the samples from the start of the order.
            yield order[indices % self.num_samples].tolist()


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


def shard(train: Dataset[Any], config: TrainConfig, world: World) -> ShardedBatches:
    """Return the sampler of this rank's micro-batches. Not collective.

    Raises InputError if a rank would have no micro-batch (an epoch would have no step), or if one
    of all ranks is too large for any memory.
    """
    size, each = size_of(train, "training"), config.micro_batch(world.size)
    batches = ShardedBatches(size, each, world, config.seed, config.uneven)
    if len(batches) == 0:
        raise InputError(
            f"one micro-batch of all ranks, {each} x {world.size} = {each * world.size} samples, "
            f"is larger than the training data, {size} samples; make it smaller, or repeat samples "
            "with --uneven pad"
        )
    if batches.global_micro_batch > _MAX_BATCH:
        raise InputError(
            f"one micro-batch of all ranks, {each} x {world.size} samples, "
            "is too large for any memory; make --batch-size smaller"
        )
    return batches


def check_same_plan(
    backend: Backend,
    train: DataLoader[Any],
    evaluation: DataLoader[Any] | None,
    config: TrainConfig,
) -> None:
    """Compare the options and sizes that determine the steps between all ranks. Collective.

    Raises WorldMismatch, on every rank, if one differs: the ranks would take different numbers of
    steps, or use samples twice.
    """
    names = """seed epochs max_steps accumulate uneven eval_every checkpoint_every early_stop
        keep_best""".split()
    check_same(
        backend,
        {
            "samples of training data": len(cast("Sized", train.dataset)),
            "samples of evaluation data": (
                None if evaluation is None else len(cast("Sized", evaluation.dataset))
            ),
            "samples of a micro-batch": config.micro_batch(backend.world.size),
            **{name: getattr(config, name) for name in names},
        },
        "; give every rank the same: the ranks share the samples among themselves",
    )


def make_loader(
    dataset: Dataset[Any],
    batches: Sampler[list[int]],
    collate: Callable[[list[Any]], Any],
    world: World,
    device: torch.device,
    workers: int,
    seed: int,
) -> DataLoader[Any]:
    """Return the loader of one rank. Not collective."""
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # A process that is forked after MPI_Init can crash in its first MPI call.
        multiprocessing_context="forkserver" if workers and is_mpi(world) else None,
        # It seeds the loader processes, so that random augmentation differs by rank.
        generator=torch.Generator().manual_seed(derive_seed(seed, world.rank)),
    )


def on_device(
    loader: Iterable[Any], device: torch.device, convert: Callable[[Tensor], Tensor]
) -> Iterator[Any]:
    """Yield the batches on `device`, with `convert` applied to every tensor.

    On CUDA, the copy of the next batch overlaps with the computation on the current one.
    """
    loader = _raising_plainly(loader)
    if device.type != "cuda":
        for batch in loader:
            yield map_tree(convert, Tensor, batch)
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start_copy(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(copies):
            copied = map_tree(lambda t: convert(t.to(device, non_blocking=True)), Tensor, batch)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(copies)
        return copied, done

    def hand_over(batch: Any, done: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        # The allocator must not reuse this memory before the consuming stream has finished with it.
        map_tree(lambda t: t.record_stream(current), Tensor, batch)
        return batch

    pending: tuple[Any, torch.cuda.Event] | None = None
    for batch in loader:
        ready, pending = pending, start_copy(batch)
        if ready is not None:
            yield hand_over(*ready)
            del ready
    if pending is not None:
        yield hand_over(*pending)


def _raising_plainly(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; remove the traceback that DataLoader prepends to a worker's InputError."""
    try:
        yield from batches
    except InputError as error:
        last = str(error).rstrip().rpartition("\n")[2]
        raise InputError(last.removeprefix("hvdtrain.errors.InputError: ")) from None
