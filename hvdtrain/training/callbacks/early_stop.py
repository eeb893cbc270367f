"""`--early-stop`: a callback that ends a run whose evaluations no longer improve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.training.callbacks.best_so_far import BestSoFar

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


class EarlyStop(BestSoFar):
    """Stops after as many evaluations without an improvement as the criterion has patience.

    A run that is resumed after it has stopped takes no step, unless its patience is larger.
    """

    option = "--early-stop"

    def check_patience(self, trainer: Trainer) -> None:
        """Stop the run if the patience is used up."""
        if self.since >= self.criterion.patience:
            best = "been a number"
            if self.value is not None:
                best = f"improved on {self.value:.4g} (step {self.step})"
            metric = f"eval_{self.criterion.metric}"
            trainer.stop(f"{metric} has not {best}; evaluations since then: {self.since}")
