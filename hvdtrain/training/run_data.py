"""The data of one rank in a run: its micro-batches, epoch by epoch, and those of evaluations.

The Trainer uses it for datasets with an index (data_loading) and for streams (streams) alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import (
    ShardedBatches,
    StepBatches,
    derive_seed,
    make_loader,
    on_device,
    shard,
    size_of,
)
from hvdtrain.training.inference import EvalData, make_eval_data
from hvdtrain.training.run_state import Progress
from hvdtrain.training.streams import StreamBatches
from hvdtrain.training.task import CheckedTask

EvalBatchesByName = dict[str, Iterator[tuple[int, Any]]]
"""By the name of the evaluation data: batches, each after its number of samples."""


class RunData:
    """The datasets of a task, and this rank's loaders of them."""

    batches: ShardedBatches | StreamBatches

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
        self._collate = task.collate
        self._make_train_loader(train, task)
        each, workers = self._eval_batch_size, config.workers
        self._eval_data: dict[str, EvalData] = {
            name: make_eval_data(data, each, task.collate, backend, workers, config.seed)
            for name, data in evaluation.items()
        }
        if not evaluation and (
            config.early_stop or config.keep_best or config.schedule_option().criterion
        ):
            raise InputError(
                "--early-stop, --keep-best and --schedule plateau depend on evaluations, and the "
                f"task {config.task} has no evaluation data, or --eval-every is never; leave them "
                "out"
            )

    def _make_train_loader(self, train: Dataset[Any], task: CheckedTask) -> None:
        config, backend = self._config, self._backend
        if isinstance(train, IterableDataset):
            self.batches = StreamBatches(train, config, backend, task.collate)
            self._train_loader: DataLoader[Any] = self.batches.loader
        else:
            self.batches = shard(train, config, backend.world, task.sampler)
            self._train_loader = make_loader(
                train,
                self.batches,
                task.collate,
                backend.world,
                backend.device,
                config.workers,
                config.seed,
            )

    def close(self) -> None:
        """End the loader processes; nothing can be loaded afterwards. Not collective."""
        del self._train_loader
        self._eval_data = {}

    @property
    def has_evaluation(self) -> bool:
        """Whether the task has evaluation data."""
        return bool(self._eval_data)

    @property
    def can_peek(self) -> bool:
        """Whether a batch of the evaluation data can be read twice: not of a stream."""
        return self.has_evaluation and all(d.sampler is not None for d in self._eval_data.values())

    def begin_epoch(
        self, progress: Progress, convert: Callable[[Tensor], Tensor]
    ) -> Iterator[StepBatches]:
        """Return the steps that are left of the current epoch. Collective, as each `next` may be.

        `convert` is applied to each tensor of a batch. Raises InputError, on every rank, if the
        policy for uneven data refuses them.
        """
        config, batches = self._config, self.batches
        batches.begin(self._backend, progress.epoch, progress.sample)
        # The loader processes of a stream are seeded from it.
        loader_seed = derive_seed(config.seed, self._backend.world.rank, progress.epoch)
        self._train_loader.generator.manual_seed(loader_seed)
        data = on_device(
            self._train_loader, self._backend.device, convert, ahead=batches.may_load_ahead
        )
        return batches.steps(config.accumulate, data)

    def check_used(self, progress: Progress) -> None:
        """Raise InputError, on every rank, if an epoch has ended without a step."""
        if not progress.sample:
            raise InputError(
                f"epoch {progress.epoch + 1} has no step: the training data are fewer than one "
                "micro-batch of every rank; make --batch-size smaller, or give --uneven join",
                on_all_ranks=True,
            )

    def evaluation_batches(self, convert: Callable[[Tensor], Tensor]) -> EvalBatchesByName:
        """Return this rank's batches of each evaluation data, with their numbers of samples.

        Not collective: ranks may have different numbers of them.
        """
        device = self._backend.device
        return {name: data.batches(device, convert) for name, data in self._eval_data.items()}

    def first_evaluation_batches(self, convert: Callable[[Tensor], Tensor]) -> EvalBatchesByName:
        """Return this rank's first batch of each evaluation data, if it has one, with its size.

        Not collective. Its loader loads no other, and ends. It has a process of its own if the
        others do: the processes that start later must not inherit a file that a dataset has opened.
        """
        config, backend = self._config, self._backend
        each, workers = self._eval_batch_size, min(config.workers, 1)
        first = {
            name: make_eval_data(data, each, self._collate, backend, workers, config.seed, True)
            for name, data in self.datasets[1].items()
        }
        return {
            name: iter(list(data.batches(backend.device, convert))) for name, data in first.items()
        }

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
