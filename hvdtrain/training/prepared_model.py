"""The model of a run and its optimizer: built from the task, then prepared by the backend.

The Trainer builds the model before it opens the run directory, and prepares it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

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


@dataclass(frozen=True)
class PreparedModel:
    """What the loop trains, and what checkpoints save."""

    model: nn.Module
    """The task's own, without a wrapper."""
    net: nn.Module
    """The model in the backend's wrapper, if it has one: what the loss is computed with."""
    optimizer: Optimizer
    """The task's own, as the backend has wrapped it."""
    precision: Precision
    rank_states: dict[str, RankState]
    """What each rank keeps for itself between steps, by its name in checkpoints."""
    lrs: tuple[list[float], list[float]]
    """The learning rates by parameter group, before and after scaling."""


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


def prepare_model(
    model: nn.Module,
    task: CheckedTask,
    config: TrainConfig,
    precision: Precision,
    backend: Backend,
) -> PreparedModel:
    """Create the optimizer, and prepare both by the backend. Collective.

    Load state afterwards. Raises what `Backend.prepare` does.
    """
    optimizer, size = task.optimizer(model), backend.world.size
    factor = lr_factor(config.lr_scaling, size, config.accumulate)
    lrs = set_base_lr(optimizer, config.lr, factor)
    known = len(backend.rank_states)
    net, optimizer = backend.prepare(model, optimizer)
    if config.compile:
        net = torch.compile(net)  # type: ignore[assignment]
    rank_states = {type(state).__name__: state for state in backend.rank_states[known:]}
    precision.make_masters(model, optimizer)
    if config.buffers == "local" and size > 1:
        rank_states["RankBuffers"] = RankBuffers(model)
    return PreparedModel(model, net, optimizer, precision, rank_states, lrs)
