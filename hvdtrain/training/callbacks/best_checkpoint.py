"""`--keep-best`: a callback that saves and keeps the checkpoint of the best evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.training import checkpoint
from hvdtrain.training.callbacks.best_so_far import BestSoFar

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


class BestCheckpoint(BestSoFar):
    """Requests a checkpoint after each evaluation that is the best so far; keeps the newest one.

    Its path is `best_checkpoint` in run.json.
    """

    option = "--keep-best"
    _path: Path | None = None  # on rank 0

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Compare an evaluation, and request a checkpoint of the best one."""
        super().on_evaluate(trainer, metrics)
        if self.since == 0:
            trainer.request_checkpoint()

    def on_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        """Record the path of the best checkpoint."""
        if self.step == trainer.saved_step:
            self._record(path)

    def on_end(self, trainer: Trainer) -> None:
        """Print which checkpoint was the best."""
        if self.value is not None:
            name, where = f"eval_{self.criterion.metric}", self._path or "not kept"
            best = f"step {self.step}, {name} {self.value:.4g}: {where}"
            trainer.console.print_line(f"best     {best}")

    def _record(self, path: Path | None) -> None:
        """Record the best evaluation, and where its checkpoint is."""
        self._path = path
        names = {"metric": self.criterion.metric, "mode": self.criterion.mode}
        best = {"step": self.step, **names, "value": self.value}
        self.trainer.record(best_checkpoint={**best, "path": path and str(path)})

    def kept_steps(self) -> tuple[int, ...]:
        """Return the step of the best evaluation."""
        return () if self.value is None else (self.step,)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best so far; on rank 0, find its checkpoint. Record it: the run.json of a run
        that is resumed is a new one.
        """
        super().load_state_dict(state)
        if self.value is None:
            return
        path, resumed_from = None, self.trainer.resumed_from
        if resumed_from is not None:
            path = checkpoint.path_of(resumed_from.parent, self.step)
            if why := checkpoint.problem(path):
                line = f"resume   WARNING: cannot use the best checkpoint {path}: {why}"
                self.trainer.console.print_line(line)
                path = None
        self._record(path)
