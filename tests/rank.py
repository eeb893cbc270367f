"""One rank of a pool: see ranks.py. `python -m tests.rank SOCKET FIXTURE BACKEND TRANSPORT`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any

import torch

from hvdtrain import BackendOptions, detect, open_backend
from tests.ranks import Raised, receive, send

TIMEOUT_S = 15.0


def raised(error: BaseException) -> Raised:
    return Raised(type(error).__name__, str(error), traceback.format_exc())


def join(transport: str) -> Any:
    """Open the default group, as any script would; return torch.distributed. Collective."""
    import torch.distributed as dist

    from hvdtrain.transports import rendezvous_by_launcher, shm_sync

    apart = transport == "mpi4py"
    if apart:
        # Each rank counts as a host. Not by hiding their memory from each other: MPI reads it, too.
        own = f"host {os.getpid()}"
        shm_sync.host_identity = lambda *_: own  # type: ignore[attr-defined]
    rendezvous_by_launcher()
    dist.init_process_group(transport, timeout=timedelta(seconds=TIMEOUT_S))
    world: Any = dist.group.WORLD
    if transport == "shm":
        assert (world.transport._barrier.page is None) == ("HVDTRAIN_PURE_PYTHON" in os.environ)
    if apart:
        assert world.transport.hosts.ranks == [[rank] for rank in range(dist.get_world_size())]
    return dist


def opened(fixture: str, backend: str, transport: str) -> tuple[Any, int, Callable[[], object]]:
    """Open what the arm names. Return it, this rank, and what closes it."""
    if fixture == "ranks":
        options = BackendOptions(timeout_s=30, transport=transport)
        subject: Any = open_backend(backend, detect(), options)
        return subject, subject.world.rank, subject.close
    if fixture == "peers":
        subject = join(transport)
        return subject, subject.get_rank(), subject.destroy_process_group
    subject = importlib.import_module("horovod.torch" if backend == "horovod" else "hvdtrain.hvd")
    subject.init()
    return subject, subject.rank(), subject.shutdown


def main() -> None:
    """Open the subject, send the rank, then call each received function on it, until None."""
    address, *names = sys.argv[1:]
    torch.set_num_threads(1)
    with Client(address, "AF_UNIX") as connection:
        try:
            subject, rank, close = opened(*names)
        except BaseException as error:
            send(connection, raised(error))
            raise
        send(connection, rank)
        while (call := receive(connection)) is not None:
            function, args, kwargs = call
            try:
                result = function(subject, *args, **kwargs)
            except Exception as error:
                result = raised(error)
            send(connection, result)
        try:
            close()
            send(connection, None)
        except Exception as error:
            send(connection, raised(error))


if __name__ == "__main__":
    main()
