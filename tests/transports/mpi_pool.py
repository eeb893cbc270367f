"""Pools of live ranks under mpirun, or MPICH's mpiexec, with torch.distributed on `mpi4py`.

This file is also what a rank runs: `python -m tests.transports.mpi_pool SOCKET mpi4py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest

from tests.launching import BIN, ROOT
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
            folder = _mpich()
            command = f"{folder}/mpiexec -n {{n}} {folder}/python -m"
            # mpi4py takes the MPI library of `sys.prefix`: everything else is ours.
            (site,) = (BIN.parent / "lib").glob("python3.*/site-packages")
            self.env = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
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


def _mpich() -> Path:
    """The `bin` of an environment with the packages mpich and mpi4py: `make` makes it."""
    folder = Path(os.environ.get("TEST_MPICH_ENV", ROOT / ".venv-mpich")) / "bin"
    if not (folder / "mpiexec").exists():
        why = f"no MPICH in {folder}: python3 -m venv .venv-mpich && .venv-mpich/bin/pip install "
        why += "mpich mpi4py"
        if "CI" in os.environ:
            pytest.fail(why)
        pytest.skip(why)
    return folder


def join(timeout_s: float = TIMEOUT_S) -> Any:
    """Open the default group, and return torch.distributed. Collective."""
    import torch
    import torch.distributed as dist

    import hvdtrain.transports  # noqa: F401  registers mpi4py, and finds mpirun's ranks

    torch.set_num_threads(1)
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
