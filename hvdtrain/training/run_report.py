"""What a run reports of itself: its run directory, run.json, its first lines, and its result.

Used by the Trainer. Nothing here is collective.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import provenance
from hvdtrain.backends.base import Backend
from hvdtrain.training import checkpoint, run_state
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.ledger import Ledger
from hvdtrain.training.run_dir import RunDirectory, make_default


@dataclass(frozen=True)
class Result:
    """The outcome of a run, equal on every rank."""

    steps: int
    metrics: dict[str, Any]
    """The last evaluation, over all samples of the evaluation data: numbers, and lists of them."""
    params_sha256: str
    run_dir: Path
    recorded: dict[str, Any] = field(default_factory=dict)
    """What callbacks have recorded in run.json: see `Trainer.record`."""

    @property
    def best_checkpoint(self) -> Path | None:
        """With `--keep-best`: the checkpoint of the best evaluation."""
        path = self.recorded.get("best_checkpoint", {}).get("path")
        return None if path is None else Path(path)


def open_run_dir(
    backend: Backend, config: TrainConfig, origins: dict[str, str], threads: str
) -> RunDirectory:
    """Check the path in --resume, then create and lock the run directory, and write run.json.

    One rank calls. `origins`: the source of each option. Raises CheckpointError or InputError.
    """
    run_state.check(config.resume)
    path = Path(config.run_dir) if config.run_dir else make_default(config.task, backend.name)
    run_dir = RunDirectory(path, resuming=config.resume != "none")
    checkpoint.remove_leftovers(run_dir.checkpoints)
    run_dir.start(_about(backend, config, origins, threads))
    return run_dir


def _about(
    backend: Backend, config: TrainConfig, origins: dict[str, str], threads: str
) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "config": asdict(config),
        "origins": origins,
        "world": asdict(backend.world),
        "hosts": backend.hosts or [socket.gethostname()],
        "backend": {**backend.describe(), "reason": backend.reason},
        "threads": threads,
        "versions": provenance.versions(),
        "environment": provenance.variables(os.environ),
    }


def header(
    backend: Backend, task: str, ledger: Ledger, threads: str, run_dir: Path | None
) -> list[str]:
    """Return the first lines of a run: task, backend, ledger, threads and run directory."""
    about, world = backend.describe(), backend.world
    hosts = len(set(backend.hosts)) or 1
    over = about.get("transport") or about.get("controller")
    reasons = [backend.reason, about.get("note", "")]
    if why := about.get("transport_reason"):
        reasons.append(f"{over}: {why}")
    ranks, on, by = _count(world.size, "rank"), _count(hosts, "host"), world.started_by
    return [
        f"task     {task}, {ranks} on {on}, started by {by}",
        f"backend  {about['name']}{f' over {over}' if over else ''} on "
        f"{backend.device.type} ({'; '.join(filter(None, reasons))})",
        *ledger.lines(),
        f"threads  {threads}",
        *([] if run_dir is None else [f"run      {run_dir}"]),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
