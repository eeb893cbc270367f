"""How jobs begin and end: ranks that die, leave, are late or never come; and thirty inits.

Ranks are processes of their own here, with what torchrun sets made by hand: a launcher would end
the others when one dies, before they could report.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import warm
from tests.hvd.behaviour import SHUT_DOWN
from tests.launching import exit_code, members, no_shared_memory_left, started_ranks


class Report(dict[str, Any]):
    """The values that a rank reported; a missing one shows the rank's output."""

    def __init__(self, output: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.output = output

    def __missing__(self, key: str) -> Any:
        raise AssertionError(f"no {key!r} in {dict(self)}; its output:\n{self.output}")


@dataclass(frozen=True)
class Rank:
    """How a rank ended: exit code, output, and its report, empty if it printed none."""

    code: int
    output: str
    report: Report


def run_scenario(
    scenario: str, folder: Path, *arguments: object, n: int = 3, timeout: float = 60, **env: str
) -> list[Rank]:
    """Run a scenario of lifecycle.py; no process or shared memory may be left."""
    command = [sys.executable, "-m", "tests.hvd.lifecycle", scenario, str(folder)]
    commands = [warm([*command, *map(str, arguments)])] * n
    env = {"LOCAL_WORLD_SIZE": str(n), **env}
    ranks = []
    with no_shared_memory_left(), started_ranks(commands, **env) as running:
        deadline = time.monotonic() + timeout
        for rank, (_, log) in enumerate(running):
            code = exit_code(running, rank, deadline)
            output = log.read_text(errors="replace")
            lines = [line for line in output.splitlines() if line.startswith('{"rank"')]
            ranks.append(Rank(code, output, Report(output, json.loads(lines[0]) if lines else {})))
        left = {**members(running[0][0].marker), **members(running[-1][0].marker)}
        assert not left, f"{scenario} left processes behind: {left}"
    return ranks


def check_survivors(ranks: list[Rank], victim: int) -> None:
    """Every other rank failed with the right error, and shut down cleanly. No engine waits for a
    rank by itself, so that one that notices nothing is still there at the end of the test.
    """
    for number, rank in enumerate(ranks):
        if number == victim:
            continue
        report = rank.report
        assert report, rank.output
        assert report["kind"] == "HorovodInternalError", report
        assert report["text"].startswith(SHUT_DOWN), report
        assert report["next"].startswith(SHUT_DOWN), report
        assert not report["threads"], report
        assert rank.code == 0, rank.output
        if victim >= 0:
            assert "Traceback" not in rank.output, rank.output


@pytest.mark.parametrize(("thread", "victim"), [("control", 0), ("executor", 2)])
def test_a_thread_of_the_engine_fails(thread: str, victim: int, tmp_path: Path) -> None:
    """The job ends at once, and the traceback is printed where stderr is open."""
    ranks = run_scenario("with_a_failing_thread", tmp_path, victim, thread)
    check_survivors(ranks, -1)
    for rank in ranks:
        assert f"Rank {victim}'s thread hvd-{thread} failed: " in rank.report["text"]
        assert "ArithmeticError('injected')" in rank.report["text"]
    printed = [number for number, rank in enumerate(ranks) if "in fail\n" in rank.output]
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
        first, second = rank.report["texts"]
        assert second.startswith(SHUT_DOWN)
        if number == victim:
            assert first == "injected"
        else:
            assert f"Rank {victim} reports: allreduce of " in first
            assert first.endswith("big.1.0 failed: injected")


def test_thirty_inits_leave_nothing_open(tmp_path: Path) -> None:
    for rank in run_scenario("thirty_times", tmp_path, n=2):
        early, late = rank.report["early"], rank.report["late"]
        assert late[0] <= early[0] + 1, f"threads grew: {early} -> {late}"
        assert late[1] <= early[1] + 2, f"open files grew: {early} -> {late}"


@pytest.mark.parametrize("transport", ["shm", pytest.param("gloo", marks=pytest.mark.exhaustive)])
def test_optimizers_of_one_step(transport: str, tmp_path: Path) -> None:
    for rank in run_scenario("optimizers_of_one_step", tmp_path, HVDTRAIN_TRANSPORT=transport):
        assert rank.code == 0, rank.output


def test_an_optimizer_of_two_lives(tmp_path: Path) -> None:
    for rank in run_scenario("one_optimizer_over_two_lives", tmp_path, n=2):
        assert rank.report["value"] == rank.report["expected"]
        assert rank.report["engines"] == 1, "engines that are over are kept"


def test_ends_without_shutdown(tmp_path: Path) -> None:
    for rank in run_scenario("without_shutdown", tmp_path):
        assert rank.code == 0, rank.output
        assert rank.output.splitlines()[:-1] == [], rank.output


def test_forked_children_do_not_matter(tmp_path: Path) -> None:
    for rank in run_scenario("with_children", tmp_path, n=2):
        assert rank.code == 0, rank.output
        assert rank.report["value"] == pytest.approx(rank.report["expected"], rel=1e-5)
        assert "Traceback" not in rank.output, rank.output


STALLED = (
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks "
    "and are waiting for remainder of ranks for more than 0.1 seconds."
)


def test_a_stall_is_warned_about(tmp_path: Path) -> None:
    ranks = run_scenario("with_a_late_rank", tmp_path, HOROVOD_STALL_CHECK_TIME_SECONDS="0.1")
    for rank in ranks:
        assert rank.report["sums"] == rank.report["expected"]
        assert rank.report["value"] == [-4.0] * 4
    assert STALLED in ranks[0].output
    assert re.search(r"^2: \[.*gamma", ranks[0].output, flags=re.MULTILINE), ranks[0].output
    warned = re.findall(r"^2: \[(.*?)(?: \.\.\.)?\]", ranks[0].output, flags=re.MULTILINE)
    names = {name for line in warned for name in line.split(", ")}
    assert names.issuperset(f"allreduce.alpha.{i}" for i in range(6)), ranks[0].output
    # Of fifteen, even where two warnings share them.
    assert re.search(r"^2: \[(\S+, ){5}\S+ \.\.\.\]", ranks[0].output, flags=re.MULTILINE)
    assert not any(STALLED in rank.output for rank in ranks[1:])


def test_stall_warnings_can_be_disabled(tmp_path: Path) -> None:
    ranks = run_scenario(
        "with_a_late_rank",
        tmp_path,
        n=2,
        HOROVOD_STALL_CHECK_TIME_SECONDS="0.1",
        HOROVOD_STALL_CHECK_DISABLE="1",
    )
    assert not any(STALLED in rank.output for rank in ranks)


def test_a_stall_shuts_the_job_down(tmp_path: Path) -> None:
    ranks = run_scenario(
        "with_a_rank_that_never_comes",
        tmp_path,
        HOROVOD_STALL_CHECK_TIME_SECONDS="0.1",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1",
    )
    assert STALLED in ranks[0].output
    check_survivors(ranks, -1)
    for rank in ranks:
        assert "waited for longer than 1 seconds: " in rank.report["text"], rank.report
        assert "rank 2 (" in rank.report["text"], rank.report
