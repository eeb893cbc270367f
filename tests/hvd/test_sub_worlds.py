"""`hvd.init(comm=[...])` of some of the ranks: disjoint sub-worlds."""

from __future__ import annotations

import sys

import pytest

from hvdtrain.hvd.basics import _sub_world
from hvdtrain.job.world import World
from tests.forkserver import warm
from tests.launching import run

LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node 3",
    "mpirun": f"mpirun -np 3 {sys.executable}",
}


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.exhaustive)]
)
def test_sub_worlds(launcher: str) -> None:
    finished = run(warm([*LAUNCHERS[launcher].split(), "-m", "tests.hvd.sub_worlds"]), timeout=100)
    assert finished.code == 0, finished.output
    for rank, part in enumerate(([2, 0], [1], [2, 0])):
        assert f'{{"rank": {rank}, "part": {part}}}' in finished.output


@pytest.mark.parametrize("ranks", [[1, 2, 3], [3, 2, 0], [2, 1], [0, 1, 2, 3, 4, 5], [5, 3]])
def test_hosts_with_different_numbers_of_ranks(ranks: list[int]) -> None:
    """torchrun numbers ranks host by host: here rank 0; ranks 1 to 3; ranks 4 and 5."""
    hosts = [[0], [1, 2, 3], [4, 5]]
    for cross_rank, host in enumerate(hosts):
        here = [rank for rank in ranks if rank in host]
        for rank in here:
            world = World(rank, 6, host.index(rank), len(host), cross_rank, 3, "torchrun", "env")
            part = _sub_world(world, ranks)
            assert (part.rank, part.size) == (ranks.index(rank), len(ranks))
            assert (part.local_rank, part.local_size) == (here.index(rank), len(here))


@pytest.mark.exhaustive
def test_another_launcher_is_refused() -> None:
    line = f"horovodrun -np 3 --gloo {sys.executable} -m tests.hvd.sub_worlds".split()
    finished = run(warm(line), timeout=100)
    assert finished.code != 0
    assert "needs torchrun or mpirun, not horovodrun" in finished.output
