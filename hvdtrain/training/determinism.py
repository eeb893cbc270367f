"""CPU threads and random seeds of a rank: the bits of a result depend on both."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from hvdtrain.job import launcher_watch
from hvdtrain.job.world import World, is_mpi, rank_variable
from hvdtrain.system import cores, machine


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
        mine, of_host = len(os.sched_getaffinity(0)), cores_of_host(world)
        share, why = of_host // world.local_size, f"{of_host} cores / {world.local_size}"
        quota = machine.cpu_quota()  # of a container: its ranks see more cores than they may use
        if quota is not None and quota < of_host:
            share = int(quota) // world.local_size
            why = f"a quota of {quota:.3g} of {of_host} cores / {world.local_size}"
        threads = max(1, min(mine, share))
        if mine < share:
            why = f"bound to {mine} of {of_host} cores"
    torch.set_num_threads(threads)
    return f"{threads} a rank ({why})"


def cores_of_host(world: World) -> int:
    """Return how many cores all ranks of this host have together. Not collective.

    hvdrun and mpirun may bind each rank to a part of them: to one core, or to a socket that several
    ranks share. Then they are the cores of its own process on this host. Not those of the machine:
    a job of Slurm or a container may have only some.
    """
    own = launchers = cores.of_host()
    variable = is_mpi(world) and rank_variable(world)
    # The launcher may be in another PID namespace: the ranks' cores are then all that is known.
    with contextlib.suppress(psutil.Error, OSError):
        if variable:
            launcher = launcher_watch.first_ancestor_without(variable)
            launchers = os.sched_getaffinity(launcher.pid)
    return len(launchers if launchers > own else own)


def derive_seed(*numbers: int) -> int:
    """Combine several small numbers into one seed."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed


def seed_all(seed: int) -> None:
    """Seed torch on the devices in use, NumPy and Python. Called every step: takes microseconds."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    _seed_cpu(seed)


def _seed_cpu(seed: int) -> None:
    # torch.manual_seed checks for every kind of device, which takes ten times as long.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


@dataclass
class RandomState:
    """A separate state of the CPU's random generators: torch's, NumPy's and Python's.

    A `with` block draws from it; afterwards the program's own state is restored.
    """

    seed: int
    state: tuple[Any, ...] | None = None
    """None before the first use."""

    def __enter__(self) -> None:
        self._programs = _get_state()
        if self.state is None:
            _seed_cpu(self.seed)
        else:
            _set_state(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = _get_state()
        _set_state(self._programs)


def _get_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_state(state: tuple[Any, ...]) -> None:
    of_torch, of_numpy, of_python = state
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)
