"""hvdtrain.hvd against native DDP and real Horovod: whole training steps, and one small allreduce.

    python benchmarks/hvd_steps.py            # 2 ranks, some ten minutes

Every arm stays alive under its own launcher; one block runs a few steps of every arm, in random
order, the others stopped meanwhile. A block's time is its slowest rank's median step; the figure is
the median over blocks of the ratio of two arms in one block, with a 95 % bootstrap interval.
`ddp again` is a second `ddp`: what the noise alone does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import live

RESULTS = Path(__file__).parent / "results" / "hvd_steps.json"
ARMS = {
    "ddp": "torchrun",
    "ddp again": "torchrun",
    "compat": "torchrun",
    "horovod-mpi": "mpirun",
    "horovod-mpi unbound": "mpirun unbound",
    "horovod-gloo": "horovodrun-gloo",
}
RATIOS = [
    ("compat", "ddp"),
    ("compat", "horovod-mpi"),
    ("compat", "horovod-mpi unbound"),
    ("compat", "horovod-gloo"),
    ("ddp again", "ddp"),
]


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


class Rank:
    """One rank of one arm."""

    def __init__(self, arm: str) -> None:
        torch.set_num_threads(1)
        self.arm = arm
        self.steps: dict[str, Callable[[], None]] = {}
        if arm.startswith("ddp"):
            import torch.distributed as dist

            dist.init_process_group("gloo")
            self.rank = dist.get_rank()
            return
        name = "hvdtrain.hvd" if arm == "compat" else "horovod.torch"
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
        if self.arm.startswith("ddp"):
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


def measure(blocks: int, names: list[str]) -> None:
    order = random.Random(0)
    times: dict[str, dict[str, list[float]]] = {}
    with live.arms(str(Path(__file__).resolve()), ARMS, 2) as arms:
        for workload in names:
            steps = WORKLOADS[workload][3] if workload in WORKLOADS else 200
            able = [a for a in ARMS if workload in WORKLOADS or not a.startswith("ddp")]
            found: dict[str, list[float]] = {arm: [] for arm in able}
            for block in range(blocks + 1):
                for arm in order.sample(able, len(able)):
                    slowest = max(arms[arm].call("run", workload, steps))
                    if block > 0:  # the first is the warm-up
                        found[arm].append(slowest)
            times[workload] = found
            report(workload, found)
    record = {
        "step_ms": times,
        "ratios": {w: ratios(found) for w, found in times.items()},
        "ranks": 2,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def ratios(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        f"{over} / {under}": live.interval(
            [a / b for a, b in zip(found[over], found[under], strict=True)]
        )
        for over, under in RATIOS
        if over in found and under in found
    }


def report(workload: str, found: dict[str, list[float]]) -> None:
    medians = "  ".join(f"{arm} {np.median(t):.2f} ms" for arm, t in found.items())
    print(f"\n{workload}: {medians}")
    for name, r in ratios(found).items():
        print(f"  {name:24} {r['median']:.3f}  [{r['low']:.3f}, {r['high']:.3f}]", flush=True)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1].startswith("/"):
        rank = Rank(sys.argv[2])
        live.serve(sys.argv[1], rank.rank, {"run": rank.run})
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--only", help="part of a workload's name")
    options = parser.parse_args()
    names = [n for n in (*WORKLOADS, LATENCY) if not options.only or options.only in n]
    measure(options.blocks, names)


if __name__ == "__main__":
    main()
