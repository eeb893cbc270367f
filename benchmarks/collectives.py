"""Collectives through torch.distributed on every transport, beside one memcpy.

    python benchmarks/collectives.py              # 2 ranks, some five minutes
    python benchmarks/collectives.py --ranks 4

Every transport stays alive under its own launcher; in a block every transport does every operation
some times, in random order, the others stopped meanwhile. The tensor stays the same, as a bucket
does. A block's time is the median of the slowest rank. The bound is what both ranks need, at the
same time, for a `copy_` of as many bytes: an all-reduce in memory must read and write them once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import live
from hvdtrain import BackendOptions, detect, open_backend

RESULTS = Path(__file__).parent / "results" / "collectives.json"
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "gloo": ("torchrun", {}),
    "shm": ("torchrun", {}),
    "mpi": ("mpirun unbound", {}),
}
SIZES = {"1 KB": 1 << 10, "100 KB": 100 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20}
SIZES["100 MB"] = 100 << 20
BOUND = "memcpy"


class Rank:
    """One rank on one transport."""

    def __init__(self, transport: str) -> None:
        torch.set_num_threads(1)
        backend = open_backend("ddp", detect(), BackendOptions(transport=transport))
        self.rank, self.size = backend.world.rank, backend.world.size
        self._calls: dict[tuple[str, int], Callable[[], Any]] = {}

    def run(self, operation: str, num_bytes: int, times: int) -> float:
        """Median seconds of one operation, all ranks beginning together."""
        key = operation, num_bytes
        if key not in self._calls:
            self._calls[key] = self._call(*key)
            for _ in range(3):
                self._calls[key]()
        call, taken = self._calls[key], []
        for _ in range(times):
            dist.barrier()
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)

    def _call(self, operation: str, num_bytes: int) -> Callable[[], Any]:
        count = num_bytes // 4 // self.size * self.size
        t, other = torch.zeros(count), torch.zeros(count)
        mine = torch.zeros(count // self.size)
        return {
            BOUND: lambda: other.copy_(t),
            "all_reduce": lambda: dist.all_reduce(t),
            "broadcast": lambda: dist.broadcast(t, 0),
            "all_gather": lambda: dist.all_gather_single(t, mine),
            "reduce_scatter": lambda: dist.reduce_scatter_single(mine, t),
            "all_to_all": lambda: dist.all_to_all_single(other, t),
        }[operation]


OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def measure(blocks: int, ranks: int, names: list[str], operations: list[str], path: Path) -> None:
    order = random.Random(0)
    seconds: dict[str, dict[str, list[float]]] = {}
    with live.arms(str(Path(__file__).resolve()), {n: ARMS[n] for n in names}, ranks) as arms:
        for operation in operations:
            for label, size in SIZES.items():
                times = 100 if size <= 100 << 10 else 30 if size <= 1 << 20 else 6
                found: dict[str, list[float]] = {name: [] for name in (*names, BOUND)}
                for block in range(blocks + 1):
                    for name in order.sample([*names, BOUND], len(names) + 1):
                        what = BOUND if name == BOUND else operation
                        arm = arms[names[0] if name == BOUND else name]
                        slowest = max(arm.call("run", what, size, times))
                        if block > 0:  # the first is the warm-up
                            found[name].append(slowest)
                seconds[f"{operation} {label}"] = found
                report(f"{operation} {label}", found)
    record = {"seconds": seconds, "ranks": ranks, **live.machine()}
    record["ratios"] = {case: ratios(found) for case, found in seconds.items()}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    draw(seconds, path.with_suffix(".png"))


def ratios(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How many times as fast as Gloo, and how much of the bound; with 95 % intervals."""
    pairs = {f"{name} against gloo": ("gloo", name) for name in found if name in ("shm", "mpi")}
    pairs |= {f"{name} of the bound": (BOUND, name) for name in found if name != BOUND}
    return {
        label: live.interval([a / b for a, b in zip(found[over], found[under], strict=True)])
        for label, (over, under) in pairs.items()
        if over in found
    }


def report(case: str, found: dict[str, list[float]]) -> None:
    medians = "  ".join(f"{name} {1000 * np.median(t):.3f} ms" for name, t in found.items())
    print(f"\n{case}: {medians}")
    for name, r in ratios(found).items():
        print(f"  {name:20} {r['median']:.2f}  [{r['low']:.2f}, {r['high']:.2f}]", flush=True)


def draw(seconds: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the bandwidth of all_reduce over the size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    styles = {"gloo": "#0072B2", "shm": "#D55E00", "mpi": "#009E73", BOUND: "#000000"}
    for name, colour in styles.items():
        cases = [(SIZES[c.removeprefix("all_reduce ")], f) for c, f in seconds.items()
                 if c.startswith("all_reduce ") and name in f]  # fmt: skip
        rates = [size / np.median(found[name]) / 1e9 for size, found in cases]
        axes.plot([s for s, _ in cases], rates, "o-", color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s, bytes over time")
    axes.set_title("all_reduce through torch.distributed")
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[2].startswith("/"):
        rank = Rank(sys.argv[1])
        live.serve(sys.argv[2], rank.rank, {"run": rank.run})
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    parser.add_argument("--only", default=",".join(OPERATIONS), help="operations, by commas")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    arms, operations = options.arms.split(","), options.only.split(",")
    measure(options.blocks, options.ranks, arms, operations, options.output)


if __name__ == "__main__":
    main()
