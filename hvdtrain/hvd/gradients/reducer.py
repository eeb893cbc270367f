"""Base of the reducers: the parameters, their hooks, and the count of backward passes.

`bucket_reducer` and `named` derive from it; `DistributedOptimizer` uses one of them, or
`PassCounter` with Adasum.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain._torch.backward import call_after_backward
from hvdtrain._torch.dynamo import untraced
from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.operation import AVERAGE
from hvdtrain.hvd.process_sets import ProcessSet

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally. If they are those of "
    "another model's loss, as of a GAN's discriminator in the generator's step, call "
    "discriminator.requires_grad_(False) before that backward, and (True) after it."
)
_CHANGED = (
    "the gradient of {names} was changed after it was sent to the other ranks, so the "
    "ranks' models would diverge: change it in a hook on its own parameter, or after "
    "optimizer.synchronize(), and step inside `with optimizer.skip_synchronize():`"
)


class Factors(NamedTuple):
    """What gradients are multiplied with before and after the sum."""

    prescale: float
    postscale: float


@dataclass
class AveragingSpec:
    """How an optimizer's gradients are averaged. Ranks match parameters by `names`."""

    names: list[str]
    params: list[Tensor]
    label: str
    op: int
    predivide: float
    compression: Any
    groups: int | list[list[str]]
    sparse_as_dense: bool
    process_set: ProcessSet
    passes: int
    updated: set[Tensor] = field(default_factory=set)
    """The parameters that required gradients at construction, or have since. Each gets a gradient
    in every step, zeros if backward computes none."""

    @property
    def set_id(self) -> int:
        """The id of the process set. Raises ValueError if it is not registered."""
        set_id = self.process_set.process_set_id
        if set_id is None:
            raise ValueError(
                f"the optimizer's process set, of ranks {self.process_set.ranks}, is not "
                "registered (any more): add it to hvd.init or by hvd.add_process_set"
            )
        return set_id

    def factors(self, dtype: torch.dtype) -> Factors:
        """Return the factors that multiply gradients before and after the sum."""
        if self.op != AVERAGE:
            return Factors(1.0, 1.0)
        size = len(basics.engine.sets[self.set_id])
        # Dividing before the sum is free, as part of the copy into the bucket. In half precision
        # that would lose bits of small values, so it divides after the sum.
        if self.predivide == 1.0 and dtype.itemsize >= 4:
            return Factors(1.0 / size, 1.0)
        return Factors(1.0 / self.predivide, self.predivide / size)


class Reducer(ABC):
    """Counts gradients in hooks as they are accumulated, and averages them in `synchronize`."""

    def __init__(self, spec: AveragingSpec) -> None:
        self.spec = spec
        self._delays = [spec.passes] * len(spec.params)
        self._hooks: dict[int, Any] = {}
        # By thread of autograd, which has one for each device: the parameter that is ready, but
        # whose gradient hooks may still change.
        self._latest: dict[int, int] = {}
        # Of the counts, and of the order in which buckets are sent. Reentrant: the garbage
        # collector may run hooks' code anywhere.
        self._lock = threading.RLock()
        # By parameter: the bucket that only counts its gradient, unless it is the last.
        self._counted: list[Any] = [None] * len(spec.params)
        self._had_too_many = False  # passes: the script knows that they have changed gradients
        # The parameters may outlive the optimizer, and would keep its hooks.
        weakref.finalize(self, _remove_hooks, self._hooks).atexit = False

    @property
    def active(self) -> bool:
        """Whether backward has computed gradients since the last `synchronize`."""
        return self._delays.count(self.spec.passes) < len(self._delays)

    def delays(self) -> dict[Tensor, int]:
        """Return each parameter's remaining backward passes before it is averaged."""
        return dict(zip(self.spec.params, self._delays, strict=True))

    def reset(self) -> None:
        """Discard the count of backward passes since the last step."""
        self.set_passes(self.spec.passes)

    def set_passes(self, passes: int) -> None:
        """Restart every parameter's countdown at `passes` backward passes."""
        self._delays[:] = [passes] * len(self._delays)
        self._latest.clear()

    def register_hooks(self) -> None:
        """Hook every parameter that requires a gradient and has no hook yet."""
        if len(self._hooks) == len(self.spec.params):
            return
        for i, p in enumerate(self.spec.params):
            if p.requires_grad and i not in self._hooks:
                self.spec.updated.add(p)
                hook = untraced(self._hook(i))
                self._hooks[i] = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def add(self, name: str, param: Tensor) -> None:
        """Add a parameter that the optimizer received after construction."""
        self.spec.names.append(name)
        self.spec.params.append(param)
        self._delays.append(self.spec.passes)
        self._counted.append(None)

    def fill_frozen(self) -> None:
        """Give zero gradients to parameters that were frozen later, as Horovod does."""
        for p in self.spec.params:
            if p.grad is None and not p.requires_grad and p in self.spec.updated:
                p.grad = torch.zeros_like(p)

    def _hook(self, i: int) -> Any:
        """Return the hook to run after each accumulation of parameter `i`'s gradient.

        Torch runs the user's own hooks on this gradient partly after it. So a gradient counts as
        ready when the next one is, or when backward ends.
        """
        delays, counted, latest, lock = self._delays, self._counted, self._latest, self._lock
        own = weakref.ref(self)  # the parameter owns the hook, which must not own the optimizer

        # Runs for every parameter in every backward pass, so it mostly only counts.
        def hook(p: Tensor) -> None:
            with lock:
                left = delays[i] = delays[i] - 1
                if left > 0 or (self := own()) is None:
                    return
                if left < 0:
                    delays[i] = 0
                    self._had_too_many = True
                    raise AssertionError(TOO_MANY)
                thread = threading.get_ident()
                previous = latest.get(thread)
                latest[thread] = i
                if previous is None:
                    call_after_backward(self.flush)
                elif (counter := counted[previous]) is not None and counter.pending > 1:
                    counter.pending -= 1  # `_handle_ready` would do no more
                else:
                    self._handle_ready(previous)

        return hook

    @untraced
    def flush(self) -> None:
        """Handle the latest gradients: all hooks on them have run."""
        with self._lock:
            ready = list(self._latest.values())
            self._latest.clear()
            for i in ready:
                self._handle_ready(i)

    def _is_ready(self, i: int) -> bool:
        """Return whether parameter `i` has the gradients of all passes, and its hooks have run."""
        return self._delays[i] <= 0 and i not in self._latest.values()

    def _check_unchanged(self, changed: list[str]) -> None:
        """Raise RuntimeError if gradients of these parameters were changed after they were sent."""
        known, self._had_too_many = self._had_too_many, False
        if changed and not known:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise RuntimeError(_CHANGED.format(names=", ".join(changed[:3]) + more))

    @abstractmethod
    def _handle_ready(self, i: int) -> None:
        """Handle the gradient of parameter `i`, which nothing changes any more."""

    @abstractmethod
    def synchronize(self) -> None:
        """Average all gradients. Collective."""


class PassCounter(Reducer):
    """Counts backward passes, and leaves the gradients alone: Adasum combines updates instead."""

    def __init__(self, spec: AveragingSpec) -> None:
        super().__init__(spec)
        for p in spec.params:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)  # as Horovod does

    def _handle_ready(self, i: int) -> None:
        """Leave the gradient alone."""

    def synchronize(self) -> None:
        """Begin to count the passes of the next step. Not collective."""
        self.register_hooks()
        self.reset()


def _remove_hooks(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
