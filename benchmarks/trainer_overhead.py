"""What the Trainer adds to a step: its loop against a hand-written DDP loop.

    python benchmarks/trainer_overhead.py            # 2 ranks, about two minutes

Both arms train the same model on the same data in the same processes, over the same process group:
one block runs both, in random order, each from a fresh model; the first steps are not counted. The
figure is the median over blocks of the ratio Trainer / hand-written of one block, with a 95 %
bootstrap interval. An A/A pair, the hand-written loop against itself, shows what noise alone does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import bootstrap
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hvdtrain import Backend, TrainConfig, Trainer, open_backend
from hvdtrain.tasks.mlp import MLP
from hvdtrain.training.console import Console

RESULTS = Path(__file__).parent / "results" / "trainer_overhead.json"
WARM_UP, STEPS, BATCH = 20, 150, 32


def make_task(width: int) -> MLP:
    return MLP(width=width, samples=(WARM_UP + STEPS) * BATCH * 2)


def by_hand(backend: Backend, width: int) -> float:
    """Seconds that STEPS steps take in the loop that everyone writes."""
    task = make_task(width)
    torch.manual_seed(0)
    model = task.model()
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = task.optimizer(model)
    data, _ = task.datasets()
    sampler: DistributedSampler[object] = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    begin = 0.0
    for step, (inputs, targets) in enumerate(loader):
        if step == WARM_UP:
            begin = time.perf_counter()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            loss.item()
    return time.perf_counter() - begin


class Stopwatch(Console):
    """Notes when the counted steps begin and end."""

    def advance(self, step: int) -> None:
        if step == WARM_UP:
            self.begin = time.perf_counter()
        if step == WARM_UP + STEPS:
            self.seconds = time.perf_counter() - self.begin


def by_trainer(backend: Backend, width: int) -> float:
    """Seconds that STEPS steps take in Trainer.fit."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = backend.broadcast_object(folder) + "/run"
        config = TrainConfig(
            batch_size=BATCH, epochs=1, run_dir=run_dir, log_every=50, threads=1, eval_every=2
        )
        trainer = Trainer(make_task(width), backend, config)
        trainer.console = watch = Stopwatch()
        trainer.fit()
        backend.barrier()
    return watch.seconds


ARMS = {"hand": by_hand, "hand again": by_hand, "trainer": by_trainer}


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median of the ratios, and the 95 % interval of it."""
    found = bootstrap((np.array(ratios),), np.median, n_resamples=5000, rng=0).confidence_interval
    return float(np.median(ratios)), float(found.low), float(found.high)


def measure(backend: Backend, blocks: int, width: int) -> None:
    torch.set_num_threads(1)
    order = random.Random(0)  # the same on every rank
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for block in range(blocks + 1):
        names = list(ARMS)
        order.shuffle(names)
        for name in names:
            backend.barrier()
            seconds = ARMS[name](backend, width)
            slowest = float(backend.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max"))
            if block > 0:  # the first is the warm-up
                times[name].append(1000 * slowest / STEPS)
        if backend.world.rank == 0 and block > 0:
            print(
                f"block {block}/{blocks}: "
                + "  ".join(f"{n} {t[-1]:.2f} ms" for n, t in times.items())
            )
    if backend.world.rank == 0:
        report(times, width, backend)


def report(times: dict[str, list[float]], width: int, backend: Backend) -> None:
    pairs = {"trainer / hand": ("trainer", "hand"), "A/A: hand / hand": ("hand again", "hand")}
    ratios = {
        name: [a / b for a, b in zip(times[over], times[under], strict=True)]
        for name, (over, under) in pairs.items()
    }
    print(
        f"\nstep by hand: {np.median(times['hand']):.2f} ms (median of {len(times['hand'])} blocks)"
    )
    summary = {}
    for name, values in ratios.items():
        median, low, high = interval(values)
        summary[name] = {"median": median, "low": low, "high": high}
        print(f"{name:18}  {median:.3f}  [{low:.3f}, {high:.3f}]")
    record = {
        "summary": summary,
        "step_ms": times,
        "ranks": backend.world.size,
        "width": width,
        "backend": backend.describe(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--width", type=int, default=320, help="of the MLP: about 5 ms a step")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*torchrun, *sys.argv]))
    with open_backend("ddp") as backend:
        measure(backend, options.blocks, options.width)


if __name__ == "__main__":
    main()
