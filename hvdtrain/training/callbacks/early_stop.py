"""`--early-stop`: a callback that ends a run whose evaluations no longer improve."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdtrain.training.callback import Callback
from hvdtrain.training.criterion import BestSoFar, Criterion

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


class EarlyStop(Callback):
    """Stops after as many evaluations without an improvement as the criterion has patience.

    A run that is resumed after it has stopped takes no step, unless its patience is larger.
    """

    def __init__(self, criterion: Criterion) -> None:
        self._best = BestSoFar(criterion, "--early-stop")
        self._trainer: Trainer | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Keep the Trainer for `load_state_dict`, which may stop at once. Print a line if the run
        has too few evaluations. They still count in a run that continues this one.
        """
        self._trainer = trainer
        # The first evaluation is the best so far.
        num, earliest = num_evaluations(trainer), 1 + self._best.criterion.patience
        if trainer.resumed_from is None and num <= earliest:
            trainer.console.print_line(
                f"stop     --early-stop {trainer.config.early_stop} has no effect in this run: it "
                f"needs more than {earliest} evaluations, and the run has {num}"
            )

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Count an evaluation. Raises InputError, on every rank, if the metric is missing."""
        self._best.update(metrics, trainer.progress.step)
        if self.is_over():
            trainer.stop(self.reason())

    def is_over(self) -> bool:
        """Return whether the patience is used up."""
        return self._best.since >= self._best.criterion.patience

    def reason(self) -> str:
        """Return the reason of the stop, for people."""
        best, count = self._best, self._best.since
        evaluations = "1 evaluation" if count == 1 else f"{count} evaluations"
        what = "has not been a number"
        if best.value is not None:
            what = f"has not improved on {best.value:.4f} (step {best.step})"
        return f"eval_{best.criterion.metric} {what} in {evaluations}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the evaluations since."""
        return self._best.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, unless it is of another metric."""
        assert self._trainer is not None
        if not self._best.load_state_dict(state, self._trainer.console.print_line):
            return
        if self.is_over():
            self._trainer.stop(self.reason())


def num_evaluations(trainer: Trainer) -> int:
    """Return how many evaluations a run has that starts afresh; of a stream, at most."""
    config, per_epoch = trainer.config, trainer.ledger.steps_per_epoch
    steps, every, _ = config.evaluation_interval()
    if steps:
        total = trainer.ledger.total_steps
        return sys.maxsize if total is None else -(-total // steps)
    epochs = config.max_epochs()
    if config.max_steps is not None and per_epoch:
        epochs = min(epochs, -(-config.max_steps // per_epoch))
    return -(-epochs // every) if every else 1
