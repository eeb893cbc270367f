"""One rank of a job, or what another user of the machine runs in its place: see test_strangers.py.

`python -m tests.launch.stranger FOLDER`. An attack that succeeds leaves a file in FOLDER whose name
ends with the user of the job.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hvdtrain import hvd
from hvdtrain.job.world import detect

JOB, STRANGER = 12345, 12346
"""The users."""


class Evil:
    """Its pickle runs a command, as the user who reads it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {FOLDER}/executed-$(id -u)",)


def main() -> None:
    """Exchange objects with the other rank; rank 1 comes late. A stranger sends what is evil."""
    rank, is_of_job = detect().rank, os.geteuid() == JOB
    while is_of_job and rank == 1 and not (FOLDER / "attacked").exists():
        time.sleep(0.02)
    hvd.init()
    print("met", len(hvd.allgather_object(rank if is_of_job else Evil())))


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    main()
