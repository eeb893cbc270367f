"""Restarts: whether a launcher has started this job before.

The Trainer asks it. A run with `--run-dir` then continues from the newest checkpoint there, without
a further option; the launchers do not pass on a directory that a run has made by itself.
"""

from __future__ import annotations

from hvdtrain.backends.base import Backend
from hvdtrain.job.world import hvdrun_restart, launch_env

_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def is_restart(backend: Backend) -> bool:
    """Return whether torchrun, hvdrun or Slurm starts this job again. Collective.

    Of several agents of torchrun those alone count a restart whose own rank has failed.
    """
    env = launch_env()
    counts = [int(env[name]) for name in _COUNTS if env.get(name, "").isdecimal()]
    by_hvdrun = hvdrun_restart(env) or {}
    return any(backend.all_gather_object(max([by_hvdrun.get("number", 0), *counts])))
