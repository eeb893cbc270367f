"""Whole training steps: native DDP and compat on every transport, and real Horovod.

    python benchmarks/steps.py            # 2 ranks, some twenty minutes
    python benchmarks/steps.py --only mlp --arms ddp/gloo,compat/shm
    python benchmarks/steps.py --keep-freed-memory --output ...
    python benchmarks/steps.py --before ../hvdtrain-79ae122 --arms ddp/shm,compat/shm --ranks 4
    python benchmarks/steps.py --only names --arms compat/shm,compat/mpi,horovod/mpi,horovod/gloo

Every arm stays alive under its own launcher; one block runs a few steps of every arm, in random
order, the others stopped meanwhile. A block's time is its slowest rank's median step; the figure is
the median over blocks of the ratio of two arms in one block, with a 95 % bootstrap interval. The
same is reported of the CPU time of a rank, with all its threads, which other programs change less.
`ddp/gloo again` is a second `ddp/gloo`: what the noise alone does.

`sharded` arms share one copy of the parameters, and each rank steps its half of them (see
`hvdtrain.sharded_optimizer`); `no communication` is two ranks that train alone, their reference.

    python benchmarks/steps.py --only "mlp-100MB bs8" --arms "no communication,ddp/gloo,\
ddp/shm,ddp/shm sharded,compat/shm,compat/shm sharded,horovod/mpi"
    python benchmarks/steps.py --memory

Prediction, written before the first run. Let s be the time of the optimizer's step alone, c what
averaging adds, f the forward and backward passes: no communication f + s, plain f + s + c, sharded
f + s / 2 + c and two small all-reduces, 0.2 to 0.4 ms. Floor: f + s / 2, as gradients would cost
nothing. From the figures of a prototype (f + s = 114 ms with SGD, 253 ms with AdamW; plain 154 and
303, so c = 40 to 50; AdamW's s about 150) that is 200 to 230 ms for AdamW: below ranks that do not
communicate. SGD's s is about 20 ms: 10 ms are saved, and no more.

`--memory` prints the sum of the proportional set sizes of 2, 4 and 8 ranks, where a shared page is
counted once. Prediction for AdamW, with r the 100 MB of parameters: n plain ranks have n x 4 r
(parameters, gradients, two moments), sharded ones n x r (gradients) + 3 r; for 2, 4 and 8 ranks 8,
16 and 32 r against 5, 7 and 11 r, and 150 to 250 MB that each rank needs for torch itself.

`--before FOLDER` adds an arm with the hvdtrain of another checkout for each that is not Horovod's.

`N names` are N calls of `allreduce_async_` with a name and 200 bytes each, then `synchronize` of
each, as custom compressors do. Floor: a call in Python is 12 us of the caller's thread alone, so
that 10,000 names cannot be below 120 ms; real Horovod's cycle is at least 1 ms, and its calls are
C++. Prediction: faster than it at 1 and 10 names, slower from 100 on.

Every engine is as a script gets it: `shm`, `mpi` and compat tell malloc to keep freed memory, DDP
over Gloo and Horovod do not. With `--keep-freed-memory` all do, as under hvdtrain's Trainer.
"""

from __future__ import annotations

import argparse
import gc
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

sys.path.insert(0, os.environ.get("STEPS_SOURCE", str(Path(__file__).parent.parent)))
from benchmarks import live
from hvdtrain import BackendOptions, detect, open_backend
from hvdtrain.sharded_optimizer import shard
from hvdtrain.shared_tensors import Group
from hvdtrain.tasks.digits import Digits
from hvdtrain.transports.malloc import keep_freed_memory

