"""Collectives of one host through torch.distributed, over Gloo and `shm`, beside one memcpy.

    python benchmarks/collectives.py              # 2 ranks, some five minutes
    python benchmarks/collectives.py --ranks 4 --bind
    python benchmarks/collectives.py --only all_reduce,barrier --arms shm,raw,empty --largest 25

Every transport stays alive under its own launcher; in a block every transport does every operation
some times, in random order, the others stopped meanwhile. The tensor stays the same, as a bucket
does. A block's time is the median of the slowest rank. The bound is what both ranks need, at the
same time, for a `copy_` of as many bytes: an all-reduce in memory must read and write them once.
`pure` is `shm` without its part in C. Three arms show what is possible: `raw`, mpi4py's collectives
on NumPy arrays without torch, over Open MPI; `mpich`, the same over MPICH; and `empty`, a process
group in Python that does nothing, the floor for every other arm. `--bind` gives the ranks cores in
turn: a launcher that binds none leaves two ranks on one core for some milliseconds now and then,
which takes small messages 30 us.
"""

from __future__ import annotations

import argparse
import os
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
    "pure": ("torchrun", {"HVDTRAIN_PURE_PYTHON": "1"}),
    "raw": (
        "mpirun unbound",
        {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"},
    ),
    "mpich": ("mpich", live.MPICH_ENV),
    "empty": ("torchrun", {}),
}
BINDS = "COLLECTIVES_BIND"
RAW = ("raw", "mpich")  # the arms without torch.distributed
SIZES = {"64 B": 64, "1 KB": 1 << 10, "8 KB": 8 << 10, "64 KB": 64 << 10, "256 KB": 256 << 10}
SIZES |= {"1 MB": 1 << 20, "4 MB": 4 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
BOUND = "memcpy"
COLOURS = {"gloo": "#0072B2", "shm": "#D55E00", "raw": "#CC79A7"}
COLOURS |= {"mpich": "#E69F00", BOUND: "#000000"}


_C10dGroup: Any = dist.ProcessGroup  # torch's stubs have overloads that no override could have


class EmptyGroup(_C10dGroup):  # type: ignore[misc]
    """A process group whose collectives do nothing: what torch.distributed itself costs."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        return None

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        return None

    def getBackendName(self) -> str:
        return "empty"

    def setGroupName(self, name: str) -> None:
        return

    setGroupDesc = setGroupName

    def getGroupName(self) -> str:
        return "empty"

    getGroupDesc = getGroupName


class RawRank:
    """One rank of MPI without torch.distributed."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def run(self, operation: str, num_bytes: int, times: int) -> float:
        """Median seconds of one operation, all ranks beginning together."""
        comm, size = self._comm, self.size
        count = num_bytes // 4 // size * size
        # Written once: pages of np.zeros that are only read are all the kernel's one page of zeros.
        array, other, mine = (np.full(n, 0, np.float32) for n in (count, count, count // size))
        call: Callable[[], Any] = {
            "all_reduce": lambda: comm.Allreduce(self._in_place, array),
            "barrier": comm.Barrier,
            "broadcast": lambda: comm.Bcast(array, 0),
            "all_gather": lambda: comm.Allgather(mine, array),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(array, mine),
            "all_to_all": lambda: comm.Alltoall(array, other),
        }[operation]
        for _ in range(3):
            call()
        return timed(call, comm.Barrier, times)


def timed(call: Callable[[], Any], barrier: Callable[[], Any], times: int) -> float:
    """Median seconds of a call that all ranks begin together."""
    taken = []
    for _ in range(times):
        barrier()
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


class Rank:
    """One rank on one transport."""

    def __init__(self, transport: str) -> None:
        torch.set_num_threads(1)
        is_empty = transport == "empty"
        options = BackendOptions(
            transport={"empty": "gloo", "pure": "shm"}.get(transport, transport)
        )
        backend = open_backend("ddp", detect(), options)
        self._group: Any = None
        if is_empty:
            dist.Backend.register_backend("empty", EmptyGroup, devices=["cpu"])
            self._group = dist.new_group(backend="empty")
        self.rank, self.size = backend.world.rank, backend.world.size
        self._calls: dict[tuple[str, int], Callable[[], Any]] = {}

    def run(self, operation: str, num_bytes: int, times: int) -> float:
        """Median seconds of one operation, all ranks beginning together."""
        key = operation, num_bytes
        if key not in self._calls:
            self._calls[key] = self._call(*key)
            for _ in range(3):
                self._calls[key]()
        return timed(self._calls[key], dist.barrier, times)

    def _call(self, operation: str, num_bytes: int) -> Callable[[], Any]:
        count = num_bytes // 4 // self.size * self.size
        t, other = torch.zeros(count), torch.zeros(count)
        mine = torch.zeros(count // self.size)
        return {
            BOUND: lambda: other.copy_(t),
            "all_reduce": lambda: dist.all_reduce(t, group=self._group),
            "barrier": lambda: dist.barrier(self._group),
            "broadcast": lambda: dist.broadcast(t, 0),
            "all_gather": lambda: dist.all_gather_single(t, mine),
            "reduce_scatter": lambda: dist.reduce_scatter_single(mine, t),
            "all_to_all": lambda: dist.all_to_all_single(other, t),
        }[operation]


OPERATIONS = ("all_reduce", "barrier", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def cases(operation: str, largest: int) -> dict[str, int]:
    """The sizes of an operation in bytes, by the name of the case."""
    if operation == "barrier":
        return {"barrier": 0}
    return {f"{operation} {label}": size for label, size in SIZES.items() if size <= largest}


def can(name: str, operation: str) -> bool:
    return name != "empty" or operation in ("all_reduce", "barrier")


def measure(
    blocks: int, ranks: int, names: list[str], operations: list[str], largest: int, path: Path
) -> None:
    order = random.Random(0)
    seconds: dict[str, dict[str, list[float]]] = {}
    todo = [(operation, *case) for operation in operations
            for case in cases(operation, largest).items()]  # fmt: skip
    with live.arms(str(Path(__file__).resolve()), {n: ARMS[n] for n in names}, ranks) as arms:
        copies = next(name for name in names if name not in RAW)
        for operation, case, size in todo:
            times = 100 if size <= 100 << 10 else 30 if size <= 1 << 20 else 6
            able = [name for name in names if can(name, operation)]
            found: dict[str, list[float]] = {name: [] for name in (*able, BOUND)}
            for block in range(blocks + 1):
                for name in order.sample([*able, BOUND], len(able) + 1):
                    what = BOUND if name == BOUND else operation
                    arm = arms[copies if name == BOUND else name]
                    slowest = max(arm.call("run", what, size, times))
                    if block > 0:  # the first is the warm-up
                        found[name].append(slowest)
            seconds[case] = found
            report(case, found)
    record = {"seconds": seconds, "ranks": ranks, "bound": BINDS in os.environ, **live.machine()}
    record["ratios"] = {case: ratios(found) for case, found in seconds.items()}
    live.write_summary(path, record)
    draw(seconds, path.with_suffix(".png"))


def ratios(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How many times as fast as the other arms, how much of the bound; with 95 % intervals."""
    ours = [name for name in found if name in ("shm", "pure")]
    pairs = {f"{name} against {o}": (o, name) for o in ("gloo", "raw", "empty") for name in ours}
    pairs |= {
        f"{name} of the bound": (BOUND, name) for name in found if name not in (BOUND, "empty")
    }
    return {
        label: live.interval([a / b for a, b in zip(found[over], found[under], strict=True)])
        for label, (over, under) in pairs.items()
        if over in found
    }


def report(case: str, found: dict[str, list[float]]) -> None:
    times = (
        f"{name} {1000 * np.median(t):.4f} ms (min {1000 * min(t):.4f})"
        for name, t in found.items()
    )
    print(f"\n{case}: {'  '.join(times)}")
    for name, r in ratios(found).items():
        print(f"  {name:20} {r['median']:.2f}  [{r['low']:.2f}, {r['high']:.2f}]", flush=True)


def draw(seconds: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw each operation's time over the size: where the lines cross, another arm is faster."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [o for o in OPERATIONS if any(case.startswith(f"{o} ") for case in seconds)]
    figure, panels = pyplot.subplots(
        1, len(drawn), figsize=(3.4 * len(drawn), 3.8), sharey=True, squeeze=False
    )
    for axes, operation in zip(panels[0], drawn, strict=True):
        of_it = [case for case in seconds if case.startswith(f"{operation} ")]
        found = {SIZES[case.removeprefix(f"{operation} ")]: seconds[case] for case in of_it}
        for name, colour in COLOURS.items():
            medians = [(size, np.median(t[name]) * 1e6) for size, t in found.items() if name in t]
            if medians:
                axes.plot(*zip(*medians, strict=True), "o-", ms=3, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlabel="bytes", title=operation)
        axes.grid(True, alpha=0.3)
    panels[0][0].set_ylabel("us")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[2].startswith("/"):
        rank = RawRank() if sys.argv[1] in RAW else Rank(sys.argv[1])
        if BINDS in os.environ:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank.rank % len(cores)]})
        live.serve(sys.argv[2], rank.rank, rank.size, {"run": rank.run})
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    parser.add_argument("--only", default=",".join(OPERATIONS), help="operations, by commas")
    parser.add_argument("--largest", type=int, default=100, help="the largest tensor, in MB")
    parser.add_argument("--bind", action="store_true", help="ranks to cores, in turn")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.bind:
        os.environ[BINDS] = "1"
    arms, operations = options.arms.split(","), options.only.split(",")
    largest = options.largest << 20
    measure(options.blocks, options.ranks, arms, operations, largest, options.output)


if __name__ == "__main__":
    main()
