"""What tests read of a run directory, and how they watch a run from step to step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hvdtrain import Callback, Trainer
from hvdtrain.errors import Preempted
from hvdtrain.system.trees import map_tree
from hvdtrain.training import checkpoint
from hvdtrain.training.console import Console

Values = dict[str, Any]
"""Values by name: options of a run, or what a rank says of it."""


class Stop(Exception):
    """The run dies here."""


def run_json(run_dir: Path) -> Values:
    """Return the record of a run."""
    found: Values = json.loads((run_dir / "run.json").read_text())
    return found


def records(folder: Path, file: str = "metrics.jsonl") -> list[Any]:
    """Return the records of a run's metrics, without the times at which they were written; or of
    another file with one on each line.
    """
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    if file == "metrics.jsonl":
        for record in found:
            del record["time"]
    return found


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return [int(path.name[5:]) for path in checkpoint.list_checkpoints(run_dir / "checkpoints")]


def newest(run_dir: Path) -> Path:
    """Return the newest valid checkpoint of a run."""
    path, _ = checkpoint.newest(run_dir / "checkpoints")
    assert path is not None
    return path


def saved_parts(run_dir: Path) -> Values:
    """Return the parts of the newest valid checkpoint of a run."""
    path = newest(run_dir)
    return {name: checkpoint.load(path, name) for name in checkpoint.part_names(path)}


def evaluations(run_dir: Path) -> list[Values]:
    """Return the records of a run's evaluations."""
    return [record for record in records(run_dir) if "eval_loss" in record]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state, which training leaves alone."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def bits_of(tree: object) -> str:
    """Return nested values as a text that tells every bit of them: a tensor's dtype, shape and
    elements, the order of the keys of a dict.
    """
    return repr(
        map_tree(lambda t: (t.dtype, t.shape, t.tolist()), Tensor, tree, keep_dict_types=True)
    )


def fit_watched(
    trainer: Trainer, stop_at: int = -1, at_step: Callable[[int], object] = int
) -> Values:
    """Train, or die before step `stop_at`; call `at_step` with each step. Return the digest of the
    weights, or how the run ended, the rate of each step, and what the run would print.
    """
    rates: list[float] = []
    lines: list[str] = []

    class Watch(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            rates.append(trainer.optimizer.param_groups[0]["lr"])
            at_step(trainer.progress.step)
            if trainer.progress.step == stop_at:
                raise Stop

    class Lines(Console):
        def print_line(self, text: str) -> None:
            lines.append(text)

    trainer._given_callbacks = [*trainer._given_callbacks, Watch()]
    trainer.console = Lines(trainer.backend)
    found: Values = {"rates": rates, "lines": lines}
    try:
        result = trainer.fit()
        found |= {"digest": result.params_sha256, "best": result.best_checkpoint}
    except Stop:
        found["digest"] = "stopped"
    except Preempted as ended:
        found["digest"] = f"code {ended.code}: {ended}"
    return {**found, "step": trainer.progress.step}
