"""The training data in a loop of one's own: `Loader`.

Made of the parts that the Trainer's data are made of (`data_loading`): a Trainer with the same
seed and batch size takes the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset, default_collate

from hvdtrain.backends.base import Backend
from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import derive_seed, make_loader, on_device, shard


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
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        config = replace(TrainConfig(), batch_size=batch_size, seed=seed, uneven=uneven)
        with backend.share_errors():
            config.check()
            if uneven == "join":
                raise InputError(
                    "uneven='join' gives the ranks unequal parts of the last batch, whose losses "
                    "the Trainer weighs; choose drop, pad or error"
                )
            self._batches = shard(dataset, config, backend.world)
        same = {"batch size": batch_size, "seed": seed, "policy for uneven data": uneven}
        check_same(backend, {"samples of data": self._batches.num_samples, **same})
        self._backend, self._seed = backend, seed
        self._loader = make_loader(
            dataset, self._batches, collate, backend.world, backend.device, workers, seed
        )
        self.epoch = 0
        """The epoch of the next batch, counted from 0."""
        self.position = 0
        """The samples of all ranks that have been taken of it."""
        self._continues = False

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return self._batches.batches_from(0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; after `load_state_dict` what was left of its one."""
        if self.position and not self._continues:
            self.epoch, self.position = self.epoch + 1, 0
        self._continues = False
        self._batches.set_epoch(self.epoch, self.position)
        self._batches.check(self.position)
        own = derive_seed(self._seed, self._backend.world.rank, self.epoch)
        self._loader.generator.manual_seed(own)
        for batch in on_device(self._loader, self._backend.device, lambda t: t):
            self.position += self._batches.global_micro_batch
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data, which is the same on all ranks. Not collective."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place that `state_dict` has returned. Not collective; call it on every rank."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._continues = True
