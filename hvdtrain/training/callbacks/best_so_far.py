"""The base class of callbacks that follow one metric of the evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.training.callback import Callback
from hvdtrain.training.criterion import Criterion, number_of

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


@dataclass(eq=False)
class BestSoFar(Callback):
    """Keeps the best value of a metric, its step, and the number of evaluations since."""

    option = ""
    """The option that gives the criterion."""

    criterion: Criterion
    value: float | None = None
    step: int = -1
    since: int = 0

    def on_start(self, trainer: Trainer) -> None:
        """Keep the Trainer for `load_state_dict`."""
        self.trainer = trainer

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Compare an evaluation. Raises InputError, on every rank, if the metric is missing."""
        value = number_of(metrics, self.criterion.metric, self.option)
        self.since += 1
        if self.criterion.is_better(value, self.value):
            self.value, self.step, self.since = value, trainer.progress.step, 0
        self.check_patience(trainer)

    def check_patience(self, trainer: Trainer) -> None:
        """Called after each evaluation, and once the state of a checkpoint is restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the criterion and the best so far."""
        state = asdict(self)
        return {**state.pop("criterion"), **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best so far; print a line instead if it is of another metric or mode."""
        if (state["metric"], state["mode"]) == (self.criterion.metric, self.criterion.mode):
            self.value, self.step, self.since = state["value"], state["step"], state["since"]
        else:
            other = "names another metric than the checkpoint, whose best value is not used"
            self.trainer.console.print_line(f"resume   {self.option} {other}")
        self.check_patience(self.trainer)
