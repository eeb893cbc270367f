"""How the transport `mpi4py` starts and ends under mpirun. What it computes is in collectives/."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.errors import BackendUnavailable, PeerLost
from hvdtrain.transports.malloc import use_huge_pages
from hvdtrain.transports.mpi import open_mpi
from hvdtrain.transports.transport import TransportError
from tests.forkserver import warm
from tests.launching import run
from tests.transports.pool import Peers

Dist = Any


def comes_late(dist: Dist) -> list[str]:
    """Rank 1 comes when rank 0 has given up. Other groups go on."""
    dist.barrier()  # both have imported all this
    group: Any = dist.new_group()
    dist.all_reduce(torch.ones(5), group=group)
    dist.barrier()
    group.set_timeout(timedelta(seconds=1))
    told = []
    if dist.get_rank() == 1:
        dist.barrier()
    for number in range(2):
        try:
            dist.all_reduce(torch.ones(2_000_000), group=group)
        except PeerLost as error:
            told.append(str(error))
        if dist.get_rank() == 0 and number == 0:
            dist.barrier()
    dist.barrier()
    return told


def test_a_rank_that_is_late() -> None:
    with contextlib.closing(Peers("mpi4py", 2)) as pool:
        first, second = pool.run(comes_late)
    what = "all_reduce(float32[2000000], sum)"
    assert first == [f"{what}: rank 1 did not arrive within 1 s; rank 0 waited"] * 2
    why = "for rank 1 did not arrive within 1 s"
    assert second == [f"{what}: rank 0 has given up, {why}; rank 1 waited"] * 2


LOSES = """
import sys, time
from datetime import timedelta
from tests.transports.pool import join
dist = join("mpi4py")
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=1))
if dist.get_rank() == 1:
    time.sleep(600)
print("and then")
dist.barrier()
"""


@pytest.mark.exhaustive
def test_a_script_that_lost_a_rank_ends_the_job() -> None:
    """MPI_Finalize would wait for the rank that hangs."""
    finished = run(["mpirun", "-np", "2", sys.executable, "-c", LOSES], timeout=60)
    assert finished.code != 0
    assert finished.lines("barrier(): rank 1 did not arrive within 1 s"), finished.output
    assert finished.lines("and then")


NEVER_CONNECTS = """
import time
from datetime import timedelta
from hvdtrain.transports import mpi
from tests.transports.pool import join
dist = join("mpi4py")
dist.barrier()
if dist.get_rank() == 1:
    exchange = mpi.exchange
    mpi.exchange = lambda *arguments: (exchange(*arguments), time.sleep(60))
dist.new_group(timeout=timedelta(seconds=3))
"""


@pytest.mark.exhaustive
def test_a_rank_that_hangs_while_a_group_is_made() -> None:
    """After all have met in the store, MPI_Comm_create_group itself has no timeout."""
    finished = run(warm(["mpirun", "-np", "2", sys.executable, "-c", NEVER_CONNECTS]))
    assert finished.code != 0
    what = "PeerLost: MPI_Comm_create_group did not complete within 3 s: rank 0 timed out"
    (line,) = finished.lines(what)
    assert line.endswith("waiting for rank 1 (1 of 2 ranks missing)"), finished.output


def test_without_a_launcher() -> None:
    with pytest.raises(BackendUnavailable, match="no launcher has started this process; use mpiru"):
        open_mpi(HashStore(), 0, 1, timedelta(seconds=5))


FUNNELED = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_FUNNELED)
from tests.transports.pool import join
join("mpi4py")
"""


@pytest.mark.exhaustive
def test_mpi_without_threads() -> None:
    finished = run(warm(["mpirun", "-np", "1", sys.executable, "-c", FUNNELED]))
    assert finished.code != 0
    assert finished.lines("MPI runs at MPI_THREAD_FUNNELED"), finished.output
    assert TransportError.__name__ in finished.output


# Memory


def kernel() -> tuple[int, ...]:
    """Return the version of the kernel."""
    return tuple(int(part) for part in os.uname().release.split(".")[:2])


def huge_bytes(t: Tensor) -> int:
    """Return how many bytes of the mappings of a tensor are in huge pages."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(bound, 16) for bound in bounds.groups())
            inside = low < t.data_ptr() + t.nbytes and t.data_ptr() < high
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(kernel() < (6, 1), reason="Linux cannot collapse pages before 6.1")
def test_huge_pages_change_no_byte() -> None:
    base = torch.randint(0, 256, (24 << 20,), dtype=torch.uint8)
    part = base[(5 << 20) + 3 : (17 << 20) - 1]
    before = base.clone()
    use_huge_pages(part)
    assert huge_bytes(part) >= part.nbytes
    assert torch.equal(base, before)
    use_huge_pages(part[:0])
    use_huge_pages(part[:1])
