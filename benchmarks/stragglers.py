"""Does `--stragglers` name the late rank, by how much, and do a step's phases add up to the step?

    python benchmarks/stragglers.py

Two ranks of the digits. The last one takes 20 ms longer in each step, in a phase, or is stopped for
100 ms in each third step. Predictions: it is named in every run; it is late by what it sleeps (the
mean of a stop: 33 ms); and the medians of the four phases add up to the median step within 10 %,
but for the stops, which the medians leave out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hvdtrain import detect
from hvdtrain.tasks.digits import Digits

RESULTS = Path(__file__).parent / "results" / "stragglers.json"
LINES = {
    "ddp/shm": "torchrun --nproc-per-node 2 -m hvdtrain --backend ddp",
    "compat/shm": "torchrun --nproc-per-node 2 -m hvdtrain --backend compat",
    "ddp/mpi": "mpirun -np 2 hvdtrain --backend ddp --transport mpi",
}
PHASES = ("data", "compute", "wait", "communication")
# Lets a process that has stopped itself go on after 100 ms.
CONTINUE = """while read -r _ _ state _ < /proc/$0/stat; do
    if [ "$state" = T ]; then sleep 0.1; kill -CONT $0; fi
    sleep 0.005
done"""


class Slow(Digits):
    """The digits, where the last rank is late in `phase`."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        world = detect()
        self.phase = phase if world.rank == world.size - 1 else ""
        self.steps = 0
        if self.phase == "stopped":
            subprocess.Popen(["sh", "-c", CONTINUE, str(os.getpid())])

    def datasets(self) -> Any:
        train, test = super().datasets()
        return (Slept(train) if self.phase == "data" else train), test

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        if self.phase == "compute":
            time.sleep(0.020)
        if self.phase == "stopped" and self.steps % 3 == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().loss(net, batch)


class Slept:
    """A data set, each of whose 32 samples of a batch takes its share of 20 ms."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.020 / 32)
        return self.dataset[index]


def measure(arm: str, phase: str) -> dict[str, Any]:
    """One run: whether the late rank was named, by how much it was late, and the sum of phases."""
    with tempfile.TemporaryDirectory() as folder:
        line = [*LINES[arm].split(), "--task", f"{__file__}:Slow", "--set", f"phase={phase}"]
        line += ["--stragglers", "--max-steps", "51", "--epochs", "9", "--batch-size", "32"]
        line += ["--log-every", "1", "--threads", "1", "--run-dir", f"{folder}/run"]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            line, capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
        if done.returncode:
            sys.exit(f"{' '.join(line)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    step_ms = statistics.median(r["step_ms"] for r in logged if "step_ms" in r)
    (found,) = [r for r in logged if "wait_ms_p50" in r]
    sums = [sum(found[f"{name}_ms_p50"][rank] for name in PHASES) for rank in range(2)]
    return {
        "named": any(line.startswith("late     rank 1") for line in done.stdout.splitlines()),
        "late_ms": found["late_ms"][1],
        "phases_over_step": [total / step_ms for total in sums],
    }


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for arm in LINES:
            for phase in ("data", "compute", "stopped"):
                found.setdefault(f"{arm}, {phase}", []).append(measure(arm, phase))
    for name, runs in found.items():
        late = statistics.median(run["late_ms"] for run in runs)
        shares = [share for run in runs for share in run["phases_over_step"]]
        named = sum(run["named"] for run in runs)
        print(
            f"{name:20} named {named}/{len(runs)}  late {late:5.1f} ms  "
            f"phases {min(shares):.2f} to {max(shares):.2f} of the step"
        )
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
