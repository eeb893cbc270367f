"""Backends with a fault in one collective, "mean", for `tests/test_doctor.py`."""

from __future__ import annotations

import os
import signal
import time

from torch import Tensor

from hvdtrain.backends.base import Op
from hvdtrain.backends.ddp import DDP


class Stops(DDP):
    """Rank 1 is stopped."""

    signal = signal.SIGSTOP

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        if self.world.rank == 1 and t.numel() > 1:
            os.kill(os.getpid(), self.signal)
        return super().all_reduce(t, op)


class Dies(Stops):
    """Rank 1 is killed."""

    signal = signal.SIGKILL


class Sleeps(DDP):
    """All ranks hang, and none of them reports it."""

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        if t.numel() > 1:
            time.sleep(1000)
        return super().all_reduce(t, op)


class IsWrong(DDP):
    """One number of the result is wrong."""

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        result = super().all_reduce(t, op)
        if result.numel() > 1:
            result[-1] += 1
        return result
