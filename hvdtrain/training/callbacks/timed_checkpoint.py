"""`--checkpoint-every 15m`: a callback that requests checkpoints by the clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.training.callback import Callback

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


class TimedCheckpoint(Callback):
    """Requests a checkpoint once the newest one is older than an interval.

    Rank 0's clock decides. The others learn of it after the steps that are logged, which wait for
    all ranks anyway.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._since = time.monotonic()

    def on_step_end(self, trainer: Trainer) -> None:
        """Compare the clock, after a step that is logged. Collective."""
        if trainer.progress.step % trainer.config.log_every == 0:
            is_due = time.monotonic() - self._since >= self._interval_s
            if trainer.backend.broadcast_object(is_due):
                trainer.request_checkpoint()

    def on_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        """Start the interval anew."""
        self._since = time.monotonic()
