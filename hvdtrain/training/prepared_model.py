"""The model of a run and its optimizer: built from the task, then prepared by the backend.

The Trainer builds the model before it opens the run directory, and prepares it afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain.backends.base import Backend, RankState
from hvdtrain.errors import InputError
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.training import determinism
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.determinism import derive_seed
from hvdtrain.training.precision import Precision
from hvdtrain.training.schedule import lr_factor, set_base_lr
from hvdtrain.training.task import CheckedTask


class RankBuffers:
    """The buffers of one rank, where each keeps its own BatchNorm statistics: `--buffers local`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers that the model's own state has. Not collective."""
        saved = self._model.state_dict()
        return {uncompiled(n): t for n, t in self._model.named_buffers() if n in saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Not collective."""
        for name, buffer in self.state_dict().items():
            buffer.copy_(state[name])


def build_model(
    task: CheckedTask, config: TrainConfig, precision: Precision, backend: Backend
) -> nn.Module:
    """Return the task's model in its precision, on the device of this rank. Not collective."""
    # Seed again: the weights must not depend on how many random numbers the datasets drew.
    determinism.seed_all(derive_seed(config.seed))
    model = task.model()
    if config.sync_bn:  # `prepare` chooses the class of the layers
        if not any(isinstance(module, BatchNormBase) for module in model.modules()):
            raise InputError(
                f"--sync-bn has no effect: the model of {config.task} has no BatchNorm layer; "
                "leave it out"
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return precision.convert(model).to(backend.device)


class PreparedModel:
    """What the loop trains, and what checkpoints save. Load state afterwards."""

    def __init__(
        self,
        model: nn.Module,
        task: CheckedTask,
        config: TrainConfig,
        precision: Precision,
        backend: Backend,
    ) -> None:
        """Create the optimizer, and prepare both by the backend. Collective.

        Raises what `Backend.prepare` does.
        """
        self.model, self.precision = model, precision
        optimizer, size = task.optimizer(model), backend.world.size
        factor = lr_factor(config.lr_scaling, size, config.accumulate)
        self.lrs = set_base_lr(optimizer, config.lr, factor)
        """The learning rates by parameter group, before and after scaling."""
        known = len(backend.rank_states)
        self.net, self.optimizer = backend.prepare(model, optimizer)
        """The model in the backend's wrapper, if it has one: what the loss is computed with."""
        if config.compile:
            self.net = torch.compile(self.net)  # type: ignore[assignment]
        states = {type(state).__name__: state for state in backend.rank_states[known:]}
        precision.make_masters(model, self.optimizer)
        if config.buffers == "local" and size > 1:
            states["RankBuffers"] = RankBuffers(model)
        self.rank_states: dict[str, RankState] = states
        """What each rank keeps for itself between steps, by its name in checkpoints."""
