"""Local SGD and DiLoCo: the ranks step alone, and average their parameters every H steps.

Each rank steps on its own gradients; after every H steps all parameters are averaged in one
reduction per dtype (Stich, ICLR 2019). With an outer optimizer the average is not taken as it is:
the distance that the ranks have moved is the gradient of an optimizer step on the parameters of the
last synchronization (DiLoCo: Douillard et al., 2023).

    net, optimizer = backend.prepare(model, optimizer, "local")
    optimizer = LocalSGD(optimizer, model, backend, every=8)
    ...                          # the loop of any other method
    optimizer.synchronize()      # at its end
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hvdtrain.optim.model_sync import Collectives, average, sync_buffers
from hvdtrain.system.trees import parameters_of


class LocalSGD(Optimizer):
    """Steps the wrapped optimizer of this rank, and synchronizes the ranks after every `every`
    steps.

    `every` may change between two steps, alike on all ranks: 1 is synchronous training, as for a
    warm-up (Lin et al., ICLR 2020). `outer` makes the outer optimizer of DiLoCo from a list of
    parameters; it is the same on all ranks.

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
        outer: Callable[[list[Tensor]], SGD] | None = None,
    ) -> None:
        # Not `super().__init__`: the groups and the state are those of the wrapped optimizer.
        self.wrapped = optimizer
        self._backend, self._model = backend, model
        self.every = every
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._outer = (
            None if outer is None else outer([p.detach().clone() for p in self._parameters])
        )
        self._num_steps = 0  # since the last synchronization

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
        """Return the state dict of this rank's own optimizer; and of the outer one, as "outer". Not
        collective.
        """
        outer = {} if self._outer is None else {"outer": self._outer.state_dict()}
        return {**self.wrapped.state_dict(), **outer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned. Not collective."""
        self.wrapped.load_state_dict({k: v for k, v in state_dict.items() if k != "outer"})
        if self._outer is not None and "outer" in state_dict:
            self._outer.load_state_dict(state_dict["outer"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of this rank's own, and synchronize if it is due: then it is collective."""
        assert closure is None, "step() of LocalSGD takes no closure"
        if self._outer is not None and self._num_steps == 0:  # weights may have been loaded
            for outer, p in zip(parameters_of(self._outer), self._parameters, strict=True):
                outer.copy_(p)
        self.wrapped.step()
        self._num_steps += 1
        if self._num_steps >= self.every:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the parameters, and take the step of the outer optimizer, if there is one.
        Collective if this rank has stepped since the last synchronization.
        """
        if self._num_steps == 0:
            return
        average(self._backend, [p.detach() for p in self._parameters])
        if self._outer is not None:
            self._take_outer_step(self._outer)
        sync_buffers(self._backend, self._model.buffers())
        self._num_steps = 0

    def _take_outer_step(self, optimizer: SGD) -> None:
        pairs = list(zip(parameters_of(optimizer), self._parameters, strict=True))
        for outer, p in pairs:
            outer.grad = outer - p
        optimizer.step()
        for outer, p in pairs:
            p.copy_(outer)