RESULTS = Path(__file__).parent / "results" / "steps.json"
# Arm: launcher, and what it needs in the environment. Horovod with its defaults, and as its users
# tune it: bindings off, as its manual has it, and a fusion buffer that stays in cache.
Arm = tuple[str, dict[str, str]]
ARMS: dict[str, Arm] = {
    "no communication": ("torchrun", {}),
    "ddp/gloo": ("torchrun", {}),
    "ddp/gloo again": ("torchrun", {}),
    "ddp/shm": ("torchrun", {}),
    "ddp/mpi": ("mpirun unbound", {}),
    "ddp/shm sharded": ("torchrun", {}),
    "compat/shm sharded": ("torchrun", {"HVDTRAIN_TRANSPORT": "shm"}),
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


def digits() -> nn.Module:
    """The network of the task `digits`, so small that averaging is a large part of a step."""
    return Digits().model()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, in one pass over the parameters."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as torch's default is."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in one pass over the parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# name: model, batch, input shape, steps in a block
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], int]] = {
    "mlp-100MB bs8": (mlp, 8, (2048,), 8),
    "mlp-100MB bs8 adamw": (mlp, 8, (2048,), 8),
    "mlp-100MB bs8 fused adamw": (mlp, 8, (2048,), 8),
    "mlp-100MB bs32": (mlp, 32, (2048,), 8),
    "1000 tensors": (small, 8, (64,), 20),
    "convnet": (convnet, 32, (3, 32, 32), 10),
    "digits": (digits, 32, (1, 8, 8), 50),
}
OPTIMIZERS = {"mlp-100MB bs8 adamw": adamw, "mlp-100MB bs8 fused adamw": fused_adamw}
"""By workload; the others have `sgd`."""
LATENCY = "allreduce 1 KB"
NAMED = {"1 name": 1, "10 names": 10, "100 names": 100, "1000 names": 1000, "10000 names": 10000}
BEFORE = " before"
KEEPS = "STEPS_KEEP_FREED_MEMORY"


class Rank:
    """One rank of one arm."""

    def __init__(self, arm: str) -> None:
        torch.set_num_threads(1)
        if os.environ[KEEPS] == "1":
            keep_freed_memory()
        arm = arm.removesuffix(BEFORE)
        self.steps: dict[str, Callable[[], None]] = {}
        self.shards = arm.endswith(" sharded")
        self.is_alone = arm == "no communication"
        backend, transport = ("ddp", "gloo") if self.is_alone else arm.split()[0].split("/")
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
        optimizer: Any = OPTIMIZERS.get(workload, sgd)(model)
        net: nn.Module = model
        if self.is_alone:
            pass
        elif self.is_ddp:
            if self.shards:
                gather, add_up = self.backend.all_gather_object, self.backend.all_reduce
                world = self.backend.world
                group = Group(world.rank, world.size, gather, lambda flags: add_up(flags, "sum"))
                shard(optimizer, group, {})
            net = nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True, forward_sync_buffers=False
            )
        else:
            optimizer = self.hvd.DistributedOptimizer(
                optimizer,
                named_parameters=[(f"{workload}.{n}", p) for n, p in model.named_parameters()],
                **({"shard": True} if self.shards else {}),
            )

        def step() -> None:
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            step()
        return step

    def named(self, num: int) -> Callable[[], None]:
        tensors = [torch.ones(50) for _ in range(num)]
        names = [f"named.{k}" for k in range(num)]

        def step() -> None:
            reduce = self.hvd.allreduce_async_
            for handle in [reduce(t, name=name) for t, name in zip(tensors, names, strict=True)]:
                self.hvd.synchronize(handle)

        return step

    def memory(self, workload: str) -> float:
        """Megabytes of this rank after some steps, without a part of the pages that it shares."""
        self.run(workload, 3)
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("Pss:"))

    def run(self, workload: str, steps: int) -> tuple[float, float]:
        """Median milliseconds of a step, after one that is not counted, and CPU time by step."""
        if workload == LATENCY and self.is_alone or workload in NAMED and self.is_ddp:
            return float("nan"), float("nan")
        if workload in NAMED and workload not in self.steps:
            self.steps[workload] = self.named(NAMED[workload])
        if workload == LATENCY:
            tensor: Tensor = torch.ones(256)
            if self.is_ddp:
                self.steps[workload] = lambda: dist.all_reduce(tensor)
            else:
                self.steps[workload] = lambda: self.hvd.allreduce(tensor, name="latency")
        elif workload not in self.steps:
            self.steps.clear()  # frees the memory of the workload before
            gc.collect()
            self.steps[workload] = self.step_of(workload)
        step = self.steps[workload]
        step()
        times = []
        cpu_begin = time.process_time()
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        cpu_ms = 1000 * (time.process_time() - cpu_begin) / steps
        return 1000 * statistics.median(times), cpu_ms


