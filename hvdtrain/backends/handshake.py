"""What all ranks must have alike: compared when a backend is opened, and whenever a caller asks."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping

import torch

from hvdtrain.backends.base import Backend
from hvdtrain.errors import WorldMismatch


def shake_hands(backend: Backend, agree_on: Mapping[str, object]) -> None:
    """Raise WorldMismatch on all ranks if rank order, versions or `agree_on` differ. Collective."""
    world = backend.world
    everyone = backend.all_gather_object((world.rank, socket.gethostname()))
    ranks = [rank for rank, _ in everyone]
    if ranks != list(range(world.size)):
        raise WorldMismatch(
            f"the launcher counts ranks 0 to {world.size - 1}, but backend {backend.name} has, in "
            f"its own order, {ranks}",
            on_all_ranks=True,  # every rank gathered the same list
        )
    backend.hosts = [host for _, host in everyone]
    check_same(
        backend,
        {
            "backend": backend.name,
            "world size": world.size,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **agree_on,
        },
    )


def check_same(backend: Backend, values: Mapping[str, object], advice: str = "") -> None:
    """Raise WorldMismatch, on every rank, for the first of `values` that differs between
    ranks. Collective. The message has both values, then `advice` on what to do.
    """
    everyone = backend.all_gather_object(dict(values))
    on = [f" on {host}" for host in backend.hosts] or [""] * len(everyone)
    for rank, other in enumerate(everyone):
        for key, value in everyone[0].items():
            if other.get(key) != value:
                raise WorldMismatch(
                    f"rank 0{on[0]} has {key} = {value}, but rank {rank}{on[rank]} has "
                    f"{other.get(key, 'nothing')}{advice}",
                    on_all_ranks=True,  # every rank gathered the same lists
                )
