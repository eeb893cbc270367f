"""The ceiling: a backend without gradient synchronisation, as the upper bound of speed.

`arm_script` opens it for the arm "no communication".
"""

from __future__ import annotations

from typing import ClassVar

from torch.optim import Optimizer

from hvdtrain.backends.c10d import C10d
from hvdtrain.optim.model_sync import fill_missing_gradients


class NoCommunication(C10d):
    """Does all the work of a step in as many processes, but reduces no gradient.

    Weights start as rank 0's and then diverge. The process group serves barriers and small values.
    """

    name: ClassVar[str] = "no communication"

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Leave `p.grad` as the gradient of this rank's own samples. Not collective.

        A parameter without a gradient is an error or gets zeros, as with every backend.
        """
        names = self._made_of(optimizer).names
        fill_missing_gradients(optimizer, names, self.options.unused_parameters)
