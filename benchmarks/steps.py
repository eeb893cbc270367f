"""Whole training steps, by `hvdtrain compare`: each entry below is a list of commands.

    python benchmarks/steps.py                        # all, 2 ranks, about an hour
    python benchmarks/steps.py mlp convnet --budget 3m
    python benchmarks/steps.py mlp --ranks 4
    python benchmarks/steps.py mlp tensors --before ../hvdtrain-0.1    # beside another checkout

What is the same training, how it is timed, and what counts as faster is compare's (its manual says
how). The commands of one comparison train with `train_steps.py`, or with hvdtrain's Trainer.
results/steps.json has one row for each; an entry that is measured again replaces its rows. The
first command is the baseline.

Predictions for `mlp-adamw`, whose step is a large part. Let s be the time of the optimizer's step,
c what averaging adds, f forward and backward: plain f + s + c, sharded f + s / 2 + c and two small
all-reduces, 0.2 to 0.4 ms. A prototype had f + s = 253 ms, s = 150 and c = 40 to 50: 200 to 230.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import live
from hvdtrain.compare import record
from hvdtrain.compare.analysis.table import SpeedRow, make_table

RESULTS = Path(__file__).parent / "results" / "steps.json"
SCRIPT = Path(__file__).parent / "train_steps.py"
TORCHRUN = "torchrun --nproc-per-node {ranks}"
MPIRUN = "mpirun --bind-to none -np {ranks} {python}"  # as Horovod's manual has it
ENGINES = {
    "ddp/gloo": TORCHRUN,
    "ddp/shm": TORCHRUN,
    "compat/shm": TORCHRUN,
    "compat/shm sharded": TORCHRUN,
    "compat/mpi": MPIRUN,
    "horovod/mpi": MPIRUN,
}
PLAIN = [name for name in ENGINES if not name.endswith("sharded")]
TRAINER = (
    f"{TORCHRUN} -m hvdtrain --backend ddp --task mlp --set width=320 --batch-size 32 "
    "--epochs 1000000 --threads 1 --eval-every 1000000e"
)
METHODS = (
    "--tensorboard",
    "--on-nonfinite skip",
    "--ema 0.999",
)
# Name: commands by their names. {ranks}, {python} and {source} are filled in.
ENTRIES: dict[str, dict[str, str]] = {
    workload: {
        engine: f'{ENGINES[engine]} {SCRIPT} {workload} "{engine}"{{source}}' for engine in engines
    }
    for workload, engines in {
        "mlp": PLAIN,
        "mlp-adamw": list(ENGINES),
        "mlp-fused-adamw": list(ENGINES),
        "convnet": PLAIN,
        "transformer": PLAIN,
        "tensors": PLAIN,
        "digits": PLAIN,
    }.items()
}
ENTRIES["trainer"] = {"trainer": TRAINER} | {m: f"{TRAINER} {m}" for m in METHODS}


def commands(entry: str, ranks: int, before: Path | None) -> dict[str, str]:
    """Return the commands of an entry by name; with `before`, each twice where it is hvdtrain's."""
    found = {}
    for name, line in ENTRIES[entry].items():
        more = {"ranks": ranks, "python": sys.executable}
        found[name] = line.format(source="", **more)
        if before is not None and "{source}" in line and not name.startswith("horovod"):
            found[f"{name} before"] = line.format(source=f" --source {before.resolve()}", **more)
    return found


def measure(entry: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Compare the commands of an entry as a user does, and return what compare says of each; None
    if it ends with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        line = [sys.executable, "-m", "hvdtrain", "compare", "--output", str(out)]
        line += ["--budget", options.budget]
        for name, command in commands(entry, options.ranks, options.before).items():
            line += ["--name", name, command]
        if code := subprocess.call(line, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}):
            print(f"{entry}: hvdtrain compare ends with {code}", file=sys.stderr)
            return None
        found = record.read(out)
    table = make_table(found)
    return {
        "work": table.verdict,
        "noise": table.noise,
        "rows": {row.arm: figures(row) for row in table.rows},
        "ranks": options.ranks,
        "commit": found.commit,
        "when": found.ended,
        "machine": f"{found.machine.cores} cores, {found.machine.cpu}",
        "torch": found.versions.get("torch"),
    }


def figures(row: SpeedRow) -> dict[str, Any]:
    """Return what is kept of an arm."""
    names = ("step_ms", "verdict", "cpu_ms", "peak_mib")
    ratio = row.ratio
    limits = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "blocks": ratio.blocks}
    return {**{name: getattr(row, name) for name in names}, **limits}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("entries", nargs="*", help=f"of {', '.join(ENTRIES)}; without any: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", default="4m", help="of one entry")
    parser.add_argument("--before", type=Path, help="a checkout of hvdtrain to compare with")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if unknown := set(options.entries) - set(ENTRIES):
        parser.error(f"no entry {', '.join(unknown)}; there are {', '.join(ENTRIES)}")
    every: dict[str, Any] = {}
    if options.output.exists():
        every = json.loads(options.output.read_text())
    for entry in options.entries or ENTRIES:
        name = entry if options.ranks == 2 else f"{entry}, {options.ranks} ranks"
        name += ", beside a checkout before" * (options.before is not None)
        if (found := measure(entry, options)) is not None:
            every[name] = found
            live.write_summary(options.output, every)


if __name__ == "__main__":
    main()
