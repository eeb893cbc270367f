"""`hvd.init(comm=[...])` of some of the ranks: disjoint sub-worlds."""

from __future__ import annotations

import sys

import pytest

from tests.forkserver import warm
from tests.launching import run

LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node 3",
    "mpirun": f"mpirun -np 3 {sys.executable}",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sub_worlds(launcher: str) -> None:
    finished = run(warm([*LAUNCHERS[launcher].split(), "-m", "tests.hvd.sub_worlds"]), timeout=100)
    assert finished.code == 0, finished.output
    for rank, part in enumerate(([2, 0], [1], [2, 0])):
        assert f'{{"rank": {rank}, "part": {part}}}' in finished.output


def test_another_launcher_is_refused() -> None:
    line = f"horovodrun -np 3 --gloo {sys.executable} -m tests.hvd.sub_worlds".split()
    finished = run(warm(line), timeout=100)
    assert finished.code != 0
    assert "needs torchrun or mpirun, not horovodrun" in finished.output
