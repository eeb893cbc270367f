"""Jobs of their own: ranks run a scenario of lifecycle.py and write an answer file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.forkserver import warm
from tests.launching import exit_code, no_shared_memory_left, started_ranks

Answer = dict[str, Any]
RANK = [sys.executable, "-m", "tests.transports.lifecycle"]


def run_scenario(
    scenario: str,
    folder: Path,
    *arguments: object,
    n: int = 2,
    timeout: float = 60,
    inside: Sequence[Sequence[str]] = (),
    **env: str,
) -> tuple[list[Answer], str]:
    """Run a scenario on ranks of shm, without a launcher.

    Return their answers, and what they printed. `inside`: a command prefix for
    each rank. No shared memory may be left.
    """
    command = [*RANK, "shm", scenario, str(folder), *map(str, arguments)]
    lines = [warm([*(inside[rank] if inside else []), *command]) for rank in range(n)]
    with no_shared_memory_left(), started_ranks(lines, **env) as running:
        deadline = time.monotonic() + timeout
        for rank, (_, log) in enumerate(running):
            code = exit_code(running, rank, deadline)
            assert code == 0, log.read_text(errors="replace")
        output = "".join(log.read_text(errors="replace") for _, log in running)
    return answers(folder, n), output


def answers(folder: Path, n: int) -> list[Answer]:
    """Return the ranks' answers; {} for a rank without one."""
    files = [folder / f"answer-{rank}.json" for rank in range(n)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]
