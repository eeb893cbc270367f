"""The table of backends, the automatic choice, and the handshake.

Every program starts with `open_backend`: the commands, and users' own loops. A name maps to
"module:Class", which is imported on use, so that the table itself imports nothing. A name with a
colon is a user's own backend: `--backend my_package.my_module:MyBackend`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING

from hvdtrain.backends.options import BackendOptions
from hvdtrain.errors import (
    BackendUnavailable,
    InputError,
    LaunchError,
    did_you_mean,
)
from hvdtrain.job import elastic_world
from hvdtrain.job.world import World, detect, unused_allocation

if TYPE_CHECKING:
    from hvdtrain.backends.base import Backend

BACKENDS = {
    "single": "hvdtrain.backends.single:Single",
    "dp": "hvdtrain.backends.dp:DataParallel",
    "ddp": "hvdtrain.backends.ddp:DDP",
    "horovod": "hvdtrain.backends.horovod:Horovod",
    "compat": "hvdtrain.backends.compat:Compat",
}

# The backends that `auto` tries, in order: the ones that users of each launcher expect.
PREFERRED = {
    "none": ("single",),
    "torchrun": ("ddp",),
    "srun": ("ddp",),
    "horovodrun": ("horovod", "compat"),
    "openmpi": ("horovod", "compat"),
    "mpich": ("horovod", "compat"),
    "mvapich": ("horovod", "compat"),
    "jsrun": ("horovod", "compat"),
    "pals": ("horovod", "compat"),
    "env://": ("ddp",),
}


def load(name: str) -> type[Backend]:
    """Import the class of a backend by its name. Not collective.

    Raises InputError for an unknown name, and for a class that cannot be imported or is no Backend.
    """
    where = BACKENDS.get(name, name)
    if ":" not in where:
        from hvdtrain import transports

        hint = did_you_mean(name, BACKENDS)
        if name in transports.TRANSPORTS:
            hint = f"{name} is a transport: --backend ddp --transport {name}; "
        raise InputError(
            f"unknown backend {name!r}; {hint}one of: auto, {', '.join(BACKENDS)}, or module:Class"
        )
    module, _, cls_name = where.partition(":")
    try:
        cls = getattr(import_module(module), cls_name)
    except (ImportError, AttributeError) as error:
        hint = "; give a module, without .py" if module.endswith(".py") else ""
        raise InputError(f"cannot load the backend {where!r}: {error}{hint}") from None
    from hvdtrain.backends.base import Backend

    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise InputError(f"{where!r} is not a subclass of hvdtrain.Backend")
    return cls


def choose(name: str, world: World) -> tuple[str, str]:
    """Resolve `auto` to a name, and check that this process can use the backend. Not collective.

    Returns the name and the reason for the choice. Raises BackendUnavailable, with the fix.
    """
    if name != "auto":
        if problem := _problem(name, world):
            raise BackendUnavailable(f"backend {name} cannot be used here: {problem}")
        return name, "as requested"
    started = f"started by {world.started_by}"
    if world.launcher == "none":
        started = "; ".join(filter(None, [world.started_by, unused_allocation()]))
    skipped = ""
    for candidate in PREFERRED[world.launcher]:
        problem = _problem(candidate, world)
        if problem is None:
            return candidate, started + skipped
        skipped += f"; not {candidate}: {problem}"
    raise BackendUnavailable(f"no backend can be used here: {started}{skipped}")


def _problem(name: str, world: World) -> str | None:
    cls = load(name)
    return cls.host_problem() or cls.launcher_problem(world)


def open_backend(
    name: str | None = None,
    world: World | None = None,
    options: BackendOptions | None = None,
    agree_on: Mapping[str, object] | None = None,
) -> Backend:
    """Choose, open and verify a backend. Collective: every rank calls.

    Without a name it is the one in HVDTRAIN_BACKEND, else `auto`; see also `BackendOptions`.
    The handshake compares the world, the versions, and the values of `agree_on` (for example the
    resolved configuration) between all ranks; WorldMismatch gives both values of a difference.
    If the script has called `hvd.init` before, `compat` and `horovod` use that hvd, with its
    timeouts, and leave it running when they close.
    Raises InputError, LaunchError, BackendUnavailable and WorldError.
    """
    from hvdtrain import transports
    from hvdtrain.backends.handshake import shake_hands
    from hvdtrain.job.rendezvous import complete_world

    if elastic_world.has_no_place():
        raise LaunchError(
            "hvdrun started an elastic job (--host-discovery-script), whose world changes; "
            "train with @hvd.elastic.run of hvdtrain.hvd, or start it with --max-restarts"
        )
    world = detect() if world is None else world
    name, reason = choose(name or os.environ.get("HVDTRAIN_BACKEND", "").strip() or "auto", world)
    _check_descriptors(world)
    options = options or BackendOptions()
    transports.check(options.transport)  # also for a backend that has no choice of transports
    kind = load(name)
    if options.compression not in kind.compressions:
        raise InputError(
            f"backend {name} cannot send gradients as {options.compression}; it has: "
            f"{', '.join(kind.compressions)}"
        )
    if options.shard_optimizer and not kind.can_shard_optimizer:
        raise InputError(f"backend {name} cannot shard the optimizer; use ddp or compat")
    world = complete_world(world, options.timeout_s)
    backend = kind(world, options)
    if options.transport not in ("auto", backend.transport):
        reason += f"; transport {options.transport} was asked for, but {name} has none to choose"
    if world.size == 1 and not backend.one_process:
        reason += "; one rank, so nothing is distributed; for more: torchrun --nproc-per-node 2 -m "
        reason += "hvdtrain"
    backend.reason = reason
    with backend._convert_peer_errors():
        backend.open()
        try:
            shake_hands(backend, {**(agree_on or {}), **asdict(options)})
            start_peer_watch(backend)
        except BaseException:
            # The process group is open already: leave it without waiting for the other ranks.
            backend.close(failed=True)
            raise
    return backend


def start_peer_watch(backend: Backend) -> None:
    """Connect the ranks, unless they are, and watch for those that keep the others waiting.
    Collective.
    """
    from hvdtrain.job.rendezvous import open_store_over
    from hvdtrain.liveness.hang_watch import HangWatch
    from hvdtrain.liveness.monitor import Monitor

    world, timeout_s = backend.world, backend.options.timeout_s
    if world.size > 1 and backend.hang_watch is None:
        store = backend.store or open_store_over(world, timeout_s, backend.broadcast_object)
        monitor = Monitor(world, store, backend.hosts, backend.progress, timeout_s)
        backend.hang_watch = HangWatch(monitor)


def descriptors_needed(size: int) -> int:
    """Return how many open files and sockets each of `size` ranks needs. Not collective."""
    return 64 + 2 * size if size > 1 else 0


def _check_descriptors(world: World) -> None:
    """Raise InputError if this process cannot open the files and sockets that it needs.

    Increases the soft limit if the hard limit allows it. A library that runs out of descriptors
    hangs, or fails with an unrelated message. Not collective.
    """
    wanted = descriptors_needed(world.size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise InputError(
            f"ulimit -n is {soft}, and each of {world.size} ranks needs {wanted} open files and "
            "sockets; raise it, such as: ulimit -n 1024"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
