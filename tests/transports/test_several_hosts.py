"""shm on two hosts, which are network namespaces here: what it does, and how it ends."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_rendezvous import two_hosts  # noqa: F401  a fixture
from tests.transports.jobs import ROUNDS, SCENARIOS, Answer, check_survivors, rounds, run_scenario

Names = tuple[str, str]
HOSTS = [[0, 1], [2, 3]]


def run_on(names: Names, hosts: list[list[int]], *what: object, **how: Any) -> list[Answer]:
    by_rank = {
        rank: ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME=hv{os.getpid()}{end}"]
        for ranks, name, end in zip(hosts, names, "ab", strict=True)
        for rank in ranks
    }
    inside = [by_rank[rank] for rank in sorted(by_rank)]
    address = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577"}
    scenario, folder, *arguments = what
    assert isinstance(folder, Path)
    how |= {"n": len(inside), "inside": inside, **address}
    return run_scenario(str(scenario), folder, *arguments, **how)[0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param([[0, 1], [2]], id="uneven", marks=pytest.mark.exhaustive),
        pytest.param([[0, 1], [2, 3]], id="in order", marks=pytest.mark.exhaustive),
        pytest.param([[0, 2], [1, 3]], id="in turn", marks=pytest.mark.exhaustive),
    ],
)
def test_every_collective(
    two_hosts: Names,  # noqa: F811
    hosts: list[list[int]],
    tmp_path: Path,
) -> None:
    for answer in run_on(two_hosts, hosts, "table", tmp_path, timeout=200):
        assert answer["hosts"] == hosts
        assert not answer["failed"], "\n".join(answer["failed"].values())


def pairs(*kept: tuple[str, int]) -> list[Any]:
    """Every scenario and victim, of which `make test` has those that are kept."""
    every = itertools.product(SCENARIOS, range(4))
    marks = {pair: () if pair in kept else pytest.mark.exhaustive for pair in every}
    return [pytest.param(*pair, marks=mark) for pair, mark in marks.items()]


@pytest.mark.parametrize(("scenario", "victim"), pairs(("in_a_big_collective", 3)))
def test_killed(two_hosts: Names, scenario: str, victim: int, tmp_path: Path) -> None:  # noqa: F811
    answers = run_on(two_hosts, HOSTS, scenario, tmp_path, victim, "kill", victim=victim)
    check_survivors(answers, victim, tmp_path)
    for answer in answers[:victim] + answers[victim + 1 :]:
        assert "has ended" in answer["text"]


@pytest.mark.parametrize(("scenario", "victim"), pairs(("with_many_in_flight", 3)))
def test_stopped(two_hosts: Names, scenario: str, victim: int, tmp_path: Path) -> None:  # noqa: F811
    what = (two_hosts, HOSTS, scenario, tmp_path, victim, "stop")
    answers = run_on(*what, victim=victim, TEST_TIMEOUT_S="3")
    check_survivors(answers, victim, tmp_path)
    for answer in answers[:victim] + answers[victim + 1 :]:
        assert answer["text"].startswith("gather(" if "gloo" in scenario else "all_reduce(")
        assert f"rank {victim} (" in answer["text"]
        assert ") did not arrive within 3 s; rank " in answer["text"], "others are named, too"


@pytest.mark.timeout(120 + 25 * ROUNDS)
@pytest.mark.exhaustive
def test_chaos(two_hosts: Names, tmp_path: Path) -> None:  # noqa: F811
    """Hit at random moments. TEST_CHAOS_ROUNDS says how often."""
    for hit in rounds(tmp_path, [4]):
        what = (two_hosts, HOSTS, "chaos", hit.folder, hit.victim, hit.how, hit.seed)
        with hit.labelled():
            answers = run_on(*what, victim=hit.victim, TEST_TIMEOUT_S="4")
            check_survivors(answers, hit.victim, hit.folder)
