"""Evaluation and prediction: a model on the evaluation data, which the ranks share.

The commands `evaluate` and `predict` use `Inference`, which loads trained weights first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
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
from hvdtrain.training.data.loader import EvalData, make_eval_data
from hvdtrain.training.data.order import length_of
from hvdtrain.training.evaluation import evaluate_each
from hvdtrain.training.precision import Precision
from hvdtrain.training.predictions import check_rows, in_order
from hvdtrain.training.prepared_model import build_model
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
            # Data and model as the Trainer creates them: data may be drawn by the same seed.
            determinism.set_threads(config.threads, backend.world, os.environ)
            keep_freed_memory()
            determinism.seed_all(determinism.derive_seed(config.seed))
            _, evaluation = self._checked.datasets()
            if not evaluation:
                raise InputError(
                    f"the task {config.task} has no evaluation data; return them from its "
                    "datasets()"
                )
            nums_samples = [length_of(data) for data in evaluation.values()]
            each = config.micro_batch(1)
            self._data = make_eval_data(evaluation, each, self._checked, backend, config)
            self.model = build_model(self._checked, config, self._precision, backend)
            if found is not None:  # after its conversion: fp64 keeps its digits
                weights.load_into(self.model, weights.read(found), found.path)
        check_same(
            backend,
            {"samples of evaluation data": nums_samples, "samples of a batch": each},
            "; give every rank the same: the ranks share the samples among themselves",
        )
        check_same_model(backend, self.model)
        if backend.world.size > 1:
            broadcast_weights(backend, self.model)

    def evaluate(self) -> dict[str, Any]:
        """Return the metrics of the whole evaluation data, equal on all ranks. Collective."""
        precision = self._precision
        batches = {n: data.batches(precision.convert_batch) for n, data in self._data.items()}
        return evaluate_each(self.model, batches, self._checked, self.backend, precision)

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
        parts = self._parts(data)
        by_rank: list[list[Any]] = [[] for _ in range(backend.world.size)]
        while True:
            with backend.share_errors():
                mine = list(islice(parts, 1))
            # One micro-batch of each rank at a time: no rank but 0 keeps those of the others.
            everyone = backend.all_gather_object(mine)
            if not any(everyone):
                break
            if backend.world.rank == 0:
                for of_rank, part in zip(by_rank, everyone, strict=True):
                    of_rank += part
        with backend.share_errors():
            return in_order(by_rank, not data.divides_itself) if backend.world.rank == 0 else None

    def _parts(self, data: EvalData) -> Iterator[Any]:
        """Yield the predictions of each batch of this rank, on the CPU. Not collective."""
        for size, batch in data.batches(self._precision.convert_batch):
            with self._precision.autocast():
                found = self._checked.predict(self.model, batch)
            check_rows(found, size)
            # Clones: pickle sends the whole memory of which a tensor is a view.
            yield map_tree(lambda t: t.detach().cpu().clone(), Tensor, found)
