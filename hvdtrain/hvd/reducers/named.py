"""NamedReducer: every gradient of every step by name, for the user's own compressors."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from hvdtrain.hvd.reducers.base import TOO_MANY, Recipe, Reducer
from hvdtrain.hvd.reducers.byname import ByName


class NamedReducer(Reducer):
    """Sends each gradient as soon as it is ready. The compressor may return any tensor, so the
    ranks cannot agree on buckets in advance.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._by_name = ByName(recipe)

    def reset(self) -> None:
        """Discard the backward passes since the last step, and the pending allreduces."""
        super().reset()
        self._by_name.sent.clear()

    def _hook(self, i: int) -> Any:
        delays = self._delays
        own = weakref.ref(self)  # the parameter owns the hook, which must not own the optimizer

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
