"""What the Trainer adds to a step, and what each of its options adds that watches a run.

    python benchmarks/trainer_overhead.py            # 2 ranks, about eight minutes

All arms train the same model on the same data in the same processes, over the same process group:
one block runs each, in random order, from a fresh model; the first steps are not counted. A figure
is the median over blocks of the ratio of two arms of one block, with a 95 % bootstrap interval: the
Trainer with nothing switched on / a hand-written DDP loop, and the Trainer with one option / with
none. An A/A pair, the hand-written loop against itself, shows what noise alone does. `--profile`
costs once, not in each step: its figure is the seconds that it adds to a run. Beside the time of
the slower rank there is the processor time of both, which other programs disturb less.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import bootstrap
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hvdtrain import Backend, Callback, TrainConfig, Trainer, open_backend
from hvdtrain.tasks.mlp import MLP
from hvdtrain.training.callback_list import HOOKS
from hvdtrain.training.console import Console

RESULTS = Path(__file__).parent / "results" / "trainer_overhead.json"
WARM_UP, STEPS, BATCH = 20, 150, 32


def make_task(width: int) -> MLP:
    return MLP(width=width, samples=(WARM_UP + STEPS) * BATCH * 2)


class Stopwatch(Console):
    """The seconds of the counted steps, and those for which this rank's processor was busy."""

    seconds = cpu_s = 0.0

    def advance(self, step: int) -> None:
        if step in (WARM_UP, WARM_UP + STEPS):
            self.seconds = time.perf_counter() - self.seconds
            self.cpu_s = time.process_time() - self.cpu_s


def by_hand(backend: Backend, width: int) -> Stopwatch:
    """Take the steps in the loop that everyone writes."""
    task = make_task(width)
    torch.manual_seed(0)
    model = task.model()
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = task.optimizer(model)
    data, _ = task.datasets()
    sampler: DistributedSampler[object] = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    watch = Stopwatch()
    for step, (inputs, targets) in enumerate(loader):
        watch.advance(step)
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            loss.item()
    watch.advance(WARM_UP + STEPS)
    return watch


def do_nothing(self: Callback, *args: object) -> None:
    """A hook of the callback below."""


Idle: type[Callback] = type("Idle", (Callback,), dict.fromkeys(HOOKS, do_nothing))
"""A callback of a user that overrides every hook."""


def by_trainer(
    backend: Backend, width: int, callbacks: tuple[type[Callback], ...] = (), **options: Any
) -> Stopwatch:
    """Take the steps in Trainer.fit."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            batch_size=BATCH,
            epochs=1,
            run_dir=backend.broadcast_object(folder) + "/run",
            log_every=50,
            threads=1,
            eval_every="2e",
            **options,
        )
        own = [kind() for kind in callbacks]
        trainer = Trainer(make_task(width), backend, config, callbacks=own)
        trainer.console = watch = Stopwatch()
        trainer.fit()
        backend.barrier()
    return watch


OPTIONS: dict[str, dict[str, Any]] = {
    "a callback with empty hooks": {"callbacks": (Idle,)},
    "--tensorboard": {"tensorboard": True},
    "--log-gradients 50": {"log_gradients": 50},
    "--on-nonfinite skip": {"on_nonfinite": "skip"},
    "--ema 0.999": {"ema": 0.999},
    "--stragglers": {"stragglers": True},
}
PROFILE = "--profile 50:5"
TRAINER = {"trainer": {}, **OPTIONS, PROFILE: {"profile": "50:5"}}
ARMS: dict[str, Callable[[Backend, int], Stopwatch]] = {
    "hand": by_hand,
    "hand again": by_hand,
    **{name: partial(by_trainer, **options) for name, options in TRAINER.items()},
}


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median of the ratios, and the 95 % interval of it."""
    found = bootstrap((np.array(ratios),), np.median, n_resamples=5000, rng=0).confidence_interval
    return float(np.median(ratios)), float(found.low), float(found.high)


def measure(backend: Backend, blocks: int, width: int) -> None:
    torch.set_num_threads(1)
    order = random.Random(0)  # the same on every rank
    wall: dict[str, list[float]] = {name: [] for name in ARMS}
    cpu: dict[str, list[float]] = {name: [] for name in ARMS}
    for block in range(blocks + 1):
        names = list(ARMS)
        order.shuffle(names)
        for name in names:
            backend.barrier()
            watch = ARMS[name](backend, width)
            both = torch.tensor([watch.seconds, watch.cpu_s], dtype=torch.float64)
            if block > 0:  # the first is the warm-up
                wall[name].append(1000 * float(backend.all_reduce(both, "max")[0]) / STEPS)
                cpu[name].append(1000 * float(backend.all_reduce(both, "mean")[1]) / STEPS)
        if backend.world.rank == 0 and block > 0:
            last = "  ".join(f"{name} {ms[-1]:.2f} ms" for name, ms in wall.items())
            print(f"block {block}/{blocks}: {last}", flush=True)
    if backend.world.rank == 0:
        report(wall, cpu, width, backend)


def compare(times: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Return the ratios by pair of arms, and the seconds of a profile, with intervals."""
    pairs = {"trainer / hand": ("trainer", "hand"), "A/A: hand / hand": ("hand again", "hand")}
    pairs |= {f"{name} / trainer": (name, "trainer") for name in OPTIONS}
    found = {
        name: interval([a / b for a, b in zip(times[over], times[under], strict=True)])
        for name, (over, under) in pairs.items()
    }
    both = zip(times[PROFILE], times["trainer"], strict=True)
    found[f"{PROFILE}, s a run"] = interval([(a - b) * STEPS / 1000 for a, b in both])
    return found


def with_names(found: dict[str, tuple[float, float, float]]) -> dict[str, dict[str, float]]:
    names = ("median", "low", "high")
    return {pair: dict(zip(names, values, strict=True)) for pair, values in found.items()}


def report(
    wall: dict[str, list[float]], cpu: dict[str, list[float]], width: int, backend: Backend
) -> None:
    in_time, in_cpu = compare(wall), compare(cpu)
    print(
        f"\nstep by hand: {np.median(wall['hand']):.2f} ms, processor time "
        f"{np.median(cpu['hand']):.2f} ms (medians of {len(wall['hand'])} blocks)"
    )
    print(f"{'':38}  {'time':22}  processor time")
    for name in in_time:
        cells = (
            f"{m:.3f} [{low:.3f}, {high:.3f}]" for m, low, high in (in_time[name], in_cpu[name])
        )
        print(f"{name:38}  {'  '.join(f'{cell:22}' for cell in cells)}")
    record = {
        "summary": with_names(in_time),
        "summary_cpu": with_names(in_cpu),
        "step_ms": wall,
        "step_cpu_ms": cpu,
        "ranks": backend.world.size,
        "width": width,
        "backend": backend.describe(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
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
