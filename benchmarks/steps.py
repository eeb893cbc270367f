"""Whole training steps: native DDP and compat on every transport, and real Horovod.

    python benchmarks/steps.py            # 2 ranks, some twenty minutes
    python benchmarks/steps.py --only mlp --arms ddp/gloo,compat/shm
    python benchmarks/steps.py --keep-freed-memory --output ...

Every arm stays alive under its own launcher; one block runs a few steps of every arm, in random
order, the others stopped meanwhile. A block's time is its slowest rank's median step; the figure is
the median over blocks of the ratio of two arms in one block, with a 95 % bootstrap interval.
`ddp/gloo again` is a second `ddp/gloo`: what the noise alone does.

Every engine is as a script gets it: `shm`, `mpi` and compat tell malloc to keep freed memory, DDP
over Gloo and Horovod do not. With `--keep-freed-memory` all do, as under hvdtrain's Trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import live
from hvdtrain import BackendOptions, detect, open_backend
from hvdtrain.transports.malloc import keep_freed_memory

RESULTS = Path(__file__).parent / "results" / "steps.json"
# Arm: launcher, and what it needs in the environment. Horovod with its defaults, and as its users
# tune it: bindings off, as its manual has it, and a fusion buffer that stays in cache.
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "ddp/gloo": ("torchrun", {}),
    "ddp/gloo again": ("torchrun", {}),
    "ddp/shm": ("torchrun", {}),
    "ddp/mpi": ("mpirun unbound", {}),
    "compat/gloo": ("torchrun", {"HVDTRAIN_TRANSPORT": "gloo"}),
    "compat/shm": ("torchrun", {"HVDTRAIN_TRANSPORT": "shm"}),
    "compat/mpi": ("mpirun unbound", {"HVDTRAIN_TRANSPORT": "mpi"}),
    "horovod/mpi": ("mpirun", {}),
    "horovod/mpi tuned": ("mpirun unbound", {"HOROVOD_FUSION_THRESHOLD": str(4 << 20)}),
    # Its Gloo gives up on ranks that are stopped, as the others are while one arm works.
    "horovod/gloo": ("horovodrun-gloo", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "900"}),
}
BASES = ("ddp/gloo", "horovod/mpi", "horovod/mpi tuned", "horovod/gloo")


def mlp() -> nn.Module:
    """Six layers of 2048: 101 MB of gradients, most of it in six tensors."""
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.ReLU())])


def small() -> nn.Module:
    """A thousand tensors, of 16 KB and of 256 bytes."""
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(500)])


def convnet() -> nn.Module:
    """A small residual-free convolutional network on 32 x 32 images."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 4, 10))


# name: model, batch, input shape, steps in a block
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], int]] = {
    "mlp-100MB bs8": (mlp, 8, (2048,), 8),
    "mlp-100MB bs32": (mlp, 32, (2048,), 8),
    "1000 tensors": (small, 8, (64,), 20),
    "convnet": (convnet, 32, (3, 32, 32), 10),
}
LATENCY = "allreduce 1 KB"
KEEPS = "STEPS_KEEP_FREED_MEMORY"


