"""The methods of an optimizer of `op=Adasum`: it combines the ranks' updates, not their gradients.

`optimizer.DistributedOptimizer` uses them in place of its own of the same names. Adasum is from
Maleki et al., MLSys 2021.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdtrain._torch.step_mark import inner_step, with_step_hooks
from hvdtrain.hvd.engine.operation import ADASUM
from hvdtrain.hvd.ops.differentiable import grouped_allreduce


def synchronize(self: Any) -> None:
    """Do nothing: gradients stay this rank's own."""


@contextmanager
def skip_synchronize(self: Any) -> Iterator[None]:
    """Raise AssertionError: a step without combining would make the ranks' models diverge."""
    raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
    yield  # unreachable, but makes this a generator, as contextmanager requires


@with_step_hooks
def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Step on this rank's own gradients, then combine all ranks' updates. Collective.

    Each call of the closure may make as many backward passes as a step; in the first call those
    before the step count too, as in Horovod, which makes no other.
    """
    names = self._spec.names
    params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
    begin = {p: p.detach().clone() for p in params}
    inner: Any = functools.partial(inner_step(type(self).__mro__[1]), self)

    def counted() -> Any:
        result = closure()  # type: ignore[misc]
        self._reducer.reset()
        return result

    loss = inner() if closure is None else inner(counted)
    # By name, so that ranks with another order of parameters send the same list.
    known = sorted((p for p in params if p in names), key=lambda p: names[p])
    with torch.no_grad():
        combined = grouped_allreduce(
            [p.detach() - begin[p] for p in known],
            name=f"adasum.{type(self).__name__}",
            compression=self._compression,
            op=ADASUM,
        )
        updates = dict(zip(known, combined, strict=True))
        for p in params:  # in exact mode one that was added later never moves, as in Horovod
            p.copy_(begin[p] + updates[p] if p in updates else begin[p])
    self._reducer.synchronize()
    return loss


ADASUM_METHODS = {
    "synchronize": synchronize,
    "skip_synchronize": skip_synchronize,
    "step": step,
}
