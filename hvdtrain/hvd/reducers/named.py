"""Every step by name, for compressors that are the user's own."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from hvdtrain.hvd.reducers.base import TOO_MANY, Recipe, Reducer
from hvdtrain.hvd.reducers.byname import ByName


class NamedReducer(Reducer):
    """Sends each gradient as soon as it is there: what the compressor makes of it may be anything,
    so nothing can be agreed beforehand.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._by_name = ByName(recipe)

    def reset(self) -> None:
        """Forget the backward passes since the last step, and what was sent."""
        super().reset()
        self._by_name.sent.clear()

    def _hook(self, i: int) -> Any:
        delays = self._delays
        own = weakref.ref(self)  # the hook, which the parameter keeps, must not keep the optimizer

        def hook(p: Tensor) -> None:
            self = own()
            if self is None:
                return
            if delays[i] <= 0:
                raise AssertionError(TOO_MANY)
            delays[i] -= 1
            if delays[i] == 0:
                self._by_name.send(i)

        return hook

    def synchronize(self) -> None:
        """Average all gradients, zeros where there are none. Collective."""
        self.watch()
        for i, p in enumerate(self.recipe.params):
            if i not in self._by_name.sent and p in self.recipe.updated:
                self._by_name.send(i)
        self._by_name.finish()
        self.reset()
