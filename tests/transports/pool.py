"""Pools of live ranks with torch.distributed initialised on one transport, as any script would.

Tests say `@pytest.mark.parametrize("peers", ARMS, indirect=True)`, and `peers.run(function, *args)`
calls `function(dist, *args)` on every rank, `dist` being torch.distributed. This file is also what
a rank runs: `python -m tests.transports.pool SOCKET TRANSPORT`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from tests.ranks import Arm, Pool

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 15.0
TRANSPORTS = {
    arm.name: arm
    for arm in (
        Arm("gloo", "gloo", "torchrun --nproc-per-node {n} -m"),
        Arm("shm", "shm", "torchrun --nproc-per-node {n} -m"),
        Arm("mpi4py", "mpi4py", "mpirun -np {n} {python} -m"),
    )
}


class Peers(Pool[Any]):
    """`n` live ranks in a default group of one transport. `run` is collective on them."""

    entry = "tests.transports.pool"
    call_s = 60.0

    def __init__(self, arm: str, n: int) -> None:
        super().__init__(TRANSPORTS[arm], n)

    def run(
        self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call `function(dist, *args)` on every rank and return the results in rank order."""
        try:
            return super().run(function, *args, **kwargs)
        except BaseException:
            self.stop()  # collectives may be under way, even where all ranks failed alike
            raise


def main() -> None:
    import torch.distributed as dist

    from hvdtrain.transports import rendezvous_by_launcher
    from tests.rank import serve

    address, name, _ = sys.argv[1:]

    def opened() -> tuple[Any, int]:
        torch.set_num_threads(1)
        rendezvous_by_launcher()
        dist.init_process_group(name, timeout=timedelta(seconds=TIMEOUT_S))
        return dist, dist.get_rank()

    with Client(address, "AF_UNIX") as connection:
        serve(connection, opened, lambda dist: dist.destroy_process_group())


if __name__ == "__main__":
    main()
