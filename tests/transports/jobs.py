"""Jobs of their own, whose ranks write an answer file each: scenarios of lifecycle.py, and
tests/death.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.forkserver import warm
from tests.launching import exit_code, kill, members, no_shared_memory_left, started_ranks

Answer = dict[str, Any]
# Between the network namespaces of the fixture `two_hosts`.
ADDRESS = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577"}
RANK = [sys.executable, "-m", "tests.transports.lifecycle"]


def run_scenario(
    scenario: str,
    folder: Path,
    timeout: float = 60,
    inside: Sequence[Sequence[str]] = ((), ()),
    **env: str,
) -> tuple[list[Answer], str]:
    """Run a scenario on ranks of shm, without a launcher.

    Return their answers, and what they printed. `inside`: a command prefix for
    each rank. No shared memory may be left.
    """
    lines = [warm([*prefix, *RANK, "shm", scenario, str(folder)]) for prefix in inside]
    outputs = run_ranks(lines, [0] * len(lines), timeout, **env)
    return answers(folder, len(lines)), "".join(outputs)


def run_ranks(
    lines: Sequence[Sequence[str]], codes: Sequence[int | None], timeout: float, **env: str
) -> list[str]:
    """Run one rank with each command, without a launcher. Each must end with its code, and leave no
    process nor shared memory; None: it does not end, and is killed after the others. Return what
    each has printed.
    """
    with no_shared_memory_left(), started_ranks(lines, **env) as running:
        deadline = time.monotonic() + timeout
        for rank, ((process, log), code) in enumerate(zip(running, codes, strict=True)):
            if code is not None:
                found = exit_code(running, rank, deadline)
                assert found == code, log.read_text(errors="replace")
                left = members(process.marker)
                assert None in codes or not left, f"rank {rank} left processes behind: {left}"
        outputs = [log.read_text(errors="replace") for _, log in running]
        for process, _ in running:
            kill(process.marker)
    return outputs


def on_hosts(names: tuple[str, str], hosts: list[list[int]]) -> list[list[str]]:
    """Return the command prefix of each rank, on the one or the other host."""
    places = sorted((rank, place) for place, ranks in enumerate(hosts) for rank in ranks)
    interface = f"GLOO_SOCKET_IFNAME=hv{os.getpid()}"
    return [
        ["ip", "netns", "exec", names[place], "env", f"{interface}{'ab'[place]}"]
        for _, place in places
    ]


def write_answer(folder: Path, rank: int, answer: Answer) -> None:
    """Write a rank's answer, in the rank: whole, or not at all."""
    partial = folder / f"answer-{rank}.partial"
    partial.write_text(json.dumps(answer))
    partial.rename(partial.with_suffix(".json"))


def answers(folder: Path, n: int) -> list[Answer]:
    """Return the ranks' answers; {} for a rank without one."""
    files = [folder / f"answer-{rank}.json" for rank in range(n)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]
