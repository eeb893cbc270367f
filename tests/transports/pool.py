"""Pools of live ranks with torch.distributed initialised on one transport, as any script would.

Of `mpi4py` each rank counts as a host, so that all goes through MPI.

Tests say `@pytest.mark.parametrize("peers", [SHM_2], indirect=True)`: `peers.run(function, *args)`
calls `function(dist, *args)` on every rank, `dist` being torch.distributed. This file is also what
a rank runs: `python -m tests.transports.pool SOCKET TRANSPORT`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tests.environments import OTHER_MPIS, other_mpi
from tests.ranks import Arm, Pool

TIMEOUT_S = 15.0
# [bin] is the folder that tests/environments.py finds, or the tests of its arm are skipped.
TRANSPORTS = {
    arm.name: arm
    for arm in (
        Arm("gloo", "gloo", "torchrun --nproc-per-node {n} -m"),
        Arm("shm", "shm", "torchrun --nproc-per-node {n} -m"),
        Arm("shm-pure", "shm", "torchrun --nproc-per-node {n} -m"),  # without page.c
        Arm("mpi4py", "mpi4py", "mpirun -np {n} {python} -m"),
        *(
            Arm(f"mpi4py-{name}", "mpi4py", "[bin]/mpiexec -n {n} [bin]/python -m")
            for name in OTHER_MPIS
        ),
    )
}
# Transport and number of ranks. pytest keeps the ranks of two files alive if their parameter is the
# same object.
SHM_2, MPI_2 = ("shm", 2), ("mpi4py", 2)
ARMS = [SHM_2, ("shm", 3), MPI_2, ("mpi4py", 3), ("gloo", 2), ("gloo", 3)]
ARMS += [("shm", 4), ("mpi4py", 4)]  # which count as ranks of several hosts
ARMS += [("shm-pure", 2), ("shm-pure", 3)]
ARMS += [(f"mpi4py-{name}", 2) for name in OTHER_MPIS]


class Peers(Pool[Any]):
    """`n` live ranks in a default group of one transport. `run` is collective on them."""

    entry = "tests.transports.pool"
    call_s = 60.0
    stops_on_failure = True

    def __init__(self, arm: str, n: int) -> None:
        row = TRANSPORTS[arm]
        if "[bin]" in row.command:
            folder, self.env = other_mpi(arm.removeprefix("mpi4py-"))
            row = replace(row, command=row.command.replace("[bin]", str(folder)))
        if arm == "shm-pure":
            self.env = {"HVDTRAIN_PURE_PYTHON": "1"}
        super().__init__(row, n)


def join(transport: str) -> Any:
    """Open the default group, and return torch.distributed. Collective."""
    import torch
    import torch.distributed as dist

    from hvdtrain.transports import rendezvous_by_launcher, shm_sync

    apart = transport == "mpi4py"
    if apart:
        # Each rank counts as a host. Not by hiding their memory from each other: MPI reads it, too.
        own = f"host {os.getpid()}"
        shm_sync.host_identity = lambda *_: own  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    rendezvous_by_launcher()
    dist.init_process_group(transport, timeout=timedelta(seconds=TIMEOUT_S))
    world: Any = dist.group.WORLD
    if transport == "shm":
        assert (world.transport._barrier.page is None) == ("HVDTRAIN_PURE_PYTHON" in os.environ)
    if apart:
        assert world.transport.hosts.ranks == [[rank] for rank in range(dist.get_world_size())]
    return dist


def main() -> None:
    from tests.rank import serve

    address, name, _ = sys.argv[1:]

    def opened() -> tuple[Any, int]:
        dist = join(name)
        return dist, dist.get_rank()

    serve(address, opened, lambda dist: dist.destroy_process_group())


if __name__ == "__main__":
    main()
