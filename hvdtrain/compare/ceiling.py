"""The ceiling: every rank trains alone. What a step takes that costs nothing to synchronise."""

from __future__ import annotations

from typing import ClassVar

from torch.optim import Optimizer

from hvdtrain.backends.c10d import C10d


class NoCommunication(C10d):
    """All of the work of a step, in as many processes, and no gradient leaves its rank.

    Weights start as rank 0's; then ranks part. The process group is for barriers alone.
    """

    name: ClassVar[str] = "no communication"

    def finish_backward(self, optimizer: Optimizer) -> None:
        """Leave `p.grad` as it is: the gradient of this rank's samples. Not collective.

        Parameters without one are an error or get zeros, as everywhere.
        """
        self.settle_unused(optimizer, self.names(optimizer))
