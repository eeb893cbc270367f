"""The table of backends, the automatic choice, and the handshake.

A name maps to "module:Class", imported on use, so that naming a backend imports nothing. A name
with a colon is a user's own: `--backend my_package.my_module:MyBackend`.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import BackendUnavailable, InputError, WorldMismatch
from hvdtrain.world import World, detect

if TYPE_CHECKING:
    from hvdtrain.backends.base import Backend, BackendOptions

BACKENDS = {
    "single": "hvdtrain.backends.single:Single",
    "dp": "hvdtrain.backends.dp:DataParallel",
    "ddp": "hvdtrain.backends.ddp:DDP",
    "horovod": "hvdtrain.backends.horovod:Horovod",
    "compat": "hvdtrain.backends.compat:Compat",
}

# What `auto` tries, in order: what users of each launcher came for.
PREFERRED = {
    "none": ("single",),
    "torchrun": ("ddp",),
    "srun": ("ddp",),
    "horovodrun": ("horovod", "compat"),
    "openmpi": ("horovod", "compat"),
    "mpich": ("horovod", "compat"),
    "mvapich": ("horovod", "compat"),
}


def load(name: str) -> type[Backend]:
    """Import the class of a backend by its name. Not collective.

    Raises InputError for an unknown name or one that cannot be imported.
    """
    where = BACKENDS.get(name, name)
    if ":" not in where:
        close = get_close_matches(name, BACKENDS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(
            f"unknown backend {name!r}; {hint}one of: auto, {', '.join(BACKENDS)}, or module:Class"
        )
    module, _, cls_name = where.partition(":")
    try:
        cls = getattr(import_module(module), cls_name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load the backend {where!r}: {error}") from None
    from hvdtrain.backends.base import Backend

    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise InputError(f"{where!r} is not a subclass of hvdtrain.Backend")
    return cls


def choose(name: str, world: World) -> tuple[str, str]:
    """Resolve `auto`, and check that the backend can be used. Not collective.

    Returns the name and the reason for it. Raises BackendUnavailable with the fix.
    """
    if name != "auto":
        problem = _problem(name, world)
        if problem is not None:
            raise BackendUnavailable(f"backend {name} cannot be used here: {problem}")
        return name, "as requested"
    started = world.started_by if world.launcher == "none" else f"started by {world.started_by}"
    skipped = ""
    for candidate in PREFERRED[world.launcher]:
        problem = _problem(candidate, world)
        if problem is None:
            return candidate, started + skipped
        skipped += f"; not {candidate}: {problem}"
    raise BackendUnavailable(f"no backend can be used here: {started}{skipped}")


def _problem(name: str, world: World) -> str | None:
    cls = load(name)
    return cls.unavailable() or cls.refuses(world)


def open_backend(
    name: str = "auto",
    world: World | None = None,
    options: BackendOptions | None = None,
    agree_on: Mapping[str, object] | None = None,
) -> Backend:
    """Choose, open and verify a backend. Collective: every rank calls.

    The handshake compares the world, the versions, and the values of `agree_on` (the resolved
    configuration, say) between all ranks; WorldMismatch names both sides of a difference. Raises
    InputError, LaunchError, BackendUnavailable, WorldError.
    """
    from hvdtrain import transports
    from hvdtrain.backends.base import BackendOptions

    world = detect() if world is None else world
    name, reason = choose(name, world)
    options = options or BackendOptions()
    transports.check(options.transport)  # also where the backend has none
    backend = load(name)(world, options)
    if options.transport not in ("auto", backend.transport):
        reason += f"; transport {options.transport} was asked for, but {name} has none to choose"
    backend.reason = reason
    with backend.naming_peers():
        backend.open()
        try:
            _shake_hands(backend, agree_on or {})
        except BaseException:
            backend.close(failed=True)
            raise
    return backend


def _shake_hands(backend: Backend, agree_on: Mapping[str, object]) -> None:
    import torch

    world = backend.world
    mine: dict[str, Any] = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "same": {
            "backend": backend.name,
            "world size": world.size,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **agree_on,
        },
    }
    everyone = backend.all_gather_object(mine)
    ranks = [other["rank"] for other in everyone]
    error: WorldMismatch | None = None
    if ranks != list(range(world.size)):
        error = WorldMismatch(
            f"the launcher counts ranks 0 to {world.size - 1}, but backend {backend.name} has, in "
            f"its own order, {ranks}"
        )
    for other in everyone[1:]:
        for key, value in everyone[0]["same"].items():
            if other["same"].get(key, None) != value and error is None:
                error = WorldMismatch(
                    f"rank 0 on {everyone[0]['host']} has {key} = {value}, but rank "
                    f"{other['rank']} on {other['host']} has {other['same'].get(key, 'nothing')}"
                )
    if error is not None:
        error.everywhere = True  # all have seen the same list
        raise error
    backend.hosts = [other["host"] for other in everyone]
