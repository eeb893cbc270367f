"""`--keep-best`: a callback that saves and keeps the checkpoint of the best evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.training import checkpoint
from hvdtrain.training.callback import Callback
from hvdtrain.training.criterion import BestSoFar, Criterion

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


class BestCheckpoint(Callback):
    """Requests a checkpoint after each evaluation that is the best so far; keeps the newest one.

    Its path is `best_checkpoint` in run.json.
    """

    def __init__(self, criterion: Criterion) -> None:
        self._best = BestSoFar(criterion, "--keep-best")
        self._path: Path | None = None  # on rank 0
        self._trainer: Trainer | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Keep the Trainer for `load_state_dict`, which looks for the best checkpoint."""
        self._trainer = trainer

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Compare an evaluation. Raises InputError, on every rank, if the metric is missing."""
        if self._best.update(metrics, trainer.progress.step):
            trainer.request_checkpoint()

    def on_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        """Record the path of the best checkpoint."""
        if self._best.step == trainer.saved_step:
            self._path = path
            trainer.record(best_checkpoint=self._about())

    def on_end(self, trainer: Trainer) -> None:
        """Record and print which checkpoint was the best."""
        best = self._best
        if best.value is None:
            return
        trainer.record(best_checkpoint=self._about())
        name, where = f"eval_{best.criterion.metric}", self._path or "not kept"
        trainer.console.print_line(f"best     step {best.step}, {name} {best.value:.4f}: {where}")

    def _about(self) -> dict[str, Any]:
        best, path = self._best, None if self._path is None else str(self._path)
        about = {"step": best.step, "metric": best.criterion.metric, "mode": best.criterion.mode}
        return {**about, "value": best.value, "path": path}

    def kept_steps(self) -> tuple[int, ...]:
        """Return the step of the best evaluation."""
        return () if self._best.value is None else (self._best.step,)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its step."""
        return self._best.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, unless it is of another metric; on rank 0, find the checkpoint. Record
        it: the run.json of a run that is resumed is a new one.
        """
        trainer = self._trainer
        assert trainer is not None
        restored = self._best.load_state_dict(state, trainer.console.print_line)
        if not restored or self._best.step < 0:
            return
        if trainer.resumed_from is not None:
            path = checkpoint.path_of(trainer.resumed_from.parent, self._best.step)
            if why := checkpoint.problem(path):
                trainer.console.print_line(f"resume   WARNING: the best checkpoint {path}: {why}")
            else:
                self._path = path
        trainer.record(best_checkpoint=self._about())
