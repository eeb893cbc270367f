"""Local SGD and DiLoCo: the ranks step alone, and average their parameters every H steps.

Each rank steps on its own gradients; after every H steps all parameters are averaged in one
reduction per dtype (Stich, ICLR 2019; with a warm-up of synchronous steps: Lin et al., ICLR 2020,
as torch's PostLocalSGDOptimizer). With an outer optimizer the average is not taken as it is: the
distance that the ranks have moved is the gradient of an optimizer step on the parameters of the
last synchronization (DiLoCo: Douillard et al., 2023).

    net, optimizer = backend.prepare(model, optimizer, "local")
    optimizer = LocalSGD(optimizer, model, backend, every=8)
    ...                          # the loop of any other method
    optimizer.synchronize()      # at its end
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hvdtrain.optim.model_sync import (
    Collectives,
    average,
    sync_buffers,
    to_cpu,
    with_sparse_gradients,
)
from hvdtrain.system.trees import parameters_of


class LocalSGD(Optimizer):
    """Steps the wrapped optimizer of this rank, and synchronizes the ranks after every `every`
    steps.

    In the first `warmup` steps the gradients are averaged instead. With `averages_state` the
    floating-point state of the optimizers is averaged with the parameters. `outer` makes the outer
    optimizer of DiLoCo from a list of parameters; it is the same on all ranks.

    Every rank makes one, of the same model, and steps it as often; every method that is collective
    says so. Buffers follow the backend's policy at each synchronization.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        backend: Collectives,
        every: int,
        *,
        warmup: int = 0,
        averages_state: bool = False,
        outer: Callable[[list[Tensor]], SGD] | None = None,
    ) -> None:
        # Not `super().__init__`: the groups and the state are those of the wrapped optimizer.
        self.wrapped = optimizer
        self._backend, self._model = backend, model
        self._every, self._warmup = every, warmup
        self._averages_state = averages_state
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sparse = set(with_sparse_gradients(model))
        self._outer = (
            None if outer is None else outer([p.detach().clone() for p in self._parameters])
        )
        self._num_steps = 0
        self._synchronized_at = 0
        """The number of steps at the last synchronization."""

    # As of any optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer, of this rank."""
        return self.wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.wrapped.defaults

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Let the wrapped optimizer call `hook` before its step. Not collective."""
        return self.wrapped.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Let the wrapped optimizer call `hook` after its step. Not collective."""
        return self.wrapped.register_step_post_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Not collective."""
        self.wrapped.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of this rank's own optimizer. Not collective."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of this rank's own optimizer. Not collective."""
        self.wrapped.load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of this rank's own, and synchronize if it is due. Collective in the warm-up
        and where it is due.
        """
        assert closure is None, "a closure may run on some ranks only"
        if self._num_steps < self._warmup:
            self._average_gradients()
        self.wrapped.step()
        self._num_steps += 1
        local = self._num_steps - self._warmup
        if local <= 0 or local % self._every == 0:
            self.synchronize()

    # The synchronization

    @property
    def in_sync(self) -> bool:
        """Whether all ranks have the same parameters now."""
        return self._num_steps == self._synchronized_at

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the parameters, unless the ranks are in sync: also the optimizers' state, if
        asked for; take the step of the outer optimizer, if there is one. Collective if not in sync.
        """
        if self.in_sync:
            return
        if self._num_steps > self._warmup:
            average(self._backend, [p.detach() for p in self._parameters])
            if self._averages_state:
                average(self._backend, _floating(self.wrapped))
            if self._outer is not None:
                self._take_outer_step(self._outer)
        else:  # in the warm-up the parameters are equal
            self._begin_outer()
        sync_buffers(self._backend, self._model.buffers())
        self._synchronized_at = self._num_steps

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the average of all ranks inside the block, and its own values afterwards.
        Collective if the ranks are not in sync.
        """
        if self.in_sync:
            yield
            return
        own = [t.detach() for t in (*self._parameters, *self._model.buffers())]
        before = [t.clone() for t in own]
        average(self._backend, [p.detach() for p in self._parameters])
        sync_buffers(self._backend, self._model.buffers())
        try:
            yield
        finally:
            with torch.no_grad():
                for t, value in zip(own, before, strict=True):
                    t.copy_(value)

    # What all ranks have alike, for checkpoints of ranks that are in sync

    def shared_state(self) -> dict[str, Any]:
        """Return the number of steps, and the outer optimizer's state or None. Not collective."""
        outer = None if self._outer is None else to_cpu(self._outer.state_dict()["state"])
        return {"num_steps": self._num_steps, "outer": outer}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Continue from the model's parameters, with what `shared_state` returned. Not collective.

        The state of a run without an outer optimizer starts a new one.
        """
        self._num_steps = self._synchronized_at = state["num_steps"]
        self._begin_outer()
        if self._outer is not None and state["outer"] is not None:
            groups = self._outer.state_dict()["param_groups"]
            self._outer.load_state_dict({"state": state["outer"], "param_groups": groups})

    def _begin_outer(self) -> None:
        """Let the outer optimizer start from the model's parameters."""
        for outer, p in self._outer_pairs():
            outer.copy_(p.detach())

    def _take_outer_step(self, optimizer: SGD) -> None:
        for outer, p in self._outer_pairs():
            outer.grad = outer - p
        optimizer.step()
        for outer, p in self._outer_pairs():
            p.copy_(outer)

    def _outer_pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the outer optimizer's parameters with the model's; none without one."""
        if self._outer is None:
            return ()
        return zip(parameters_of(self._outer), self._parameters, strict=True)

    def _average_gradients(self) -> None:
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


def _mean_of_sparse(backend: Collectives, grad: Tensor) -> Tensor:
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


def _floating(optimizer: Optimizer) -> list[Tensor]:
    """Return the floating-point tensors of an optimizer's state, in the order of its parameters."""
    states = [optimizer.state[p] for p in parameters_of(optimizer) if p in optimizer.state]
    tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
    return [t for t in tensors if t.is_floating_point() and t.dim()]
