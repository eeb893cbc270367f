"""What else decides how a run goes: threads and seeds."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import numpy as np
import torch

from hvdtrain.world import World, is_mpi


def set_threads(requested: int | None, world: World, env: Mapping[str, str]) -> str:
    """Set this rank's CPU threads, so that it does not depend on the launcher.

    Returns what and why.

    torchrun sets OMP_NUM_THREADS=1 and the others nothing: the sums inside a convolution would then
    differ in their last bits between them, and the ranks would crowd each other's cores.
    """
    given = env.get("OMP_NUM_THREADS", "")
    by_torchrun = world.launcher == "torchrun" and world.local_size > 1 and given == "1"
    if requested is not None:
        threads, why = requested, "--threads"
    elif given.isdecimal() and len(given) < 5 and int(given) > 0 and not by_torchrun:
        threads, why = int(given), "OMP_NUM_THREADS"
    else:
        cores = len(os.sched_getaffinity(0))
        if is_mpi(world) and cores < (os.cpu_count() or 1):
            threads, why = cores, f"bound to {cores} cores"
        else:
            threads, why = max(1, cores // world.local_size), f"{cores} cores / {world.local_size}"
    torch.set_num_threads(threads)
    return f"{threads} a rank ({why})"


def seed_all(seed: int) -> None:
    """Seed torch on the devices in use, NumPy and Python, in microseconds: it runs every step."""
    # torch.manual_seed looks for every kind of device there is, which takes ten times as long.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
