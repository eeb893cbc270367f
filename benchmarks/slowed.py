"""Native DDP with steps made longer on purpose, for `comparisons.py`."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import ClassVar

from torch.optim import Optimizer

from hvdtrain.backends.base import BackendOptions
from hvdtrain.backends.ddp import DDP
from hvdtrain.world import World


class Slowed(DDP):
    """Every step takes longer by a share of what steps lately took without that."""

    share: ClassVar[float] = 0.0

    def __init__(self, world: World, options: BackendOptions) -> None:
        super().__init__(world, options)
        self._plain: deque[float] = deque([0.0], maxlen=50)
        self._since = time.perf_counter()

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Do as DDP does, and then keep the core busy."""
        super().average_gradients(optimizer)
        now = time.perf_counter()
        self._plain.append(now - self._since)
        # Not a share of this step: one after a pause would be longer by seconds.
        until = now + self.share * median(self._plain)
        while time.perf_counter() < until:
            pass
        self._since = time.perf_counter()


class By0(Slowed):
    """As long as ever."""


class AlsoBy0(Slowed):
    """Once more."""


class By3(Slowed):
    """Longer by 3 %."""

    share = 0.03


class AlsoBy3(By3):
    """Once more."""


class OnceMoreBy3(By3):
    """And again."""


class By10(Slowed):
    """Longer by 10 %."""

    share = 0.10


class AlsoBy10(By10):
    """Once more."""


class OnceMoreBy10(By10):
    """And again."""
