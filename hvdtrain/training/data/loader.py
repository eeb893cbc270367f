"""The data of one rank: `Loader` for training, `EvalData` for evaluation, `RunData` for a run.

The Trainer and a loop of one's own load with the same class: with the same seed and batch size they
take the same batches. `order` divides datasets with an index between the ranks, `stream` those that
are iterated over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, Dataset, IterableDataset, default_collate

from hvdtrain.backends.base import Backend
from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.loader_process import make_loader
from hvdtrain.training.data.on_device import Convert, on_device
from hvdtrain.training.data.order import (
    EpochBatches,
    MakeSampler,
    ShardedBatches,
    StepBatches,
    size_of,
)
from hvdtrain.training.data.stream import RankItems, StreamBatches
from hvdtrain.training.determinism import derive_seed
from hvdtrain.training.progress import Progress
from hvdtrain.training.task import CheckedTask

EvalBatchesByName = dict[str, Iterator[tuple[int, Any]]]
"""By the name of the evaluation data: batches, each after its number of samples."""


class TrainBatches:
    """This rank's micro-batches of the training data, and their loader. Not collective."""

    def __init__(
        self,
        dataset: Dataset[Any],
        config: TrainConfig,
        backend: Backend,
        options: Mapping[str, Any],
        sampler: MakeSampler | None = None,
    ) -> None:
        """`options`: arguments of DataLoader. `sampler`: that of the task. Raises InputError."""
        self._backend, self._config = backend, config
        batches: EpochBatches
        if isinstance(dataset, IterableDataset):
            batches = StreamBatches(dataset, config, backend, options)
            self._loader = make_loader(batches.items, None, backend, config, options)
        else:
            batches = ShardedBatches(dataset, config, backend.world, sampler)
            self._loader = make_loader(dataset, batches, backend, config, options)
        batches.check()
        self.batches = batches

    def begin(self, epoch: int, position: int, convert: Convert) -> Iterator[Any]:
        """Return the batches that are left of an epoch, on the device, with `convert` applied to
        each tensor. Collective with a sampler of the task. Raises InputError, on every rank, if the
        policy for uneven data refuses them.
        """
        backend = self._backend
        self.batches.begin(backend, epoch, position)
        # The loader processes of a stream are seeded from it.
        self._loader.generator.manual_seed(
            derive_seed(self._config.seed, backend.world.rank, epoch)
        )
        return on_device(self._loader, backend.device, convert)


class Loader:
    """This rank's batches of a dataset, on its device, epoch after epoch.

        loader = Loader(backend, data, batch_size=32)
        for epoch in range(3):
            for inputs, targets in loader: ...

    The order of an epoch is a permutation that follows from `seed` and the epoch, and all ranks
    have the same number of batches. `uneven` says what to do with the samples left over at the end
    of an epoch: drop them ("drop"), repeat samples ("pad"), or raise an error ("error").

    `batch_size`: samples of one rank. `workers`: loader processes, which stay from one epoch to the
    next. `collate`: makes a batch of a list of samples. `options`: further arguments of torch's
    DataLoader, such as `prefetch_factor`. The constructor is collective; taking a batch is not.
    Raises InputError for data without a length, and WorldMismatch if the ranks do not have the same
    arguments.
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
        collate: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> None:
        config = TrainConfig(batch_size=batch_size, seed=seed, uneven=uneven, workers=workers)
        with backend.share_errors():
            config.check()
            if uneven == "join":
                raise InputError(
                    "uneven='join' gives the ranks unequal parts of the last batch, whose losses "
                    "only the Trainer weights; choose drop, pad or error"
                )
            num_samples = size_of(dataset, "training")
            options["collate_fn"] = collate
            self._train = TrainBatches(dataset, config, backend, options)
        check_same(
            backend,
            {
                "samples of data": num_samples,
                "batch size": batch_size,
                "seed": seed,
                "policy for uneven data": uneven,
            },
        )
        self.epoch = 0
        """The epoch of the next batch, counted from 0."""
        self.position = 0
        """The samples of all ranks that have been taken of it."""
        self._continues = False

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return self._train.batches.batches_from(0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; after `load_state_dict` the rest of its epoch."""
        if self.position and not self._continues:
            self.epoch, self.position = self.epoch + 1, 0
        self._continues = False
        for batch in self._train.begin(self.epoch, self.position, lambda t: t):
            self.position += self._train.batches.global_micro_batch
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, which is the same on all ranks. Not collective."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position that `state_dict` returned. Not collective; call it on every rank."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._continues = True


