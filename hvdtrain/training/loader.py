"""The data of one rank: `Loader` for training, `EvalData` for evaluation, `RunData` for a run.

The Trainer and a loop of one's own load with the same class: with the same seed and batch size they
take the same batches. `data_loading` divides datasets with an index between the ranks, `streams`
those that are iterated over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hvdtrain.backends.base import Backend
from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import (
    EvalBatches,
    MakeSampler,
    ShardedBatches,
    StepBatches,
    derive_seed,
    make_loader,
    on_device,
    shard,
    size_of,
)
from hvdtrain.training.progress import Progress
from hvdtrain.training.streams import Collate, RankItems, StreamBatches, make_stream_loader
from hvdtrain.training.task import CheckedTask

Convert = Callable[[Tensor], Tensor]
EvalBatchesByName = dict[str, Iterator[tuple[int, Any]]]
"""By the name of the evaluation data: batches, each after its number of samples."""


class TrainBatches:
    """This rank's micro-batches of the training data, with an index or a stream. Not collective."""

    batches: ShardedBatches | StreamBatches

    def __init__(
        self,
        dataset: Dataset[Any],
        config: TrainConfig,
        backend: Backend,
        collate: Collate,
        sampler: MakeSampler | None = None,
    ) -> None:
        """`sampler`: that of the task. Raises InputError."""
        self._backend, self._seed = backend, config.seed
        world, device = backend.world, backend.device
        if isinstance(dataset, IterableDataset):
            self.batches = StreamBatches(dataset, config, backend, collate)
            self._loader: DataLoader[Any] = self.batches.loader
        else:
            self.batches = batches = shard(dataset, config, world, sampler)
            self._loader = make_loader(
                dataset, batches, collate, world, device, config.workers, config.seed
            )

    def begin(self, epoch: int, position: int, convert: Convert) -> Iterator[Any]:
        """Return the batches that are left of an epoch, on the device, with `convert` applied to
        each tensor. Collective with a sampler of the task. Raises InputError, on every rank, if the
        policy for uneven data refuses them.
        """
        self.batches.begin(self._backend, epoch, position)
        # The loader processes of a stream are seeded from it.
        own = derive_seed(self._seed, self._backend.world.rank, epoch)
        self._loader.generator.manual_seed(own)
        ahead = self.batches.may_load_ahead
        return on_device(self._loader, self._backend.device, convert, ahead)


