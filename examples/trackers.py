r"""Experiment trackers as a callback: Weights & Biases, MLflow, or one of your own (3 methods).

pip install wandb     # or mlflow
torchrun --nproc-per-node 2 -m hvdtrain --callback examples/trackers.py:wandb

Tried with wandb 0.31.0 (WANDB_MODE=offline) and mlflow 3.17.2 (MLFLOW_TRACKING_URI=sqlite:///mlflow.db;
its file store wants MLFLOW_ALLOW_FILE_STORE=true).
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from hvdtrain import Callback, Trainer


class Tracker(Protocol):
    """What `Tracked` needs. It is called on rank 0 only."""

    def start(self, config: dict[str, Any]) -> None:
        """Begin a run with these options; `run_dir` is its directory."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of one record of metrics.jsonl."""

    def finish(self) -> None:
        """End a run. One that fails does not call it."""


class Tracked(Callback):
    """Gives a tracker what the run logs."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def on_start(self, trainer: Trainer) -> None:
        if trainer.run_dir is not None:  # on rank 0
            self.tracker.start({**asdict(trainer.config), "run_dir": str(trainer.run_dir)})

    def on_log(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        if trainer.run_dir is not None:
            numbers = {k: v for k, v in record.items() if isinstance(v, (int, float))}
            self.tracker.log(int(numbers.pop("step")), numbers)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.run_dir is not None:
            self.tracker.finish()


class WandB:
    """Weights & Biases. A resumed run continues there, too."""

    def start(self, config: dict[str, Any]) -> None:
        import wandb

        name = Path(config["run_dir"]).name
        self.run = wandb.init(project="hvdtrain", id=name, name=name, resume="allow", config=config)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def finish(self) -> None:
        self.run.finish()


class MLflow:
    def start(self, config: dict[str, Any]) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name=Path(config["run_dir"]).name)
        mlflow.log_params(config)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.mlflow.log_metrics(values, step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


wandb = Tracked(WandB())
mlflow = Tracked(MLflow())
