"""What the step after a checkpoint waits: with --checkpoint-async, without it, and for a memcpy.

    python benchmarks/checkpoint_async.py            # one process, about four minutes

Each round runs all arms in random order: a run of the Trainer with 400 MB of state and steps of
some 10 ms that saves three times, with and without the option, and a copy of the same tensors
into memory that has been used before. The wait is the time of the step after a checkpoint less the
median of the steps before it. The first checkpoint of a run gets new memory from the kernel; later
ones use it again. A figure is the median over rounds, with the least and the largest.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import live
from hvdtrain import Callback, Task, TrainConfig, Trainer, open_backend

RESULTS = Path(__file__).parent / "results" / "checkpoint_async.json"
TENSORS, FLOATS = 100, 1_000_000  # 400 MB
EVERY, SAVES = 300, 3


class Large(Task):
    """Light steps, and a large state: buffers that no step reads."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
        for number in range(TENSORS):
            model.register_buffer(f"state{number}", torch.full((FLOATS,), float(number)))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def datasets(self) -> tuple[Dataset[Any], None]:
        return TensorDataset(torch.randn(1, 1024).expand(200_000, 1024)), None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = net(batch[0]).square().mean()
        return loss


class Clock(Callback):
    """The time at the end of each step, and the processor time of the training thread."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []

    def on_step_end(self, trainer: Trainer) -> None:
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.thread_time())


def train(is_async: bool, folder: str) -> dict[str, float]:
    """Return what the steps after the first and after later checkpoints wait, in ms, the median
    step, and the median of the ten steps after that, while a thread may be writing.
    """
    clock = Clock()
    with tempfile.TemporaryDirectory(dir=folder) as inside, open_backend("single") as backend:
        config = TrainConfig(
            batch_size=128,
            max_steps=EVERY * SAVES + 20,
            checkpoint_every=EVERY,
            checkpoint_async=is_async,
            log_every=50,
            threads=1,
            keep=1,
            run_dir=f"{inside}/run",
        )
        Trainer(Large(), backend, config, callbacks=[clock]).fit()
    return {**measures(clock.ends, ""), **measures(clock.cpu_ends, "_cpu")}


def measures(ends: list[float], suffix: str) -> dict[str, float]:
    steps = [1000 * (b - a) for a, b in zip(ends, ends[1:], strict=False)]
    usual = statistics.median(steps[EVERY - 100 : EVERY - 1])
    waits = [steps[EVERY * k - 1] - usual for k in range(1, SAVES + 1)]
    found = {
        "first": waits[0],
        "later": statistics.median(waits[1:]),
        "step": usual,
        "next": statistics.median(steps[EVERY : EVERY + 10]),
    }
    return {f"{name}{suffix}": value for name, value in found.items()}


def copy_memory() -> dict[str, float]:
    """Return the time of a copy of the same size, in ms."""
    sources = [torch.full((FLOATS,), float(number)) for number in range(TENSORS)]
    targets = [source.clone() for source in sources]
    times, cpu_times = [], []
    for _ in range(5):
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        times.append(1000 * (time.perf_counter() - begin))
        cpu_times.append(1000 * (time.thread_time() - cpu_begin))
    return {"later": statistics.median(times), "later_cpu": statistics.median(cpu_times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", default=None, help="where to write; default: the system's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder or tempfile.gettempdir()
    arms = {
        "async": lambda: train(True, folder),
        "sync": lambda: train(False, folder),
        "memcpy": copy_memory,
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    order = random.Random(0)
    for number in range(options.rounds):
        for name in order.sample(list(arms), len(arms)):
            found[name].append(arms[name]())
            print(f"round {number + 1}: {name} {found[name][-1]}", flush=True)
    pairs = {
        "async, later / memcpy": ("async", "later", "memcpy", "later"),
        "async, first / memcpy": ("async", "first", "memcpy", "later"),
        "processor time: async, later / memcpy": ("async", "later_cpu", "memcpy", "later_cpu"),
        "processor time: async, first / memcpy": ("async", "first_cpu", "memcpy", "later_cpu"),
        "sync / async, later": ("sync", "later", "async", "later"),
        "a step while writing / a step": ("async", "next", "async", "step"),
    }
    summary = {}
    for text, (over, a, under, b) in pairs.items():
        both = zip(found[over], found[under], strict=True)
        ratios = [x[a] / y[b] for x, y in both]
        summary[text] = statistics.median(ratios), min(ratios), max(ratios)
    for name in arms:
        ms = [x["later"] for x in found[name]]
        print(f"{name:40} {statistics.median(ms):8.1f} ms [{min(ms):.1f}, {max(ms):.1f}]")
    for text, (median, low, high) in summary.items():
        print(f"{text:40} {median:8.2f}    [{low:.2f}, {high:.2f}]")
    about = {"cpus": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    record = {"summary": summary, "ms": found, "load_average": os.getloadavg(), **about}
    live.write_summary(RESULTS, record)


if __name__ == "__main__":
    main()