def measure(blocks: int, names: list[str], arms: dict[str, Arm], ranks: int, path: Path) -> None:
    order = random.Random(0)
    times: dict[str, dict[str, list[float]]] = {}
    cpu_times: dict[str, dict[str, list[float]]] = {}
    chosen = [*arms]
    with live.arms(str(Path(__file__).resolve()), arms, ranks) as running:
        for workload in names:
            steps = WORKLOADS[workload][3] if workload in WORKLOADS else 200
            if workload in NAMED:
                steps = max(3, min(100, 1000 // NAMED[workload]))
            found: dict[str, list[float]] = {arm: [] for arm in chosen}
            cpu: dict[str, list[float]] = {arm: [] for arm in chosen}
            for block in range(blocks + 1):
                for arm in order.sample(chosen, len(chosen)):
                    of_ranks = running[arm].call("run", workload, steps)
                    if block > 0:  # the first is the warm-up
                        found[arm].append(max(wall for wall, _ in of_ranks))
                        cpu[arm].append(statistics.mean(of_rank for _, of_rank in of_ranks))
            times[workload], cpu_times[workload] = found, cpu
            report(workload, found)
            report(f"{workload}, CPU time of a rank", cpu)
    record = {
        "step_ms": times,
        "cpu_ms": cpu_times,
        "ratios": {w: ratios(found) for w, found in times.items()},
        "cpu_ratios": {w: ratios(found) for w, found in cpu_times.items()},
        "ranks": ranks,
        "freed_memory_kept_by_all": os.environ[KEEPS] == "1",
        **live.machine(),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    draw(record["ratios"], path.with_suffix(".png"))


def measure_memory(chosen: list[str], path: Path) -> None:
    """Print the memory of all ranks of each arm, one arm at a time."""
    workload = "mlp-100MB bs8 adamw"
    found: dict[str, dict[int, float]] = {}
    for arm in chosen:
        for ranks in (2, 4, 8):
            with live.arms(str(Path(__file__).resolve()), {arm: ARMS[arm]}, ranks) as running:
                total = sum(running[arm].call("memory", workload))
            found.setdefault(arm, {})[ranks] = round(total)
            print(f"{arm}, {ranks} ranks: {total:.0f} MB", flush=True)
    path = path.with_name(f"{path.stem}-memory.json")
    path.write_text(json.dumps({workload: found, **live.machine()}, indent=1) + "\n")


def ratios(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        f"{over} : {under}": live.interval(
            [a / b for a, b in zip(found[over], found[under], strict=True)]
        )
        for over in found
        for under in (*BASES, over + BEFORE)
        if under in found
        and over != under
        and not over.startswith("horovod")
        and not np.isnan(found[over]).any()
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
            colour = COLOURS.get(arm.split("/")[0], "#777777")
            spread = [[r["median"] - r["low"]], [r["high"] - r["median"]]]
            axes.barh(at, r["median"], xerr=spread, color=colour, capsize=3)
            labels.append((at, f"{workload}  {arm}"))
            at -= 1
        at -= 1
    if not labels:
        return  # without ddp/gloo there is nothing to draw
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=8)
    axes.set_xlabel("time of a step, as a share of native DDP's over Gloo (less is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


COLOURS = {"ddp": "#0072B2", "compat": "#D55E00"}


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[2].startswith("/"):
        rank = Rank(sys.argv[1])
        live.serve(sys.argv[2], rank.rank, {"run": rank.run, "memory": rank.memory})
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--only", default="", help="parts of workloads' names, with commas")
    parser.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--keep-freed-memory", action="store_true", help="in the ranks of all arms")
    parser.add_argument("--memory", action="store_true", help="of the arms with shm, not times")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--before", type=Path, help="a checkout of hvdtrain to compare with")
    options = parser.parse_args()
    os.environ[KEEPS] = str(int(options.keep_freed_memory))
    if options.memory:
        of_shm = [arm for arm in options.arms.split(",") if "/shm" in arm]
        measure_memory(of_shm, options.output)
        return
    every = (*WORKLOADS, LATENCY, *NAMED)
    names = [n for n in every if any(part in n for part in options.only.split(","))]
    arms = {name: ARMS[name] for name in options.arms.split(",")}
    if options.before is not None:
        source = {"STEPS_SOURCE": str(options.before.resolve())}
        ours = [name for name in arms if not name.startswith("horovod")]
        arms |= {name + BEFORE: (ARMS[name][0], {**ARMS[name][1], **source}) for name in ours}
    measure(options.blocks, names, arms, options.ranks, options.output)


if __name__ == "__main__":
    main()
