"""How groups of shm end: ranks that die or hang, and what is left of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.transports.jobs import ROUNDS, SCENARIOS, Answer, check_survivors, rounds, run_scenario


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed(scenario: str, victim: int, tmp_path: Path) -> None:
    answers, _ = run_scenario(scenario, tmp_path, victim, "kill", n=3, victim=victim)
    check_survivors(answers, victim, tmp_path)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "scenario", [*SCENARIOS[:2], pytest.param(SCENARIOS[2], marks=pytest.mark.exhaustive)]
)
def test_stopped(scenario: str, n: int, tmp_path: Path) -> None:
    answers, _ = run_scenario(scenario, tmp_path, 1, "stop", n=n, victim=1, TEST_TIMEOUT_S="3")
    check_survivors(answers, 1, tmp_path)
    assert "all_reduce(float32[" in answers[0]["text"]
    assert "3 s" in answers[0]["text"]


@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_left(leaver: int, tmp_path: Path) -> None:
    """And not who is merely late."""
    answers, _ = run_scenario("one_leaves", tmp_path, leaver, n=3)
    for rank in {0, 1, 2} - {leaver}:
        assert f"rank {leaver} (process " in answers[rank]["text"], answers[rank]
        assert "has left" in answers[rank]["text"], answers[rank]
        assert answers[rank]["kind"] == "PeerLost"


@pytest.mark.exhaustive
@pytest.mark.timeout(120 + 20 * ROUNDS)
def test_chaos(tmp_path: Path) -> None:
    """Hit at random moments. TEST_CHAOS_ROUNDS says how often."""
    for hit in rounds(tmp_path, [2, 3]):
        about: Any = {"n": hit.n, "victim": hit.victim, "TEST_TIMEOUT_S": "4"}
        with hit.labelled():
            answers, _ = run_scenario("chaos", hit.folder, hit.victim, hit.how, hit.seed, **about)
            check_survivors(answers, hit.victim, hit.folder)


def check_bounded(answers: list[Answer], mib: int) -> None:
    for answer in answers:
        before, after = answer["before"], answer["after"]
        for what in ("descriptors", "maps", "threads"):
            assert after[what] <= before[what] + 8, answers
        assert after["mib"] <= before["mib"] + mib, answers


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(4_000, marks=[pytest.mark.exhaustive, pytest.mark.slow])]
)
def test_temporaries_take_no_memory(count: int, tmp_path: Path) -> None:
    answers, _ = run_scenario("many_temporaries", tmp_path, count, timeout=110)
    check_bounded(answers, 64)


def test_groups_leave_nothing(tmp_path: Path) -> None:
    answers, _ = run_scenario("many_groups", tmp_path, timeout=100)
    check_bounded(answers, 32)


def test_too_small_shared_memory(tmp_path: Path) -> None:
    """As in containers, whose /dev/shm has 64 MB."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a /dev/shm of its own wants root and util-linux")
    mount = 'mount -t tmpfs -o size=4m none /dev/shm && exec "$@"'
    inside = [["unshare", "--mount", "sh", "-c", mount, "sh"]] * 2
    made = subprocess.run([*inside[0], "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no /dev/shm of its own here: {made.stderr.strip()}")
    answers, output = run_scenario("small_memory", tmp_path, inside=inside)
    assert not any(answer["moved"] for answer in answers)
    assert output.count("tensors are copied instead of shared") == 2, output
