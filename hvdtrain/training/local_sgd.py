"""Local SGD and DiLoCo: the ranks step alone, and average their parameters every H steps.

The Trainer uses it with `--sync-every H`. Each rank steps on its own gradients; after every H steps
all parameters are averaged in one reduction per dtype (Stich, ICLR 2019; with a warm-up of
synchronous steps: Lin et al., ICLR 2020, as torch's PostLocalSGDOptimizer). With an outer optimizer
the average is not taken as it is: the distance that the ranks have moved is the gradient of an
optimizer step on the parameters of the last synchronization (DiLoCo: Douillard et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hvdtrain.backends.base import Backend
from hvdtrain.backends.model_sync import average, sync_buffers, to_cpu, with_sparse_gradients
from hvdtrain.training.config import TrainConfig
from hvdtrain.trees import parameters_of


class LocalSGD:
    """The synchronization of one model. Every method that is collective says so."""

    def __init__(
        self, backend: Backend, model: nn.Module, optimizer: Optimizer, config: TrainConfig
    ) -> None:
        self._backend = backend
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sparse = set(with_sparse_gradients(model))
        self.last_step = -1
        """The last step of the run, as soon as it is known: the ranks synchronize after it."""
        self._outer: SGD | None = None
        if config.outer_optimizer != "none":
            self._outer = SGD(
                [p.detach().clone() for p in self._parameters],
                lr=config.outer_lr,
                momentum=config.outer_momentum,
                nesterov=config.outer_optimizer == "nesterov",
            )

    def is_in_sync(self, step: int) -> bool:
        """Return whether all ranks have the same parameters after this step. Not collective."""
        local = step - self._config.local_warmup
        return local <= 0 or local % self._config.sync_every == 0 or step == self.last_step

    def finish_backward(self, step: int) -> None:
        """Average the gradients if `step` belongs to the warm-up. Collective there."""
        if step > self._config.local_warmup:
            return
        dense = []
        for p in self._parameters:
            if p.grad is None:
                continue
            # By the layer too: a rank that has not used it has a dense gradient of zeros.
            if p.grad.is_sparse or p in self._sparse:
                p.grad = _mean_of_sparse(self._backend, p.grad)
            else:
                dense.append(p.grad)
        average(self._backend, dense)

    def finish_step(self, step: int) -> None:
        """Synchronize parameters, buffers and, if asked for, the optimizer's state, if `step` is
        due. Collective there.
        """
        if not self.is_in_sync(step):
            return
        with torch.no_grad():
            if step > self._config.local_warmup:
                average(self._backend, [p.detach() for p in self._parameters])
                if self._config.local_state == "average":
                    average(self._backend, _floating(self._optimizer))
                if self._outer is not None:
                    self._take_outer_step(self._outer)
            elif self._outer is not None:
                for outer, p in zip(_of(self._outer), self._parameters, strict=True):
                    outer.copy_(p)
        sync_buffers(self._backend, self._model)

    def _take_outer_step(self, optimizer: SGD) -> None:
        for outer, p in zip(_of(optimizer), self._parameters, strict=True):
            outer.grad = outer - p
        optimizer.step()
        for outer, p in zip(_of(optimizer), self._parameters, strict=True):
            p.copy_(outer)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the average of all ranks inside the block, and its own values afterwards.
        Collective.
        """
        own = [t.detach() for t in (*self._parameters, *self._model.buffers())]
        before = [t.clone() for t in own]
        average(self._backend, [p.detach() for p in self._parameters])
        sync_buffers(self._backend, self._model)
        try:
            yield
        finally:
            for t, value in zip(own, before, strict=True):
                t.copy_(value)

    # The state in checkpoints: of this rank, and of all ranks

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's own optimizer. Not collective."""
        return {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Not collective."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = group["initial_lr"] = rate

    def outer_state(self) -> dict[str, Any] | None:
        """Return the outer optimizer's state, which is the same on all ranks; None without one."""
        return None if self._outer is None else to_cpu(self._outer.state_dict()["state"])

    def resume(self, state: dict[str, Any] | None) -> None:
        """Continue from the model's parameters, with what `outer_state` returned. Not collective.

        A checkpoint of a run without an outer optimizer starts a new one.
        """
        if self._outer is None:
            return
        for outer, p in zip(_of(self._outer), self._parameters, strict=True):
            outer.copy_(p.detach())
        if state is not None:
            groups = self._outer.state_dict()["param_groups"]
            self._outer.load_state_dict({"state": state, "param_groups": groups})


@torch.no_grad()
def _mean_of_sparse(backend: Backend, grad: Tensor) -> Tensor:
    """Return the mean over all ranks, with the rows that any rank has; dense if `grad` is dense.
    Collective.

    The whole table is sent, as at every average of the parameters.
    """
    mine = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
    has_row = torch.zeros(grad.shape[: mine.sparse_dim()], dtype=torch.int32, device=grad.device)
    has_row[tuple(mine.indices())] = 1
    mean = backend.all_reduce(mine.to_dense(), "mean")
    indices = backend.all_reduce(has_row, "max").nonzero().t()
    if not grad.is_sparse:
        return mean
    rows = mean[tuple(indices)]
    return torch.sparse_coo_tensor(indices, rows, grad.shape, is_coalesced=True)


def _of(optimizer: SGD) -> list[Tensor]:
    parameters: list[Tensor] = optimizer.param_groups[0]["params"]
    return parameters


def _floating(optimizer: Optimizer) -> list[Tensor]:
    """Return the floating-point tensors of an optimizer's state, in the order of its parameters."""
    states = [optimizer.state[p] for p in parameters_of(optimizer) if p in optimizer.state]
    tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
    return [t for t in tensors if t.is_floating_point() and t.dim()]
