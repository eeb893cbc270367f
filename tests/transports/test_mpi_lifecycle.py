"""How groups of mpi4py end under mpirun: ranks that die or hang, and what is left of the job.

A rank that is killed makes mpirun end the others, wherever they are. One that hangs is named by
all others, and mpirun ends it when they end.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.transports.jobs import (
    ROUNDS,
    SCENARIOS,
    check_survivors,
    rounds,
    run_under_mpirun,
)


def check_killed(folder: Path, scenario: str, n: int, victim: int, *more: object) -> None:
    _, finished = run_under_mpirun(scenario, folder, victim, "kill", *more, n=n)
    assert finished.code != 0, finished.output
    assert (folder / "died").exists(), finished.output


def check_stopped(folder: Path, scenario: str, n: int, victim: int, *more: object) -> None:
    about = {"TEST_TIMEOUT_S": "3"}
    answers, finished = run_under_mpirun(scenario, folder, victim, "stop", *more, n=n, **about)
    assert finished.code != 0, finished.output
    check_survivors(answers, victim, folder)


def pairs(*kept: tuple[str, int]) -> list[Any]:
    """Every scenario and victim, of which `make test` has those that are kept."""
    every = itertools.product(SCENARIOS, (0, 2))
    marks = {pair: () if pair in kept else pytest.mark.exhaustive for pair in every}
    return [pytest.param(*pair, marks=mark) for pair, mark in marks.items()]


@pytest.mark.parametrize(("scenario", "victim"), pairs(("in_a_big_collective", 2)))
def test_killed(scenario: str, victim: int, tmp_path: Path) -> None:
    check_killed(tmp_path, scenario, 3, victim)


@pytest.mark.parametrize(
    ("scenario", "victim"), pairs(("in_a_blocking_collective", 0), ("in_a_collective_by_gloo", 2))
)
def test_stopped(scenario: str, victim: int, tmp_path: Path) -> None:
    check_stopped(tmp_path, scenario, 3, victim)


@pytest.mark.exhaustive
@pytest.mark.timeout(120 + 25 * ROUNDS)
def test_chaos(tmp_path: Path) -> None:
    """Hit at random moments. TEST_CHAOS_ROUNDS says how often."""
    for hit in rounds(tmp_path, [2, 3]):
        check = check_killed if hit.how == "kill" else check_stopped
        with hit.labelled():
            check(hit.folder, "chaos", hit.n, hit.victim, hit.seed)
