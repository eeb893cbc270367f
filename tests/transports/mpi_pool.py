"""Pools of live ranks under mpirun, or MPICH's mpiexec, with torch.distributed on `mpi4py`.

This file is also what a rank runs: `python -m tests.transports.mpi_pool SOCKET mpi4py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any, Concatenate, ParamSpec, TypeVar

from tests.mpich import mpich
from tests.ranks import Arm, Pool

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 15.0


class MpiRanks(Pool[Any]):
    """`n` live ranks whose default group is on `mpi4py`. `run` is collective on them."""

    entry = "tests.transports.mpi_pool"
    call_s = 30.0

    def __init__(self, launcher: str, n: int) -> None:
        command = "mpirun -np {n} {python} -m"
        if launcher == "mpich":
            folder, self.env = mpich()
            command = f"{folder}/mpiexec -n {{n}} {folder}/python -m"
        super().__init__(Arm(launcher, "mpi4py", command), n)

    def run(
        self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call `function(dist, *args)` on every rank and return the results in rank order."""
        try:
            return super().run(function, *args, **kwargs)
        except BaseException:
            self.stop()  # collectives may be under way, even where all ranks failed alike
            raise


def join(timeout_s: float = TIMEOUT_S) -> Any:
    """Open the default group, and return torch.distributed. Collective."""
    import torch
    import torch.distributed as dist

    from hvdtrain.transports import rendezvous_by_launcher

    torch.set_num_threads(1)
    rendezvous_by_launcher()
    dist.init_process_group("mpi4py", timeout=timedelta(seconds=timeout_s))
    return dist


def main() -> None:
    from tests.rank import serve

    def opened() -> tuple[Any, int]:
        dist = join()
        return dist, dist.get_rank()

    with Client(sys.argv[1], "AF_UNIX") as connection:
        serve(connection, opened, lambda dist: dist.destroy_process_group())


if __name__ == "__main__":
    main()
