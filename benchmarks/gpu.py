"""What one GPU shows: equal bits, the loop's overhead, copies that overlap, mixed precision.

    make bench-gpu                                    # one CUDA GPU, under 10 minutes
    python benchmarks/gpu.py --device cpu --quick     # the same program without one, to try it

Every arm trains the convnet from the same weights on the same batches, in one process. Blocks run
all arms in random order; the figures are medians of the ratios within a block, with a 95 %
bootstrap interval. The first steps of an arm are not counted, and each arm ends by a
synchronisation with the device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from hvdtrain import TrainConfig, Trainer, World, open_backend
from hvdtrain.backends.options import BackendOptions
from hvdtrain.tasks.convnet import ConvNet
from hvdtrain.training.console import Console
from hvdtrain.training.data.on_device import moved, on_device
from hvdtrain.training.metrics import fingerprint

RESULTS = Path(__file__).parent / "results"
WARM_UP = 10


class Stopwatch(Console):
    """Notes the time after every step."""

    def __init__(self, synchronise: Callable[[], None]) -> None:
        self.synchronise = synchronise
        self.marks: list[float] = []

    def advance(self, step: int) -> None:
        if step >= WARM_UP:
            self.synchronise()
            self.marks.append(time.perf_counter())


class Bench:
    """The arms of one device. Each returns the ms of its steps, and a hash of the weights."""

    def __init__(self, device: str, steps: int, batch: int) -> None:
        self.device, self.steps, self.batch = device, steps, batch

    def task(self) -> ConvNet:
        return ConvNet(samples=self.batch * (self.steps + WARM_UP))

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def by_trainer(self, backend: str, precision: str = "fp32") -> tuple[list[float], str]:
        with tempfile.TemporaryDirectory() as folder:
            options = BackendOptions(device=self.device)
            with open_backend(backend, World(), options) as opened:
                config = TrainConfig(
                    batch_size=self.batch,
                    epochs=1,
                    run_dir=f"{folder}/run",
                    log_every=10**6,
                    precision=precision,
                    device=self.device,
                    eval_every="2e",
                )
                trainer = Trainer(self.task(), opened, config)
                trainer.console = watch = Stopwatch(self.synchronise)
                trainer.fit()
                digest = fingerprint(dict(trainer.model.named_parameters()))
        return ms_between(watch.marks), digest

    def by_hand(self) -> tuple[list[float], str]:
        """Take the Trainer's steps in the loop that everyone writes."""
        task = self.task()
        torch.manual_seed(0)
        model = task.model().to(self.device)
        optimizer = task.optimizer(model)
        data, _ = task.datasets()
        generator = torch.Generator().manual_seed(0)
        pin = self.device == "cuda"
        loader = DataLoader(
            data, self.batch, shuffle=True, drop_last=True, generator=generator, pin_memory=pin
        )
        marks = []
        for step, (inputs, targets) in enumerate(loader, start=1):
            batch = inputs.to(self.device, non_blocking=True), targets.to(self.device)
            optimizer.zero_grad()
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step >= WARM_UP:
                self.synchronise()
                marks.append(time.perf_counter())
        return ms_between(marks), fingerprint(dict(model.named_parameters()))

    def copies(self, ahead: bool) -> float:
        """Return the ms a batch takes whose copy and computation take equally long, roughly."""
        rows = 1 << 22
        data = TensorDataset(torch.zeros(24, rows // 24 // 4, 4))
        loader = DataLoader(data, batch_size=1, pin_memory=self.device == "cuda")
        weight = torch.zeros(1024, 1024, device=self.device)
        begin = 0.0
        device = torch.device(self.device)
        in_turn = (moved(batch, device) for batch in loader)
        for number, _ in enumerate(on_device(loader, device, same) if ahead else in_turn):
            if number == 4:
                self.synchronise()
                begin = time.perf_counter()
            for _ in range(8):
                weight = weight @ weight
        self.synchronise()
        return 1000 * (time.perf_counter() - begin) / 20


def same(t: Tensor) -> Tensor:
    return t


def ms_between(marks: list[float]) -> list[float]:
    return [1000 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]


def interval(ratios: list[float]) -> dict[str, float]:
    """Return the median of the ratios, and the 95 % interval of it."""
    found = bootstrap((np.array(ratios),), np.median, n_resamples=5000, rng=0).confidence_interval
    return {"median": float(np.median(ratios)), "low": float(found.low), "high": float(found.high)}


def arms(bench: Bench) -> Iterator[tuple[str, Callable[[], tuple[list[float], str]]]]:
    yield "by hand", bench.by_hand
    yield "by hand again", bench.by_hand
    for backend in ("single", "ddp", "compat"):
        yield backend, lambda backend=backend: bench.by_trainer(backend)  # type: ignore[misc]
    yield "single, bf16", lambda: bench.by_trainer("single", "bf16")
    yield "compat, bf16", lambda: bench.by_trainer("compat", "bf16")
    if bench.device == "cuda":
        yield "single, fp16", lambda: bench.by_trainer("single", "fp16")


def measure(bench: Bench, blocks: int) -> dict[str, Any]:
    torch.backends.cudnn.deterministic = True
    table = dict(arms(bench))
    steps: dict[str, list[list[float]]] = {name: [] for name in table}
    digests: dict[str, set[str]] = {name: set() for name in table}
    copies: dict[str, list[float]] = {"ahead": [], "in turn": []}
    order = random.Random(0)
    for block in range(blocks + 1):
        for name in order.sample(list(table), len(table)):
            times, digest = table[name]()
            digests[name].add(digest)
            if block:  # the first is the warm-up
                steps[name].append(times)
        for name in order.sample(list(copies), 2):
            ms = bench.copies(name == "ahead")
            if block:
                copies[name].append(ms)
        print(f"block {block}/{blocks}", flush=True)
    medians = {name: [float(np.median(b)) for b in found] for name, found in steps.items()}
    pairs = {name: ("by hand", name) for name in table if name != "by hand"}
    ratios = {
        name: interval([a / b for a, b in zip(medians[over], medians[under], strict=True)])
        for name, (under, over) in pairs.items()
    }
    overlap = [a / b for a, b in zip(copies["ahead"], copies["in turn"], strict=True)]
    trained = [digests[name] for name in ("single", "ddp", "compat")]
    return {
        "ratio_to_by_hand": ratios,
        "copies_ahead_over_in_turn": interval(overlap),
        "same_bits_on_single_ddp_compat": len(set.union(*trained)) == 1,
        "same_bits_every_time": {name: len(found) == 1 for name, found in digests.items()},
        "step_ms": medians,
        "last_block_ms": {name: found[-1] for name, found in steps.items()},
    }


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for name, times in found["last_block_ms"].items():
        axes.plot(times, label=name, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="2 blocks of few steps")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU that torch can use; --device cpu --quick tries the program without")
    torch.set_num_threads(1 if args.device == "cpu" else torch.get_num_threads())
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    bench = Bench(args.device, steps=20 if args.quick else 100, batch=8 if args.quick else 128)
    found = measure(bench, 2 if args.quick else 10)
    about = {"device": name, "cpus": os.cpu_count(), "torch": torch.__version__}
    about |= {"steps": bench.steps, "batch": bench.batch, "cuda": torch.version.cuda}
    print(json.dumps({**about, **{k: v for k, v in found.items() if "_ms" not in k}}, indent=1))
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        stem = RESULTS / f"gpu-{'-'.join(name.split())}"
        stem.with_suffix(".json").write_text(json.dumps({**about, **found}, indent=1) + "\n")
        draw(found, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
