"""How jobs end: ranks that fail, fork, leave without a word or never come.

Ranks are processes of their own here, with what torchrun sets made by hand: a launcher would end
the others when one dies, before they could report.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import warm
from tests.hvd.behaviour import SHUT_DOWN
from tests.launching import exit_code, members, no_shared_memory_left, started_ranks


def run_scenario(
    scenario: str, folder: Path, *arguments: object, n: int = 3, **env: str
) -> list[dict[str, Any]]:
    """Run a scenario of lifecycle.py. Each rank ends with 0; no process or memory is left. Return
    what each has reported, and its output.
    """
    command = [sys.executable, "-m", "tests.hvd.lifecycle", scenario, str(folder)]
    commands = [warm([*command, *map(str, arguments)])] * n
    env = {"LOCAL_WORLD_SIZE": str(n), **env}
    ranks = []
    with no_shared_memory_left(), started_ranks(commands, **env) as running:
        deadline = time.monotonic() + 60
        for rank, (_, log) in enumerate(running):
            code, output = exit_code(running, rank, deadline), log.read_text(errors="replace")
            reports = [line for line in output.splitlines() if line.startswith('{"rank"')]
            assert (code, len(reports)) == (0, 1), output
            ranks.append({**json.loads(reports[0]), "output": output})
        left = {**members(running[0][0].marker), **members(running[-1][0].marker)}
        assert not left, f"{scenario} left processes behind: {left}"
    return ranks


def check_survivors(ranks: list[dict[str, Any]], victim: int) -> None:
    """Every other rank failed with the right error, and shut down cleanly. No engine waits for a
    rank by itself, so that one that notices nothing is still there at the end of the test.
    """
    for number, rank in enumerate(ranks):
        if number == victim:
            continue
        assert rank["kind"] == "HorovodInternalError", rank["output"]
        assert rank["text"].startswith(SHUT_DOWN), rank["output"]
        assert rank["next"].startswith(SHUT_DOWN), rank["output"]
        assert not rank["threads"], rank["output"]
        if victim >= 0:
            assert "Traceback" not in rank["output"], rank["output"]


@pytest.mark.parametrize(("thread", "victim"), [("control", 0), ("executor", 2)])
def test_a_thread_of_the_engine_fails(thread: str, victim: int, tmp_path: Path) -> None:
    """The job ends at once, and the traceback is printed where stderr is open."""
    ranks = run_scenario("with_a_failing_thread", tmp_path, victim, thread)
    check_survivors(ranks, -1)
    for rank in ranks:
        assert f"Rank {victim}'s thread hvd-{thread} failed: " in rank["text"]
        assert "ArithmeticError('injected')" in rank["text"]
    printed = [number for number, rank in enumerate(ranks) if "in fail\n" in rank["output"]]
    assert printed == ([victim] if victim < 2 else [])


@pytest.mark.parametrize(
    ("victim", "transport"), [(0, "shm"), pytest.param(2, "gloo", marks=pytest.mark.exhaustive)]
)
def test_a_batch_fails_on_one_rank(victim: int, transport: str, tmp_path: Path) -> None:
    """The others are told the rank and the cause; they waited for it for a day."""
    env: Any = {"HVDTRAIN_TRANSPORT": transport, "HOROVOD_FUSION_THRESHOLD": "0"}
    ranks = run_scenario("with_a_batch_that_fails_on_one_rank", tmp_path, victim, **env)
    check_survivors(ranks, victim)
    for number, rank in enumerate(ranks):
        first, second = rank["texts"]
        assert second.startswith(SHUT_DOWN)
        if number == victim:
            assert first == "injected"
        else:
            assert f"Rank {victim} reports: allreduce of " in first
            assert first.endswith("big.1.0 failed: injected")


def test_ends_without_shutdown(tmp_path: Path) -> None:
    for rank in run_scenario("without_shutdown", tmp_path):
        assert rank["output"].splitlines()[:-1] == [], rank["output"]


def test_forked_children_do_not_matter(tmp_path: Path) -> None:
    for rank in run_scenario("with_children", tmp_path, n=2):
        assert rank["value"] == pytest.approx(rank["expected"], rel=1e-5)
        assert "Traceback" not in rank["output"], rank["output"]


def test_a_stall_shuts_the_job_down(tmp_path: Path) -> None:
    ranks = run_scenario(
        "with_a_rank_that_never_comes",
        tmp_path,
        HOROVOD_STALL_CHECK_TIME_SECONDS="0.1",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1",
    )
    warning = ranks[0]["output"]
    assert "waiting for remainder of ranks for more than 0.1 seconds." in warning
    assert "2: [allreduce.p@" in warning
    check_survivors(ranks, -1)
    for rank in ranks:
        assert "Waited longer than 1 s for rank 2 (" in rank["text"], rank["output"]
