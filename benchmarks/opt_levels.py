"""Memory, time and loss of each `--opt-level`, on a convolutional network and on a transformer.

    python benchmarks/opt_levels.py                  # one process and thread, some minutes

Each level trains in a fresh process, in random order. A step's time is CPU time, which others' load
changes little: the median over steps, then over rounds, without the first step. Memory is the peak
of the process less what it had before the model and the data were made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "opt_levels.json"
TASKS: dict[str, dict[str, Any]] = {
    "convnet": {"batch_size": 64},
    "transformer": {"batch_size": 8, "set": ("width=512", "layers=4")},
}
LEVELS = (
    ("O0", "fp32"),
    *((level, half) for half in ("bf16", "fp16") for level in ("O1", "O2", "O3")),
)
STEPS = 6


def measure(task: str, level: str, precision: str) -> dict[str, float]:
    """Train STEPS steps in this process."""
    from hvdtrain import TrainConfig, Trainer, open_backend
    from hvdtrain.job.world import detect
    from hvdtrain.training.task import load_task

    config = TrainConfig(
        task=task,
        opt_level=level,
        precision=precision,
        device="cpu",
        threads=1,
        max_steps=STEPS,
        **TASKS[task],
    )
    before = status_mib("VmRSS")
    with open_backend("single", detect({}), config.backend_options()) as backend:
        trainer = Trainer(load_task(config.task, config.set), backend, config)
        trainer.set_up(record=False)
        times, losses = [time.process_time()], []
        for loss in trainer.steps():
            times.append(time.process_time())
            losses.append(float(loss))
    steps = [after - begin for begin, after in itertools.pairwise(times)][1:]
    peak = status_mib("VmHWM") - before
    return {"ms": 1000 * statistics.median(steps), "mib": peak, "loss": losses[-1]}


def status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10


def table(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = ["| | " + " | ".join(f"{t}: CPU ms a step | MiB | loss" for t in TASKS) + " |"]
    lines.append("|---|" + "---|" * 3 * len(TASKS))
    for level, precision in LEVELS:
        cells = []
        for task in TASKS:
            rounds = found[task][f"{level} {precision}"]
            ms, mib = (statistics.median(r[key] for r in rounds) for key in ("ms", "mib"))
            cells += [f"{ms:.0f}", f"{mib:.0f}", f"{rounds[0]['loss']:.3f}"]
        lines.append(f"| {level} {precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", nargs=3, metavar=("TASK", "LEVEL", "PRECISION"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        task: {f"{level} {precision}": [] for level, precision in LEVELS} for task in TASKS
    }
    for _ in range(args.rounds):
        cases = [(task, *level) for task in TASKS for level in LEVELS]
        for task, level, precision in random.sample(cases, len(cases)):
            command = [sys.executable, __file__, "--one", task, level, precision]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[task][f"{level} {precision}"].append(json.loads(done.stdout))
            print(task, level, precision, found[task][f"{level} {precision}"][-1], flush=True)
    print(table(found))
    about = {"machine": platform.platform(), "cores": os.cpu_count(), "tasks": TASKS}
    RESULTS.write_text(json.dumps({**about, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
