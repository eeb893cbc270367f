"""Named asynchronous operations of Horovod's API, beside real Horovod: 1 to 10,000 in one step.

    python benchmarks/names.py              # 2 ranks, some three minutes

Every arm stays alive under its own launcher. In a block every arm submits so many
`hvd.allreduce_async_` of 64 floats, with names that stay the same, waits for all, and does so some
times; in random order, the others stopped meanwhile. A block's time is the median of the slowest
rank. Real Horovod collects operations for 1 ms by default (HOROVOD_CYCLE_TIME).

CPU time per operation of 1,000, in us (2 ranks): the caller submits in 2.9 (0.6 compare the tensor
with the slot's, 0.3 make the operation, 0.5 hold the name), sends and waits in 1.0; the control
thread delivers in 1.3 (0.3 copy out), on rank 0 in 2.0, with the sums. Horovod's Python takes 3.0
to submit and 0.4 to wait; the rest of it is C++. The floor of this form is 5 to 6 ms.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import live

RESULTS = Path(__file__).parent / "results" / "names.json"
COUNTS = {1: 100, 10: 100, 100: 40, 1000: 10, 10_000: 3}
"""How often each number of operations is repeated in a block."""
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "horovod/mpi": ("mpirun unbound", {}),
    "horovod/gloo": ("horovodrun-gloo", {}),
    "hvdtrain.hvd": ("torchrun", {}),
}


class Rank:
    """One rank of one library."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        library = "horovod.torch" if name.startswith("horovod") else "hvdtrain.hvd"
        self.hvd: Any = importlib.import_module(library)
        self.hvd.init()

    def run(self, count: int, times: int) -> float:
        """Median seconds of one step with so many operations, all ranks beginning together."""
        hvd, taken = self.hvd, []
        tensors = [torch.ones(64) for _ in range(count)]
        names = [f"layer.{i}.weight.{count}" for i in range(count)]
        for step in range(-3, times):
            hvd.allreduce(torch.zeros(1), name="together")
            begin = time.perf_counter()
            handles = [
                hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
                for tensor, name in zip(tensors, names, strict=True)
            ]
            for handle in handles:
                hvd.synchronize(handle)
            if step >= 0:
                taken.append(time.perf_counter() - begin)
        return statistics.median(taken)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[2].startswith("/"):
        rank = Rank(sys.argv[1])
        live.serve(sys.argv[2], rank.hvd.rank(), rank.hvd.size(), {"run": rank.run})
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    order = random.Random(0)
    seconds: dict[int, dict[str, list[float]]] = {}
    with live.arms(str(Path(__file__).resolve()), ARMS, options.ranks) as ranks:
        for count, times in COUNTS.items():
            found: dict[str, list[float]] = {name: [] for name in ARMS}
            for block in range(options.blocks + 1):
                for name in order.sample(list(ARMS), len(ARMS)):
                    slowest = max(ranks[name].call("run", count, times))
                    if block > 0:  # the first is the warm-up
                        found[name].append(slowest)
            seconds[count] = found
            report(count, found)
    record: dict[str, Any] = {"seconds": seconds, "ranks": options.ranks, **live.machine()}
    record["ratios"] = {count: ratios(found) for count, found in seconds.items()}
    live.write_summary(options.output, record)


def ratios(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How long the other arms take for what hvdtrain takes 1 for; with 95 % intervals."""
    own = found["hvdtrain.hvd"]
    return {
        name: live.interval([a / b for a, b in zip(taken, own, strict=True)])
        for name, taken in found.items()
        if taken is not own
    }


def report(count: int, found: dict[str, list[float]]) -> None:
    print(f"\n{count:,} operations:", end="")
    for name, taken in found.items():
        print(f"  {name} {1000 * statistics.median(taken):.2f} ms", end="")
    print()
    for name, r in ratios(found).items():
        print(f"  {name:14} {r['median']:.2f}  [{r['low']:.2f}, {r['high']:.2f}]", flush=True)


if __name__ == "__main__":
    main()
