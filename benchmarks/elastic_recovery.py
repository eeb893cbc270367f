"""How long an elastic job stands still when a rank is killed.

    python benchmarks/elastic_recovery.py --kills 10      # some eight minutes

Under each launcher `hvdtrain --elastic` trains; a rank that is not rank 0 dies by SIGKILL, the
others form a smaller world, and the launcher adds a rank again, which is the next to die. A
recovery lasts from the kill to the end of the first step of the last survivor.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import live
from tests.launch.test_elastic import HVDRUN, Job, elastic
from tests.launch.test_elastic_training import training

RESULTS = Path(__file__).parent / "results" / "elastic_recovery.json"
# horovodrun ends all ranks of a host that loses one, so its two ranks have two names of this host.
LAUNCHERS = {
    "hvdrun, 2 ranks": (2, [*HVDRUN, "--min-np", "1"], ["localhost:2"]),
    "hvdrun, 4 ranks": (4, [*HVDRUN, "--min-np", "1"], ["localhost:4"]),
    "horovodrun, 2 ranks": (
        2,
        ["horovodrun", "--min-np", "1", "-np", "2", "--network-interfaces", "lo"],
        ["localhost:1", "127.0.0.1:1"],
    ),
}
COOLDOWN = ["--blacklist-cooldown-range", "1", "2"]
BACKENDS = ("compat", "ddp")


def first_steps(job: Job, size: int) -> list[float]:
    """Return when each rank made its first step in a world of this size, in the job's order."""
    return [float(at) for at in re.findall(rf"STEP \d+/{size} (\S+)", job.text)]


def wait_for_steps(job: Job, size: int, count: int) -> list[float]:
    deadline = time.monotonic() + 120
    while len(found := first_steps(job, size)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {count} first steps in worlds of {size}: {job.news}")
        time.sleep(0.02)
    return found


def measure(launcher: str, backend: str, kills: int) -> list[float]:
    """Return the seconds of each recovery."""
    size, line, hosts = LAUNCHERS[launcher]
    recoveries: list[float] = []
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        command = training(folder, "--backend", backend, "--commit-every", "3")
        with elastic(folder, [*line, *COOLDOWN], *hosts, command=command) as job:
            while len(recoveries) < kills:
                count = len(recoveries) + 1
                wait_for_steps(job, size, size * count)
                victims = re.findall(rf"START [1-9]\d*/{size} (\d+)", job.text)
                killed = job.kill(int(victims[-1]))
                steps = wait_for_steps(job, size - 1, (size - 1) * count)
                recoveries.append(max(steps[-(size - 1) :]) - killed)
            if job.finish() != 0:
                raise RuntimeError(job.news)
    return recoveries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    kills = parser.parse_args().kills
    seconds: dict[str, list[float]] = {}
    for launcher in LAUNCHERS:
        for backend in BACKENDS:
            arm = f"{launcher}, {backend}"
            seconds[arm] = sorted(measure(launcher, backend, kills))
            low, median, high = (float(np.quantile(seconds[arm], q)) for q in (0, 0.5, 1))
            print(f"{arm:28} {median:.2f} s  [{low:.2f}, {high:.2f}]  {kills} kills", flush=True)
    live.write_summary(RESULTS, {"seconds": seconds, **live.machine()})


if __name__ == "__main__":
    main()
