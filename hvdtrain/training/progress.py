"""How far a run is: `Progress`, which the loop counts and checkpoints keep."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.training.config import TrainConfig


@dataclass
class Progress:
    """The progress of a run: optimizer steps done, epochs done, and samples that all ranks have
    used in this epoch.
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0

    @property
    def epoch_number(self) -> int:
        """The epoch of the last step, counted from 1."""
        return self.epoch + bool(self.sample)

    def is_complete(self, config: TrainConfig) -> bool:
        """Return whether all epochs, or the steps of `--max-steps`, are done."""
        maximum = config.max_steps
        return self.epoch >= config.max_epochs() or (maximum is not None and self.step >= maximum)

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.sample = self.epoch + 1, 0
