"""The model of a run and its optimizer: built from the task, then prepared by the backend.

The Trainer builds the model before it opens the run directory, and prepares it afterwards.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.backends.base import Backend, Gradients, RankState
from hvdtrain.errors import InputError
from hvdtrain.optim.local_sgd import LocalSGD
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.training import determinism
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import derive_seed
from hvdtrain.training.lr_schedule import lr_factor, set_base_lr
from hvdtrain.training.precision import Precision
from hvdtrain.training.task import CheckedTask


@dataclass(frozen=True)
class PreparedModel:
    """What the loop trains, and what checkpoints save."""

    model: nn.Module
    """The task's own, without a wrapper."""
    net: nn.Module
    """The model in the backend's wrapper, if it has one: what the loss is computed with."""
    optimizer: Optimizer
    """The task's own, as the backend and the method have wrapped it."""
    precision: Precision
    rank_states: dict[str, RankState]
    """What each rank keeps for itself between steps, by its name in checkpoints."""
    has_mean_gradient: bool
    """Whether `p.grad` is the mean of all ranks in `on_gradients`: not under local SGD, nor if each
    rank sends its gradients to a server by itself.
    """
    lr_before: list[float]
    """The learning rates by parameter group, before and after scaling."""
    lr_after: list[float]

    # Local SGD alone lets the ranks differ

    @property
    def _local(self) -> LocalSGD | None:
        return self.optimizer if isinstance(self.optimizer, LocalSGD) else None

    @property
    def in_sync(self) -> bool:
        """Whether all ranks have the same parameters now."""
        return self._local is None or self._local.in_sync

    def skip_step(self) -> None:
        """Leave a step of the optimizer out, on all ranks. Collective where they synchronize."""
        mark_as_stepped(self.optimizer)  # the schedule advances without it
        if self._local is not None:
            self._local.skip_step()

    def synchronize(self) -> bool:
        """Give all ranks the same parameters. Return whether some had others. Collective."""
        if self._local is None or self._local.in_sync:
            return False
        self._local.synchronize()
        return True

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the average of all ranks. Collective."""
        return nullcontext() if self._local is None else self._local.averaged()

    def shared_state(self) -> dict[str, Any]:
        """Return the state of the method that all ranks have alike. Not collective."""
        return {} if self._local is None else {"local_sgd": self._local.shared_state()}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Restore it from the trainer's part of a checkpoint. Not collective."""
        if self._local is not None:
            # Of a run with another method, or of a version before 0.2.
            other = {"num_steps": state["position"]["step"], "outer": state.get("outer")}
            self._local.load_shared_state(state.get("local_sgd", other))


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


class OwnOptimizer:
    """The state of each rank's own optimizer under local SGD, for checkpoints. Not collective."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict."""
        return {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, but for the rates, which stay as they are."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = group["initial_lr"] = rate


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
    lr_before, lr_after = set_base_lr(optimizer, config.lr, factor)
    known = len(backend.rank_states)
    kind: Gradients = "local" if config.sync_every > 0 else "mean"
    net, optimizer = backend.prepare(model, optimizer, kind)
    if config.compile:
        net = torch.compile(net)  # type: ignore[assignment]
    rank_states = {type(state).__name__: state for state in backend.rank_states[known:]}
    precision.make_masters(model, optimizer)
    if config.sync_every > 0:
        if config.local_state == "local":
            rank_states["LocalSGD"] = OwnOptimizer(optimizer)  # its name since version 0.1
        optimizer = _make_local(optimizer, model, backend, config)
    if config.buffers == "local" and size > 1:
        rank_states["RankBuffers"] = RankBuffers(model)
    has_mean = config.sync_every == 0
    return PreparedModel(
        model, net, optimizer, precision, rank_states, has_mean, lr_before, lr_after
    )


def _make_local(
    optimizer: Optimizer, model: nn.Module, backend: Backend, config: TrainConfig
) -> LocalSGD:
    """Return the wrapper of local SGD or DiLoCo that the options choose. Not collective."""
    outer = None
    if (given := config.outer_option()) is not None:
        outer = partial(
            SGD, lr=given.lr, momentum=given.momentum, nesterov=given.kind == "nesterov"
        )
    return LocalSGD(
        optimizer,
        model,
        backend,
        config.sync_every,
        warmup=config.local_warmup,
        averages_state=config.local_state == "average",
        outer=outer,
    )
