"""Jobs whose end is under test: ranks run a scenario of lifecycle.py and write an answer file."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forkserver import warm
from tests.launching import Finished, exit_code, kill, no_shared_memory_left, run, started_ranks

Answer = dict[str, Any]
ROUNDS = int(os.environ.get("TEST_CHAOS_ROUNDS", "3"))
SEED = int(os.environ.get("TEST_CHAOS_SEED", "4"))
SCENARIOS = (
    "in_a_blocking_collective",
    "in_a_big_collective",
    "with_many_in_flight",
    "in_a_collective_by_gloo",
)
RANK = [sys.executable, "-m", "tests.transports.lifecycle"]


def run_scenario(
    scenario: str,
    folder: Path,
    *arguments: object,
    n: int = 2,
    victim: int = -1,
    timeout: float = 60,
    inside: Sequence[Sequence[str]] = (),
    **env: str,
) -> tuple[list[Answer], str]:
    """Run a scenario on ranks of shm without a launcher, which would end them all.

    Return the answers of all but the victim, and what they printed. `inside`: a command prefix for
    each rank. No shared memory may be left.
    """
    command = [*RANK, "shm", scenario, str(folder), *map(str, arguments)]
    lines = [warm([*(inside[rank] if inside else []), *command]) for rank in range(n)]
    with no_shared_memory_left(), started_ranks(lines, **env) as running:
        deadline = time.monotonic() + timeout
        for rank, (_, log) in enumerate(running):
            if rank != victim:
                code = exit_code(running, rank, deadline)
                assert code == 0, log.read_text(errors="replace")
        output = "".join(log.read_text(errors="replace") for _, log in running)
        for process, _ in running:
            kill(process.marker)
    return answers(folder, n), output


def run_under_mpirun(
    scenario: str, folder: Path, *arguments: object, n: int, **env: str
) -> tuple[list[Answer], Finished]:
    """Run a scenario on ranks of mpi4py, to the end of the job. Nothing may stay behind."""
    command = [*RANK, "mpi4py", scenario, str(folder), *map(str, arguments)]
    with no_shared_memory_left():
        finished = run(warm(["mpirun", "-np", str(n), *command]), timeout=60, env=env)
    return answers(folder, n), finished


def answers(folder: Path, n: int) -> list[Answer]:
    """Return the ranks' answers; {} for a rank without one."""
    files = [folder / f"answer-{rank}.json" for rank in range(n)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def check_survivors(answers: list[Answer], victim: int, folder: Path) -> None:
    """Check that all others named the victim, and that their group stayed unusable."""
    assert (folder / "died").exists()
    for rank, answer in enumerate(answers):
        if rank == victim:
            continue
        assert answer, f"rank {rank} has not answered"
        assert answer["kind"] == "PeerLost", answer
        reason, _, _ = answer["text"].partition("; rank ")
        named = re.findall(r"rank (\d+)", reason.rpartition(" has given up, for ")[2])
        assert named == [str(victim)], answer
        assert answer["next"] != "it works again", answer


@dataclass(frozen=True)
class Round:
    """One round of chaos: its folder, the number of ranks, the victim and what happens to it."""

    folder: Path
    n: int
    victim: int
    how: str
    seed: int

    @contextlib.contextmanager
    def labelled(self) -> Iterator[None]:
        """Add the round to the message of an assertion that fails."""
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{self}: {error}") from error


def rounds(folder: Path, sizes: Sequence[int]) -> Iterator[Round]:
    """Draw the rounds. TEST_CHAOS_ROUNDS says how many, TEST_CHAOS_SEED which."""
    chance = random.Random(SEED)
    for turn in range(ROUNDS):
        place = folder / str(turn)
        place.mkdir()
        n = chance.choice(sizes)
        victim, how = chance.randrange(n), chance.choice(["kill", "stop"])
        yield Round(place, n, victim, how, chance.randrange(10**6))
