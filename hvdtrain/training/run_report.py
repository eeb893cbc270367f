"""What a run reports of itself: its run directory, run.json, its first lines, and its result.

Used by the Trainer, which also asks here whether a launcher has started the job before: a run with
`--run-dir` then continues from the newest checkpoint there, without a further option. Nothing here
is collective but that.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hvdtrain.backends.base import Backend
from hvdtrain.errors import CheckpointError
from hvdtrain.job import elastic_world
from hvdtrain.job.world import hvdrun_restart, launch_env
from hvdtrain.system import provenance
from hvdtrain.training import checkpoint
from hvdtrain.training.config import TrainConfig, flag
from hvdtrain.training.run_dir import RunDirectory, checkpoints_of, make_default
from hvdtrain.training.schedule import Ledger

_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class Result:
    """The outcome of a run, equal on every rank."""

    steps: int
    metrics: dict[str, Any]
    """The last evaluation, over all samples of the evaluation data: numbers, and lists of them."""
    params_sha256: str
    run_dir: Path
    recorded: dict[str, Any]
    """What callbacks have recorded in run.json: see `Trainer.record`."""

    @property
    def best_checkpoint(self) -> Path | None:
        """With `--keep-best`: the checkpoint of the best evaluation."""
        path = self.recorded.get("best_checkpoint", {}).get("path")
        return None if path is None else Path(path)


def is_restart(backend: Backend) -> bool:
    """Return whether torchrun, hvdrun or Slurm starts this job again. Collective.

    Of several agents of torchrun those alone count a restart whose own rank has failed.
    """
    env = launch_env()
    counts = [int(env[name]) for name in _COUNTS if env.get(name, "").isdecimal()]
    by_hvdrun = hvdrun_restart(env) or {}
    return any(backend.all_gather_object(max([by_hvdrun.get("number", 0), *counts])))


def open_run_dir(
    backend: Backend,
    config: TrainConfig,
    origins: dict[str, str],
    threads: str,
    is_restart: bool,
) -> RunDirectory:
    """Check the path in --resume, then create and lock the run directory, and write run.json.

    One rank calls. `origins`: the source of each option. After a restart `--run-dir` may be that of
    the earlier ranks. Raises CheckpointError or InputError.
    """
    if config.resume not in ("none", "auto", "must"):
        root = checkpoints_of(config.resume)
        if root is None:
            why = checkpoint.problem(Path(config.resume))
        else:
            why = None if checkpoint.list_checkpoints(root) else "the run has no checkpoint"
        if why is not None:
            raise CheckpointError(f"cannot resume from {config.resume}: {why}")
    path = Path(config.run_dir) if config.run_dir else make_default(config.task, backend.name)
    resumes = config.resume != "none" or is_restart
    run_dir = RunDirectory(path, resumes, _LOCK_WAIT_S if is_restart else 0.0)
    try:
        checkpoint.remove_leftovers(run_dir.checkpoints)
        about = {
            "command": sys.argv,
            "config": asdict(config),
            "origins": origins,
            "world": asdict(backend.world),
            "hosts": backend.hosts or [socket.gethostname()],
            "backend": about_backend(backend),
            "threads": threads,
            "versions": provenance.versions(),
            "environment": provenance.variables(os.environ),
        }
        run_dir.start(about, is_restart)
    except BaseException:
        run_dir.close()  # else this process could not open it again
        raise
    return run_dir


# On a shared file system the lock of a rank on a lost host may outlive it.
_LOCK_WAIT_S = 30.0


def about_backend(backend: Backend) -> dict[str, Any]:
    """Return what run.json says of the backend, at the start and at the end."""
    return {**backend.describe(), "reason": backend.reason}


def header(
    backend: Backend,
    config: TrainConfig,
    ledger: Ledger,
    model: nn.Module,
    threads: str,
    run_dir: Path | None,
    origins: dict[str, str],
    is_restart: bool,
) -> list[str]:
    """Return the first lines of a run: task, backend, ledger, threads and run directory, and what
    is unusual about it.
    """
    about, world = backend.describe(), backend.world
    hosts = len(set(backend.hosts)) or 1
    over = about.get("transport") or about.get("controller")
    why, network = about.get("transport_reason"), about.get("network")
    reasons = [
        backend.reason,
        about.get("note"),
        why and f"{over}: {why}",
        network and f"network {network}",
    ]
    ranks = f"{world.size} rank{'s' * (world.size > 1)} on {hosts} host{'s' * (hosts > 1)}"
    by = "hvdrun" if elastic_world.is_elastic() else world.started_by
    return [
        f"task     {config.task}, {ranks}, started by {by}",
        f"backend  {about['name']}{f' over {over}' if over else ''} on "
        f"{backend.device.type} ({'; '.join(filter(None, reasons))})",
        *_shares(about.get("optimizer_shares", [])),
        *ledger.lines(),
        f"threads  {threads}",
        *([] if run_dir is None else [f"run      {run_dir}"]),
        *_notes(config, model, origins, is_restart),
    ]


def _notes(
    config: TrainConfig, model: nn.Module, origins: dict[str, str], is_restart: bool
) -> Iterator[str]:
    """Yield lines about a restart, options of the run before, and modules in eval mode."""
    if is_restart and config.run_dir is None:
        yield (
            "restart  WARNING: TRAINING STARTS AGAIN FROM STEP 0 on all ranks; with --run-dir "
            "DIR it continues from the newest checkpoint there"
        )
    kept = {n: getattr(config, n) for n, origin in origins.items() if origin == "run.json"}
    if kept:
        texts = {n: " ".join(v) if isinstance(v, tuple) else v for n, v in kept.items()}
        options = " ".join(f"{flag(name)} {text}" for name, text in texts.items())
        yield f"options  of the run before: {options}"
    modes = [module.training for module in model.modules()]
    if modes[0] and not all(modes):
        yield (
            f"model    modules in eval mode, as the task returned them: {modes.count(False)} of "
            f"{len(modes)}; they stay in it"
        )


def _shares(sizes: list[int]) -> Iterator[str]:
    """Yield what `--shard-optimizer` does, if it is given. `sizes`: the ranks on each host."""
    if max(sizes, default=0) == 1:
        where = "there is one rank" if len(sizes) == 1 else "each host has one rank"
        yield f"shares   --shard-optimizer does nothing: {where}"
    elif len(sizes) == 1:
        yield f"shares   each rank steps 1/{sizes[0]} of the parameters, which all ranks share"
    elif sizes:
        parts = ", ".join(f"1/{size}" for size in sizes)
        yield (
            f"shares   the ranks of a host share its parameters; each steps {parts} of them, by "
            "host"
        )
