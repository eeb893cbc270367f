"""Evaluation of trained weights: a model on the evaluation data, which the ranks share.

The command `evaluate` uses it.
"""

from __future__ import annotations

import os
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import InputError
from hvdtrain.optim.model_sync import broadcast_weights, check_same_model
from hvdtrain.training import determinism, weights
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data.loader import make_eval_data
from hvdtrain.training.data.order import length_of
from hvdtrain.training.evaluation import evaluate_each
from hvdtrain.training.precision import Precision
from hvdtrain.training.stepper import build_model
from hvdtrain.training.task import CheckedTask, Task
from hvdtrain.transports.malloc import keep_freed_memory


class Inference:
    """A task's model with trained weights, on an open backend. Every method is collective."""

    def __init__(
        self, task: Task, backend: Backend, config: TrainConfig, found: weights.Weights | None
    ) -> None:
        """`found`: where the weights are, on rank 0, which broadcasts them; None on other ranks.

        Raises InputError or CheckpointError, on every rank, if they are not of this task's model.
        """
        self._checked, self.backend = CheckedTask(task), backend
        self._precision = Precision(config.precision, backend.device, config.opt_level)
        with backend.share_errors():
            # Data and model as the Trainer creates them: data may be drawn by the same seed.
            determinism.set_threads(config.threads, backend.world, os.environ)
            keep_freed_memory()
            determinism.seed_all(determinism.derive_seed(config.seed))
            _, evaluation = self._checked.datasets()
            if not evaluation:
                raise InputError(
                    f"the task {config.task} has no evaluation data; return some from its "
                    "datasets()"
                )
            nums_samples = [length_of(data) for data in evaluation.values()]
            each = config.micro_batch(1)
            self._data = make_eval_data(evaluation, each, self._checked, backend, config)
            self.model = build_model(self._checked, config, self._precision, backend)
            if found is not None:  # after its conversion: fp64 keeps its digits
                weights.load_into(self.model, weights.read(found), found.path)
                self.model.to(backend.device)  # loading may replace a buffer by that of the file
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
