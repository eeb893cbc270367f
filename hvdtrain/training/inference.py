"""Evaluation and prediction: a model on the evaluation data, which the ranks share.

The commands `evaluate` and `predict` use `Inference`, which loads trained weights first.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hvdtrain.backends.base import Backend
from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import InputError
from hvdtrain.optim.model_sync import broadcast_weights, check_same_model
from hvdtrain.system.trees import map_tree
from hvdtrain.training import determinism, weights
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.loader import make_eval_data
from hvdtrain.training.data.order import length_of
from hvdtrain.training.determinism import derive_seed
from hvdtrain.training.evaluation import evaluate_each
from hvdtrain.training.precision import Precision
from hvdtrain.training.predictions import check_rows, in_order, num_rows
from hvdtrain.training.task import CheckedTask, Task, check_methods
from hvdtrain.transports.malloc import keep_freed_memory


class Inference:
    """A task's model with trained weights, on an open backend. Every method is collective."""

    def __init__(
        self, task: Task, backend: Backend, config: TrainConfig, found: weights.Weights | None
    ) -> None:
        """`found`: where the weights are, on rank 0, which broadcasts them; None on other ranks.

        Raises InputError or CheckpointError, on every rank, if they are not of this task's model.
        """
        self._checked, self._task = CheckedTask(task), task
        self.backend, self._config = backend, config
        self._precision = Precision(config.precision, backend.device, config.opt_level)
        with backend.share_errors():
            self._build(found)
        check_same(
            backend,
            {"samples of evaluation data": self._nums_samples, "samples of a batch": self._each},
            "; give every rank the same: the ranks share the samples among themselves",
        )
        check_same_model(backend, self.model)
        if backend.world.size > 1:
            broadcast_weights(backend, self.model)

    def _build(self, found: weights.Weights | None) -> None:
        """Create data and model as the Trainer does: data may be drawn by the same seed."""
        config, backend = self._config, self.backend
        determinism.set_threads(config.threads, backend.world, os.environ)
        keep_freed_memory()
        determinism.seed_all(derive_seed(config.seed))
        _, evaluation = self._checked.datasets()
        if not evaluation:
            raise InputError(
                f"the task {config.task} has no evaluation data; return them from its datasets()"
            )
        self._nums_samples = [length_of(data) for data in evaluation.values()]
        self._each = config.micro_batch(1)
        self._data = make_eval_data(evaluation, self._each, self._checked, backend, config)
        determinism.seed_all(derive_seed(config.seed))
        self.model = self._precision.convert(self._checked.model())
        if found is not None:  # after the conversion: fp64 keeps its digits
            weights.load_into(self.model, weights.read(found), found.path)
        self.model.to(backend.device)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return the metrics of the whole evaluation data, equal on all ranks. Collective."""
        convert = self._precision.convert_batch
        batches = {name: data.batches(convert) for name, data in self._data.items()}
        return evaluate_each(self.model, batches, self._checked, self.backend, self._precision)

    @torch.no_grad()
    def predict(self) -> Any:
        """Return the task's predictions of the evaluation data, each sample once, in the order of
        the data: see `predictions`. On the other ranks than 0, return None. Collective.
        """
        backend = self.backend
        with backend.share_errors():
            check_methods(self._task, "predict")
            if len(self._data) > 1:
                raise InputError(
                    f"the task {self._config.task} has several evaluation data "
                    f"({', '.join(self._data)}), and predictions are of one; return one from its "
                    "datasets(), chosen by --set"
                )
        self.model.eval()
        (data,) = self._data.values()
        batches = data.batches(self._precision.convert_batch)
        parts: list[Any] = []
        keys: list[Tensor] = []
        for number in itertools.count():
            with backend.share_errors():
                mine = self._predict_next(batches)
            # One micro-batch of each rank at a time: no rank but 0 keeps those of the others.
            everyone = backend.all_gather_object(mine)
            if all(part is None for part in everyone):
                break
            for rank, part in enumerate(everyone if backend.world.rank == 0 else ()):
                if part is not None:
                    places = number * self._each + torch.arange(num_rows(part))
                    by_rank = places + (rank << 48)
                    in_turn = places * backend.world.size + rank
                    keys.append(by_rank if data.divides_itself else in_turn)
                    parts.append(part)
        with backend.share_errors():
            return in_order(parts, keys) if backend.world.rank == 0 else None

    def _predict_next(self, batches: Iterator[tuple[int, Any]]) -> Any:
        """Return the predictions of the next batch, on the CPU; None if there is none."""
        size, batch = next(batches, (0, None))
        if not size:
            return None
        with self._precision.autocast():
            found = self._checked.predict(self.model, batch)
        check_rows(found, size)
        # Clones: pickle sends the whole memory of which a tensor is a view.
        return map_tree(lambda t: t.detach().cpu().clone(), Tensor, found)