class Loader:
    """This rank's batches of a dataset, on its device, epoch after epoch.

        loader = Loader(backend, data, batch_size=32)
        for epoch in range(3):
            for inputs, targets in loader: ...

    The order of an epoch is a permutation that follows from `seed` and the epoch, and all ranks
    have the same number of batches. By `uneven` the samples left over at the end of an epoch are
    dropped ("drop"), filled up from its start ("pad"), or refused ("error").

    `batch_size`: samples of one rank. `workers`: loader processes, which stay from one epoch to the
    next. `collate`: makes a batch of a list of samples. The constructor is collective; taking a
    batch is not. Raises InputError for data without a length, and WorldMismatch if the ranks do not
    have the same arguments.
    """

    def __init__(
        self,
        backend: Backend,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        uneven: str = "drop",
        workers: int = 0,
        collate: Collate = default_collate,
    ) -> None:
        config = replace(
            TrainConfig(), batch_size=batch_size, seed=seed, uneven=uneven, workers=workers
        )
        with backend.share_errors():
            config.check()
            if uneven == "join":
                raise InputError(
                    "uneven='join' gives the ranks unequal parts of the last batch, whose losses "
                    "the Trainer weighs; choose drop, pad or error"
                )
            num_samples = size_of(dataset, "training")
            self._train = TrainBatches(dataset, config, backend, collate)
        same = {"batch size": batch_size, "seed": seed, "policy for uneven data": uneven}
        check_same(backend, {"samples of data": num_samples, **same})
        self.epoch = 0
        """The epoch of the next batch, counted from 0."""
        self.position = 0
        """The samples of all ranks that have been taken of it."""
        self._continues = False

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return self._train.batches.batches_from(0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; after `load_state_dict` what was left of its one."""
        if self.position and not self._continues:
            self.epoch, self.position = self.epoch + 1, 0
        self._continues = False
        for batch in self._train.begin(self.epoch, self.position, lambda t: t):
            self.position += self._train.batches.global_micro_batch
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data, which is the same on all ranks. Not collective."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place that `state_dict` has returned. Not collective; call it on every rank."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._continues = True


@dataclass(frozen=True)
class EvalData:
    """This rank's share of one evaluation data: each sample is on exactly one rank."""

    loader: DataLoader[Any]
    device: torch.device
    sampler: EvalBatches | None = None
    """The sampler of `loader`; None for a stream, whose batches come with their sizes."""
    divides_itself: bool = False

    def batches(self, convert: Convert) -> Iterator[tuple[int, Any]]:
        """Yield the batches on the device, each after its size. Not collective."""
        loaded = on_device(self.loader, self.device, convert)
        sizes = map(len, self.sampler) if self.sampler is not None else None
        yield from loaded if sizes is None else zip(sizes, loaded, strict=True)


def make_eval_data(
    datasets: Mapping[str, Dataset[Any]],
    batch_size: int,
    task: CheckedTask,
    backend: Backend,
    config: TrainConfig,
    only_first: bool = False,
) -> dict[str, EvalData]:
    """Return this rank's share of each dataset, with an index or a stream. Not collective.

    `only_first`: of a dataset with an index, the first batch of each rank only.
    """
    world, device, workers, seed = backend.world, backend.device, config.workers, config.seed

    def share_of(dataset: Dataset[Any]) -> EvalData:
        if isinstance(dataset, IterableDataset):
            items = RankItems(dataset, batch_size, world, seed, False, task.collate)
            loader = make_stream_loader(items, world, device, workers)
            return EvalData(loader, device, divides_itself=items.divides_itself)
        size = size_of(dataset, "evaluation")
        if only_first:
            size = min(size, batch_size * world.size)
        batches = EvalBatches(size, batch_size, world)
        loader = make_loader(dataset, batches, task.collate, world, device, workers, seed)
        return EvalData(loader, device, batches)

    return {name: share_of(dataset) for name, dataset in datasets.items()}


class RunData:
    """The datasets of a task, and this rank's loaders of them."""

    def __init__(
        self,
        task: CheckedTask,
        config: TrainConfig,
        backend: Backend,
    ) -> None:
        """Create datasets and loaders. Not collective. Raises InputError."""
        self._config, self._backend = config, backend
        self.datasets = task.datasets()
        train, evaluation = self.datasets
        if config.eval_every == "never":
            evaluation = {}
        self._task = task
        self._train = TrainBatches(train, config, backend, task.collate, task.sampler)
        self.batches = self._train.batches
        each = self._eval_batch_size
        self._eval_data = make_eval_data(evaluation, each, task, backend, config)
        if not evaluation and (
            config.early_stop or config.keep_best or config.schedule_option().criterion
        ):
            raise InputError(
                "--early-stop, --keep-best and --schedule plateau depend on evaluations, and the "
                f"task {config.task} has no evaluation data, or --eval-every is never; leave them "
                "out"
            )

    def close(self) -> None:
        """End the loader processes; nothing can be loaded afterwards. Not collective."""
        del self._train
        self._eval_data = {}

    @property
    def has_evaluation(self) -> bool:
        """Whether the task has evaluation data."""
        return bool(self._eval_data)

    @property
    def can_peek(self) -> bool:
        """Whether a batch of the evaluation data can be read twice: not of a stream."""
        return self.has_evaluation and all(d.sampler is not None for d in self._eval_data.values())

    def begin_epoch(self, progress: Progress, convert: Convert) -> Iterator[StepBatches]:
        """Return the steps that are left of the current epoch. Collective, as each `next` may be.

        `convert` is applied to each tensor of a batch. Raises InputError, on every rank, if the
        policy for uneven data refuses them.
        """
        data = self._train.begin(progress.epoch, progress.sample, convert)
        return self.batches.steps(self._config.accumulate, data)

    def check_used(self, progress: Progress) -> None:
        """Raise InputError, on every rank, if an epoch has ended without a step."""
        if not progress.sample:
            raise InputError(
                f"epoch {progress.epoch + 1} has no step: the training data are fewer than one "
                "micro-batch of every rank; make --batch-size smaller, or give --uneven join",
                on_all_ranks=True,
            )

    def evaluation_batches(self, convert: Convert) -> EvalBatchesByName:
        """Return this rank's batches of each evaluation data, with their numbers of samples.

        Not collective: ranks may have different numbers of them.
        """
        return {name: data.batches(convert) for name, data in self._eval_data.items()}

    def first_evaluation_batches(self, convert: Convert) -> EvalBatchesByName:
        """Return this rank's first batch of each evaluation data, if it has one, with its size.

        Not collective. Its loader loads no other, and ends. It has a process of its own if the
        others do: the processes that start later must not inherit a file that a dataset has opened.
        """
        config = replace(self._config, workers=min(self._config.workers, 1))
        about = self._eval_batch_size, self._task, self._backend, config
        first = make_eval_data(self.datasets[1], *about, only_first=True)
        return {name: iter(list(data.batches(convert))) for name, data in first.items()}

    @property
    def is_evaluated_at_once(self) -> bool:
        """Whether the first batches of all ranks are the whole evaluation data, which has an index.
        Equal on all ranks.
        """
        at_once = self._eval_batch_size * self._backend.world.size
        return all(size_of(data, "evaluation") <= at_once for data in self.datasets[1].values())

    @property
    def _eval_batch_size(self) -> int:
        return self._config.eval_batch_size or self.batches.batch_size
