"""How groups of shm end: ranks that die or hang, and what is left of them; and several hosts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_rendezvous import two_hosts  # noqa: F401  a fixture
from tests.launching import kill, started

Answer = dict[str, Any]
ROUNDS = int(os.environ.get("TEST_CHAOS_ROUNDS", "4"))
SCENARIOS = (
    "in_a_blocking_collective",
    "in_a_big_collective",
    "with_many_in_flight",
    "in_a_collective_by_gloo",
)


def play(
    scenario: str,
    folder: Path,
    *arguments: object,
    n: int = 2,
    victim: int = -1,
    timeout: float = 60,
    inside: Sequence[Sequence[str]] = (),
    **env: str,
) -> tuple[list[Answer], str]:
    """Run a scenario of lifecycle.py on ranks of this test's own; a launcher would end them all.

    Returns the answers of all but the victim, and what they printed. `inside`: what to start each
    rank by. Nothing may stay behind.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "tests.transports.lifecycle", scenario, str(folder)]
    command += map(str, arguments)
    answers: list[Answer] = [{} for _ in range(n)]
    with contextlib.ExitStack() as stack:
        running = []
        for rank in range(n):
            place = {"RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "localhost"}
            place |= {"MASTER_PORT": str(port), "LOCAL_RANK": str(rank), **env}
            line = [*(inside[rank] if inside else ()), *command]
            running.append(stack.enter_context(started(line, env=place)))
        deadline = time.monotonic() + timeout
        for rank, (process, log) in enumerate(running):
            if rank == victim:
                continue
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                texts = "\n".join(log.read_text(errors="replace") for _, log in running)
                raise AssertionError(f"{scenario}: rank {rank} did not end:\n{texts}") from None
            text = log.read_text(errors="replace")
            assert code == 0, text
            answers[rank] = json.loads(text[text.index('{"rank"') :].splitlines()[0])
        output = "".join(log.read_text(errors="replace") for _, log in running)
        for process, _ in running:
            kill(process.marker)
    new = {path.name for path in set(Path("/dev/shm").iterdir()) - shared if "torch" in path.name}
    assert not new, f"{scenario} left shared memory behind: {new}"
    return answers, output


def check_survivors(answers: list[Answer], victim: int, folder: Path, limit_s: float) -> None:
    died = float((folder / "died").read_text())
    for rank, answer in enumerate(answers):
        if rank == victim:
            continue
        assert f"rank {victim} " in answer["text"], answer
        assert answer["at"] - died < limit_s, (answer["at"] - died, answer)
        assert answer["next"] != "it works again", answer
        assert answer["next_s"] < 1, answer
        assert answer["close_s"] < 5, answer


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed(scenario: str, victim: int, tmp_path: Path) -> None:
    answers, _ = play(scenario, tmp_path, victim, "kill", n=3, victim=victim)
    check_survivors(answers, victim, tmp_path, 5)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "scenario", [*SCENARIOS[:2], pytest.param(SCENARIOS[2], marks=pytest.mark.exhaustive)]
)
def test_stopped(scenario: str, n: int, tmp_path: Path) -> None:
    answers, _ = play(scenario, tmp_path, 1, "stop", n=n, victim=1, TEST_TIMEOUT_S="3")
    check_survivors(answers, 1, tmp_path, 6)
    assert "all_reduce(float32[" in answers[0]["text"]
    assert "3 s" in answers[0]["text"]


@pytest.mark.timeout(120 + 20 * ROUNDS)
def test_chaos(tmp_path: Path) -> None:
    """Hit at random moments. TEST_CHAOS_ROUNDS says how often."""
    chance = random.Random(int(os.environ.get("TEST_CHAOS_SEED", "4")))
    for turn in range(ROUNDS):
        folder = tmp_path / str(turn)
        folder.mkdir()
        n = chance.choice([2, 3])
        victim, how = chance.randrange(n), chance.choice(["kill", "stop"])
        seed = chance.randrange(10**6)
        what = f"round {turn}: {how} rank {victim} of {n}, seed {seed}"
        try:
            answers, _ = play(
                "chaos", folder, victim, how, seed, n=n, victim=victim, TEST_TIMEOUT_S="4"
            )
            limit_s = 5.0 if how == "kill" else 9.0
            check_survivors(answers, victim, folder, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error


def check_bounded(answers: list[Answer], mib: int) -> None:
    for answer in answers:
        before, after = answer["before"], answer["after"]
        for what in ("descriptors", "maps", "threads"):
            assert after[what] <= before[what] + 8, answers
        assert after["mib"] <= before["mib"] + mib, answers


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(10_000, marks=[pytest.mark.exhaustive, pytest.mark.slow])]
)
def test_temporaries_take_no_memory(count: int, tmp_path: Path) -> None:
    answers, _ = play("many_temporaries", tmp_path, count, timeout=110)
    check_bounded(answers, 64)


def test_groups_leave_nothing(tmp_path: Path) -> None:
    answers, _ = play("many_groups", tmp_path, timeout=100)
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
    answers, output = play("small_memory", tmp_path, inside=inside)
    assert not any(answer["moved"] for answer in answers)
    assert output.count("tensors are copied instead of shared") == 2, output


@pytest.mark.timeout(240)
def test_several_hosts(two_hosts: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    """Two ranks on one, one on the other: everything holds but the check of what is called."""
    places = [(0, "a"), (0, "a"), (1, "b")]
    inside = [
        ["ip", "netns", "exec", two_hosts[host], "env", f"GLOO_SOCKET_IFNAME=hv{os.getpid()}{end}"]
        for host, end in places
    ]
    answers, _ = play(
        "table",
        tmp_path,
        n=3,
        inside=inside,
        timeout=200,
        MASTER_ADDR="10.77.0.1",
        MASTER_PORT="29577",
    )
    for answer in answers:
        assert answer["hosts"] == [[0, 1], [2]]
        assert not answer["failed"], "\n".join(answer["failed"].values())
