"""CPU threads and random seeds of a rank: the bits of a result depend on both."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import numpy as np
import torch

from hvdtrain.world import World, is_mpi


def set_threads(requested: int | None, world: World, env: Mapping[str, str]) -> str:
    """Set this rank's number of CPU threads, equal under every launcher.

    Returns the number and the reason for it, as text.

    torchrun sets OMP_NUM_THREADS=1 and the others nothing. Without this, the sums inside a
    convolution would differ in their last bits between launchers, and ranks would oversubscribe the
    cores.
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
    """Seed torch on the devices in use, NumPy and Python. Called every step: takes microseconds."""
    # torch.manual_seed checks for every kind of device, which takes ten times as long.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
