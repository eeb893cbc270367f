"""How channels over MPI start and end under mpirun. What they carry is in collectives/."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.errors import BackendUnavailable
from hvdtrain.transports import open_mpi
from hvdtrain.transports.transport import TransportError
from tests.forkserver import warm
from tests.launch.test_failure import line
from tests.launching import run

LOSES = """
import sys, time
from datetime import timedelta
from tests.rank import join
dist = join("mpi4py")
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=1))
if dist.get_rank() == 1:
    time.sleep(600)
print("and then")
dist.barrier()
"""


@pytest.mark.exhaustive
def test_a_script_that_lost_a_rank_of_another_host_ends_the_job() -> None:
    """MPI_Finalize would wait for the rank that hangs. Of the same host: tests/death."""
    finished = run(line("mpirun", 2, "-c", LOSES), timeout=60)
    assert finished.code != 0
    lost = re.compile(r"barrier\(\): rank 1 \(.*\) did not arrive within 1 s; rank 0 waited")
    assert lost.search(finished.output), finished.output
    assert finished.lines("and then")


NEVER_CONNECTS = """
import time
from datetime import timedelta
from hvdtrain.transports import mpi_channel
from tests.rank import join
dist = join("mpi4py")
dist.barrier()
if dist.get_rank() == 1:
    exchange = mpi_channel.exchange
    mpi_channel.exchange = lambda *arguments: (exchange(*arguments), time.sleep(60))
dist.new_group(timeout=timedelta(seconds=3))
"""


@pytest.mark.exhaustive
def test_a_rank_that_hangs_while_a_group_is_made() -> None:
    """After all have met in the store, MPI_Comm_create_group itself has no timeout."""
    finished = run(warm(line("mpirun", 2, "-c", NEVER_CONNECTS)))
    assert finished.code != 0
    what = "PeerLost: MPI_Comm_create_group did not complete within 3 s: rank 0 timed out"
    (error,) = finished.lines(what)
    assert error.endswith("waiting for rank 1 (1 of 2 ranks missing)"), finished.output


def test_without_a_launcher() -> None:
    with pytest.raises(BackendUnavailable, match="no launcher has started this process; use mpiru"):
        open_mpi(HashStore(), 0, 1, timedelta(seconds=5))


FUNNELED = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_FUNNELED)
from tests.rank import join
join("mpi4py")
"""


@pytest.mark.exhaustive
def test_mpi_without_threads() -> None:
    finished = run(warm(line("mpirun", 1, "-c", FUNNELED)))
    assert finished.code != 0
    assert finished.lines("MPI runs at MPI_THREAD_FUNNELED"), finished.output
    assert TransportError.__name__ in finished.output
