"""Can `hvdtrain compare` be believed? Many comparisons whose right answer is known.

    python benchmarks/comparisons.py            # 5 runs: 20 comparisons of a command with itself

Each run compares a command with itself, four times, with itself slowed by 10 %, and slowed by 40 %
in every fourth step, which is as much (the script is `train_steps.py`), and repeats the baseline,
as every comparison. Counted: how often the same arm was told from itself, and how often the slower
ones were found. All the while another process is busy, on and off: a fifth of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from hvdtrain.compare import record
from hvdtrain.compare.analysis.table import Table, make_table
from hvdtrain.compare.record import Record
from hvdtrain.system import machine, provenance

BUSY = """
import random, time
while True:
    until = time.perf_counter() + random.expovariate(10)
    while time.perf_counter() < until:
        pass
    time.sleep(random.expovariate(2.5))
"""
RESULTS = Path(__file__).parent / "results" / "comparisons.json"
SCRIPT = Path(__file__).parent / "train_steps.py"
KINDS = {
    "itself": (4, ""),
    "10 % slower": (1, " --slower 0.1"),
    "40 % slower in every fourth step": (1, " --slower 0.4 --every 4"),
}
ARMS = {name: [f"{name} ({i + 1})" for i in range(count)] for name, (count, _) in KINDS.items()}


def compare(budget: str, more: list[str]) -> Record:
    """One comparison as a user runs it; its record."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        arms = {"base": ""} | {arm: KINDS[name][1] for name, own in ARMS.items() for arm in own}
        line = [sys.executable, "-m", "hvdtrain", "compare", "--budget", budget]
        line += ["--steps", "6", *more, "--output", str(out)]
        for arm, slower in arms.items():
            command = f"torchrun --nproc-per-node 2 {SCRIPT} small ddp/shm{slower}"
            line += ["--name", arm, command]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            raise SystemExit(f"{' '.join(line)}: exit {done.returncode}\n{done.stderr[-2000:]}")
        return record.read(out)


def verdicts(table: Table) -> dict[str, list[dict[str, Any]]]:
    rows = {row.arm: {"verdict": row.verdict, **vars(row.ratio)} for row in table.rows}
    return {name: [rows[arm] for arm in own] for name, own in ARMS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--budget", default="95s", help="of a run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--resume", action="store_true", help="keep the runs that are there")
    options, more = parser.parse_known_args()
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            measure(options, more)
        finally:
            busy.kill()


def measure(options: argparse.Namespace, more: list[str]) -> None:
    runs: list[dict[str, Any]] = []
    if options.resume:
        runs = json.loads(options.output.read_text())["runs"]
    for number in range(len(runs), options.runs):
        found = compare(options.budget, [*more, "--seed", str(number)])
        table = make_table(found)
        rows = verdicts(table)
        about = {
            "budget": options.budget,
            "starts": found.config.get("starts"),
            "commit": found.commit,
            "time": found.ended,
        }
        runs.append({"rows": rows, "noise": table.noise, "kept": len(found.kept_blocks), **about})
        said = [
            f"{n}: {r['verdict']} {r['value'] or 0:.3f}" for n, own in rows.items() for r in own
        ]
        print(f"{number + 1}/{options.runs}  {'  '.join(said)}  ({len(found.kept_blocks)} blocks)")
        write(runs, options)


def write(runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    counts = {
        name: dict(Counter(row["verdict"] for run in runs for row in run["rows"][name]))
        for name in ARMS
    }
    result = {
        "verdicts": counts,
        "budget": options.budget,
        "runs": runs,
        "machine": machine.facts(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "time": provenance.now(),
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(result, default=vars, indent=1) + "\n")
    print(f"    {counts}", flush=True)


if __name__ == "__main__":
    main()
