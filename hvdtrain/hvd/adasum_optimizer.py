"""The optimizer of `op=Adasum`: it combines the ranks' updates, not their gradients.

`optimizer.DistributedOptimizer` makes it. Adasum is from Maleki et al., MLSys 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain._torch.step_mark import without_step_hooks
from hvdtrain.hvd.engine.request import ADASUM
from hvdtrain.hvd.ops.allreduce import grouped_allreduce
from hvdtrain.hvd.ops.handles import check_adasum


def make_adasum(
    optimizer: Optimizer, names: dict[Tensor, str], compression: Any, passes: int
) -> Any:
    """Return an optimizer of the same class, parameter groups and state, that combines updates."""
    check_adasum()
    cls = type(type(optimizer).__name__, (type(optimizer),), dict(_AdasumOptimizer.__dict__))
    wrapped: Any = object.__new__(cls)
    vars(wrapped).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._parameter_names = names
    wrapped._compression = compression
    wrapped.backward_passes_per_step = passes
    wrapped._handles = {}
    wrapped._requires_update = set()
    for group in wrapped.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                wrapped._requires_update.add(p)
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
    return wrapped


class _AdasumOptimizer(Optimizer):
    """Template: `make_adasum` copies these attributes into a subclass of the optimizer's class."""

    _parameter_names: dict[Tensor, str]
    _compression: Any
    backward_passes_per_step: int
    _handles: dict[Tensor, Any]
    _requires_update: set[Tensor]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes make a step."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: a step without combining would make the ranks' models diverge."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )
        yield  # unreachable, but makes this a generator, as contextmanager requires

    @without_step_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's own gradients, then combine all ranks' updates. Collective."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        begin = [p.detach().clone() for p in params]
        loss = super(self.__class__, self).step(closure)
        with torch.no_grad():
            deltas = [p.detach() - start for p, start in zip(params, begin, strict=True)]
            # By name, so that ranks with another order of parameters send the same list.
            order = sorted(range(len(params)), key=lambda i: self._parameter_names[params[i]])
            combined = grouped_allreduce(
                [deltas[i] for i in order],
                name=f"adasum.{type(self).__name__}",
                compression=self._compression,
                op=ADASUM,
            )
            for i, delta in zip(order, combined, strict=True):
                params[i].copy_(begin[i] + delta)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients."""
        super(self.__class__, self).zero_grad(set_to_none)