class EvalData:
    """This rank's share of one evaluation data: each sample is on exactly one rank."""

    divides_itself = False

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        backend: Backend,
        config: TrainConfig,
        options: Mapping[str, Any],
        only_first: bool = False,
    ) -> None:
        """`only_first`: of a dataset with an index, the first batch alone. Not collective."""
        self._device, world = backend.device, backend.world
        self._batches: BatchSampler | None = None
        if isinstance(dataset, IterableDataset):
            dataset = items = RankItems(dataset, batch_size, world, config.seed, options)
            self.divides_itself = items.divides_itself
        else:
            own = range(world.rank, size_of(dataset, "evaluation"), world.size)
            chosen = own[:batch_size] if only_first else own
            self._batches = BatchSampler(chosen, batch_size, drop_last=False)
        self._loader = make_loader(dataset, self._batches, backend, config, options)

    def batches(self, convert: Convert) -> Iterator[tuple[int, Any]]:
        """Return the batches on the device, each after its size. Not collective."""
        loaded = on_device(self._loader, self._device, convert)
        if self._batches is None:  # those of a stream come with their sizes
            return loaded
        return zip(map(len, self._batches), loaded, strict=True)


def make_eval_data(
    datasets: Mapping[str, Dataset[Any]],
    batch_size: int,
    task: CheckedTask,
    backend: Backend,
    config: TrainConfig,
) -> dict[str, EvalData]:
    """Return this rank's share of each dataset, with an index or a stream. Not collective."""
    how = batch_size, backend, config, task.loader_options()
    return {name: EvalData(dataset, *how) for name, dataset in datasets.items()}


class RunData(TrainBatches):
    """The datasets of a task, and this rank's loaders of them."""

    def __init__(
        self,
        task: CheckedTask,
        config: TrainConfig,
        backend: Backend,
    ) -> None:
        """Create datasets and loaders. Not collective. Raises InputError."""
        self._task = task
        self.datasets = task.datasets()
        train, evaluation = self.datasets
        if config.eval_every == "never":
            evaluation = {}
        sampler = task.sampler if task.has_sampler else None
        super().__init__(train, config, backend, task.loader_options(), sampler)
        self.can_peek = not any(isinstance(data, IterableDataset) for data in evaluation.values())
        """Whether a batch of the evaluation data can be read twice: not of a stream."""
        self._eval_batch_size = config.eval_batch_size or self.batches.batch_size
        self._eval_data = make_eval_data(evaluation, self._eval_batch_size, task, backend, config)
        if not evaluation and (
            config.early_stop or config.keep_best or config.schedule_option().criterion
        ):
            raise InputError(
                "--early-stop, --keep-best and --schedule plateau need evaluations, but the "
                f"task {config.task} has no evaluation data, or --eval-every is never; leave these "
                "options out"
            )

    def close(self) -> None:
        """End the loader processes; nothing can be loaded afterwards. Not collective."""
        del self._loader
        self._eval_data = {}

    @property
    def has_evaluation(self) -> bool:
        """Whether the task has evaluation data."""
        return bool(self._eval_data)

    def begin_epoch(self, progress: Progress, convert: Convert) -> Iterator[StepBatches]:
        """Return the steps that are left of the current epoch. Collective, as each `next` may be.

        `convert` is applied to each tensor of a batch. Raises InputError, on every rank, if the
        policy for uneven data refuses them.
        """
        return self.batches.steps(self.begin(progress.epoch, progress.sample, convert))

    def check_used(self, progress: Progress) -> None:
        """Raise InputError, on every rank, if an epoch has ended without a step."""
        if not progress.sample:
            raise InputError(
                f"epoch {progress.epoch + 1} has no step: the training data have less than one "
                "micro-batch for every rank; make --batch-size smaller, or give --uneven join",
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
        how = self._eval_batch_size, self._backend, config, self._task.loader_options(), True
        return {
            name: iter([*EvalData(dataset, *how).batches(convert)])
            for name, dataset in self.datasets[1].items()
        }
