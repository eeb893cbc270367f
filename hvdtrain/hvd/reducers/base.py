"""What both reducers share: the parameters, their hooks, and the count of backward passes."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.request import AVERAGE
from hvdtrain.hvd.process_sets import ProcessSet


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()


TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


@dataclass
class Recipe:
    """What an optimizer's gradients go through. Names meet those of other ranks."""

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
    """The parameters that required gradients at construction, or have since. They get a gradient in
    every step, of zeros if need be."""

    @property
    def set_id(self) -> int:
        """The number of the process set. Raises ValueError where it is not registered."""
        set_id = self.process_set.process_set_id
        if set_id is None:
            raise ValueError(
                f"the optimizer's process set, of ranks {self.process_set.ranks}, is not "
                "registered (any more): add it to hvd.init or by hvd.add_process_set"
            )
        return set_id

    def factors(self, dtype: torch.dtype) -> tuple[float, float]:
        """What gradients are multiplied by before and after they are added up."""
        if self.op != AVERAGE:
            return 1.0, 1.0
        size = len(basics.engine.sets[self.set_id])
        # Before, the copy does it for nothing; but small numbers in half precision would lose bits.
        if self.predivide == 1.0 and dtype.itemsize >= 4:
            return 1.0 / size, 1.0
        return 1.0 / self.predivide, self.predivide / size


class Reducer(ABC):
    """Sees every gradient as it is accumulated, and averages them by `synchronize`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._delays = [recipe.passes] * len(recipe.params)
        self._hooks: dict[int, Any] = {}
        weakref.finalize(self, _remove, self._hooks).atexit = False

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(basics.engine.sets[self.recipe.set_id])

    @property
    def active(self) -> bool:
        """Whether gradients were computed since the last `synchronize`."""
        return self._delays.count(self.recipe.passes) < len(self._delays)

    def delays(self) -> dict[Tensor, int]:
        """Return how many backward passes of each parameter are left until it is averaged."""
        return dict(zip(self.recipe.params, self._delays, strict=True))

    def reset(self) -> None:
        """Forget the backward passes since the last step."""
        self._delays[:] = [self.recipe.passes] * len(self.recipe.params)

    def expect(self, passes: int) -> None:
        """Count down from another number of backward passes, from now on."""
        self._delays[:] = [passes] * len(self.recipe.params)

    def watch(self) -> None:
        """Hook every parameter that requires a gradient and has no hook yet."""
        if len(self._hooks) == len(self.recipe.params):
            return
        for i, p in enumerate(self.recipe.params):
            if p.requires_grad and i not in self._hooks:
                self.recipe.updated.add(p)
                hook = self._hook(i)
                self._hooks[i] = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def add(self, name: str, param: Tensor) -> None:
        """Take a parameter in that the optimizer was given later."""
        self.recipe.names.append(name)
        self.recipe.params.append(param)
        self._delays.append(self.recipe.passes)

    def fill_frozen(self) -> None:
        """Give zeros to parameters that had a gradient once, as Horovod does."""
        for p in self.recipe.params:
            if p.grad is None and not p.requires_grad and p in self.recipe.updated:
                p.grad = torch.zeros_like(p)

    @abstractmethod
    def _hook(self, i: int) -> Any:
        """Return what is called with each new gradient of parameter `i`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Average all gradients. Collective."""
