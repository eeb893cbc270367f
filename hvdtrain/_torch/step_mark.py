"""The mark that an optimizer has stepped. Used by `training.precision`.

Relies on `Optimizer._opt_called`, which torch.optim.lr_scheduler reads. Without it nothing changes
but that torch warns, if an fp16 run skips its first step, of a scheduler before its optimizer.
"""

from __future__ import annotations

from torch.optim import Optimizer


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Let a scheduler advance without a warning, although the step may be skipped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
