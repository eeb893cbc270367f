"""Arms that fail on the way."""

from __future__ import annotations

from torch.optim import Optimizer

from tests.compare.faulty import Correct


class Drifts(Correct):
    """Adds something to the gradients, on all ranks alike, once it has been proved correct."""

    steps = 0

    def average_gradients(self, optimizer: Optimizer) -> None:
        super().average_gradients(optimizer)
        self.steps += 1
        if self.steps > 12:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.add_(1e-4)


class Parts(Correct):
    """Leaves its ranks to themselves once it has been proved correct."""

    steps = 0

    def average_gradients(self, optimizer: Optimizer) -> None:
        self.steps += 1
        if self.steps <= 12:
            super().average_gradients(optimizer)


class Raises(Correct):
    """Fails on rank 1 once it has been proved correct."""

    steps = 0

    def average_gradients(self, optimizer: Optimizer) -> None:
        super().average_gradients(optimizer)
        self.steps += 1
        if self.steps == 12 and self.world.rank == 1:
            raise RuntimeError("on purpose")
