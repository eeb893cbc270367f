"""The loaders of one rank: torch's DataLoader, and what its loader processes need.

A loader process draws random numbers by rank, epoch and batch, survives the signals that a job is
sent, and starts safely below MPI.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hvdtrain._torch.worker_info import set_worker_dataset
from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError
from hvdtrain.job.world import is_mpi
from hvdtrain.system import signals
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.order import ShardedBatches
from hvdtrain.training.determinism import derive_seed, seed_all


def make_loader(
    dataset: Dataset[Any],
    batches: Iterable[list[Any]] | None,
    backend: Backend,
    config: TrainConfig,
    options: Mapping[str, Any],
) -> Any:
    """Return the loader of one rank; `batches` is None for a stream, which makes its own. Not
    collective.

    `options`: arguments of DataLoader from the task, of which those for loader processes have no
    effect without any. The processes of an indexed dataset stay until the loader is deleted, and
    keep the copy of the dataset that they started with.
    """
    workers = config.workers
    arguments: dict[str, Any] = {
        "pin_memory": backend.device.type == "cuda",
        **{k: v for k, v in options.items() if workers or k not in ("prefetch_factor", "timeout")},
    }
    if batches is None:
        # Each item is a pair, which `tuple` returns as it is.
        arguments.update(batch_size=None, collate_fn=tuple)
    elif workers:
        dataset = SeededDataset(dataset)
        seeded = SeededBatches(batches, config.seed, backend.world.rank)
        arguments.update(batch_sampler=seeded, persistent_workers=True)
    else:
        arguments.update(batch_sampler=batches, persistent_workers=False)
    if workers and is_mpi(backend.world):
        # A process that is forked after MPI_Init can crash in its first MPI call. The fork server
        # imports torch once, instead of every process for itself, which takes a second.
        multiprocessing.set_forkserver_preload(["__main__", __name__])
        arguments.setdefault("multiprocessing_context", "forkserver")
    try:
        return DataLoader(
            dataset,
            num_workers=workers,
            worker_init_fn=_begin_worker,
            # Without one of its own, a loader draws from the program's random numbers.
            generator=torch.Generator(),
            **arguments,
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"the arguments of torch's DataLoader do not fit: {error}") from None


@dataclass
class SeededBatches:
    """Batches of indices, each with the seed of its random numbers in a loader process.

    The seed follows from rank, epoch and the batch's number in the epoch: a process that has begun
    in another epoch, or in the middle of one, draws the same numbers.
    """

    batches: Iterable[list[Any]]
    seed: int
    rank: int

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        batches, epoch, first = self.batches, 0, 0
        if isinstance(batches, ShardedBatches):
            epoch, first = batches.epoch, batches.batches_from(0) - len(batches)
        for number, batch in enumerate(batches, first):
            yield derive_seed(self.seed, self.rank, epoch, number), batch


@dataclass
class SeededDataset(Dataset[Any]):
    """A dataset in a loader process, which is seeded for each of the `SeededBatches`."""

    inner: Any

    def __getitems__(self, seeded: tuple[int, list[Any]]) -> Any:
        """Return the samples of one batch, given an item of `SeededBatches`."""
        seed, batch = seeded
        seed_all(seed)
        if hasattr(self.inner, "__getitems__"):
            return self.inner.__getitems__(batch)
        return [self.inner[index] for index in batch]


def _begin_worker(worker: int) -> None:
    """Prepare a loader process. Its worker info has the task's own dataset, as without hvdtrain."""
    _outlive_signals()
    info: Any = get_worker_info()
    if isinstance(info.dataset, SeededDataset):
        set_worker_dataset(info.dataset.inner)


def _outlive_signals() -> None:
    """Make a loader process ignore the signals that are sent to all processes of a job.

    Its rank handles them, and needs its loaders until the last checkpoint. A loader is ended by a
    SIGTERM that its own rank sends, or by the exit of the rank, which torch's loaders watch.
    """
    signals.set_handler(signal.SIG_IGN, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    rank: Any = multiprocessing.parent_process()
    # A handler is not told who has sent a signal; a thread that waits for one is.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
            pass
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="signals", daemon=True).start()