class Rank:
    """One rank of one arm."""

    def __init__(self, arm: str) -> None:
        torch.set_num_threads(1)
        if os.environ[KEEPS] == "1":
            keep_freed_memory()
        self.arm = arm
        self.steps: dict[str, Callable[[], None]] = {}
        backend, transport = arm.split()[0].split("/")
        self.is_ddp = backend == "ddp"
        if self.is_ddp:
            self.backend = open_backend("ddp", detect(), BackendOptions(transport=transport))
            self.rank = self.backend.world.rank
            return
        name = "hvdtrain.hvd" if backend == "compat" else "horovod.torch"
        self.hvd: Any = import_module(name)
        self.hvd.init()
        self.rank = self.hvd.rank()

    def step_of(self, workload: str) -> Callable[[], None]:
        make, batch, shape, _ = WORKLOADS[workload]
        torch.manual_seed(0)
        model = make()
        inputs = torch.randn(batch, *shape)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
        net: nn.Module = model
        if self.is_ddp:
            net = nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True, forward_sync_buffers=False
            )
        else:
            optimizer = self.hvd.DistributedOptimizer(
                optimizer,
                named_parameters=[(f"{workload}.{n}", p) for n, p in model.named_parameters()],
            )

        def step() -> None:
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            step()
        return step

    def run(self, workload: str, steps: int) -> float:
        """Median milliseconds of a step, after one that is not counted."""
        if workload == LATENCY:
            tensor: Tensor = torch.ones(256)
            if self.is_ddp:
                self.steps[workload] = lambda: dist.all_reduce(tensor)
            else:
                self.steps[workload] = lambda: self.hvd.allreduce(tensor, name="latency")
        elif workload not in self.steps:
            self.steps[workload] = self.step_of(workload)
        step = self.steps[workload]
        step()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        return 1000 * statistics.median(times)


def measure(blocks: int, names: list[str], chosen: list[str], path: Path) -> None:
    order = random.Random(0)
    times: dict[str, dict[str, list[float]]] = {}
    arms = {name: ARMS[name] for name in chosen}
    with live.arms(str(Path(__file__).resolve()), arms, 2) as running:
        for workload in names:
            steps = WORKLOADS[workload][3] if workload in WORKLOADS else 200
            found: dict[str, list[float]] = {arm: [] for arm in chosen}
            for block in range(blocks + 1):
                for arm in order.sample(chosen, len(chosen)):
                    slowest = max(running[arm].call("run", workload, steps))
                    if block > 0:  # the first is the warm-up
                        found[arm].append(slowest)
            times[workload] = found
            report(workload, found)
    record = {
        "step_ms": times,
        "ratios": {w: ratios(found) for w, found in times.items()},
        "ranks": 2,
        "freed_memory_kept_by_all": os.environ[KEEPS] == "1",
        **live.machine(),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    draw(record["ratios"], path.with_suffix(".png"))


def ratios(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        f"{over} : {under}": live.interval(
            [a / b for a, b in zip(found[over], found[under], strict=True)]
        )
        for under in BASES
        for over in found
        if under in found and over != under and not (over.startswith("horovod"))
    }


def report(workload: str, found: dict[str, list[float]]) -> None:
    medians = "  ".join(f"{arm} {np.median(t):.2f} ms" for arm, t in found.items())
    print(f"\n{workload}: {medians}")
    for name, r in ratios(found).items():
        print(f"  {name:34} {r['median']:.3f}  [{r['low']:.3f}, {r['high']:.3f}]", flush=True)


def draw(ratios_by_workload: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw every arm's step as a share of ddp/gloo's, with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    base = " : ddp/gloo"
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 1.3 * len(ratios_by_workload)))
    labels, at = [], 0
    for workload, found in ratios_by_workload.items():
        for name, r in found.items():
            if not name.endswith(base):
                continue
            arm = name.removesuffix(base)
            spread = [[r["median"] - r["low"]], [r["high"] - r["median"]]]
            axes.barh(at, r["median"], xerr=spread, color=COLOURS[arm.split("/")[0]], capsize=3)
            labels.append((at, f"{workload}  {arm}"))
            at -= 1
        at -= 1
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=8)
    axes.set_xlabel("time of a step, as a share of native DDP's over Gloo (less is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


COLOURS = {"ddp": "#0072B2", "compat": "#D55E00"}


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[2].startswith("/"):
        rank = Rank(sys.argv[1])
        live.serve(sys.argv[2], rank.rank, {"run": rank.run})
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--only", help="part of a workload's name")
    parser.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--keep-freed-memory", action="store_true", help="in the ranks of all arms")
    options = parser.parse_args()
    os.environ[KEEPS] = str(int(options.keep_freed_memory))
    names = [n for n in (*WORKLOADS, LATENCY) if not options.only or options.only in n]
    measure(options.blocks, names, options.arms.split(","), options.output)


if __name__ == "__main__":
    main()
