"""Time and bytes of collectives over several hosts: Gloo, `shm`, `mpi` and raw Open MPI.

    sudo python benchmarks/several_hosts.py                # Linux, root, cc: some 15 minutes
    sudo python benchmarks/several_hosts.py --layouts "4 x 2" --before ../other --only all_reduce

Hosts are network namespaces (`namespaces.py`), with links of 1 Gbit/s and 1 ms one way; what the
links really give is measured first. A layout is "hosts x ranks on each", ranks in the usual order
or dealt out in turn. Every arm stays alive under its own mpirun, and in a block every arm does the
operation some times, in random order, the others stopped meanwhile. A block's time is the mean of
the calls between two barriers, on the slowest rank; the kernel counts the bytes. `raw` is mpi4py's
collectives on NumPy arrays, without torch. `before` is `shm` of another checkout.

Prediction, for H hosts with L ranks each, N = H L, a tensor of K bytes (what is reduced, the result
of all_gather, or what is broadcast), links of B bytes/s and a delay d one way. A host sends
`fraction` K, which takes `fraction` K / B, and the critical path has `delays` d:

                          all_reduce: fraction, delays         a half of one     broadcast
    shm, mpi              2 (H - 1) / H, 2; 1 of 2 hosts       half, H - 1       1, log2 H
      comparing the calls                       + 1                  + 1           + 1
      up to 1,984 bytes   with the calls                         -                 -
    gloo: a ring          2 (N - 1) / N, 2 (N - 1) H / N       half of both      1, log2 H
      dealt out in turn   L times as much, 2 (N - 1)
    raw: halving          2 (H - 1) / H, 2 log2 H              half of both      1, log2 H
      below 10 KB         L log2 H, log2 H
      dealt out in turn   L times as much, the same

The halves of an all_reduce are reduce_scatter and all_gather. Open MPI 4.1 reduces by recursive
halving and doubling of the vector, the near ranks first, and a small vector by recursive doubling.
It is a bound: no time to add up, to copy or to switch between ranks, of which all share the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# With `before`, hvdtrain is another checkout's; `benchmarks` are this one's.
sys.path.insert(0, os.environ.get("SEVERAL_HOSTS_TREE", str(Path(__file__).resolve().parents[1])))
import hvdtrain.transports  # noqa: F401  registers shm and mpi4py

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import live
from benchmarks.namespaces import Hosts, address, link_bytes, measure_links, running_hosts
from hvdtrain.compare.run.arm_process import ArmProcess

RESULTS = Path(__file__).parent / "results" / "several_hosts.json"
RATE_MBIT, DELAY_MS = 1000, 1.0
LAYOUTS = ("2 x 2", "2 x 2 in turn", "4 x 2")
ARMS = {"gloo": "gloo", "shm": "shm", "mpi": "mpi4py", "raw": "", "before": "shm"}
BASE_PORT = 29800
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_MCA_oob_tcp_if_include": "eth0",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # all hosts share the cores
}
DOUBLING_BYTES = 10_000  # below, Open MPI sends whole vectors
SUM_BYTES = 1984  # of shm: a tensor that crosses with the calls


class Case(NamedTuple):
    """What is measured, and how many calls of it a block has."""

    operation: str
    dtype: str
    num_bytes: int
    times: int

    def __str__(self) -> str:
        size = (
            f"{self.num_bytes >> 20} MB" if self.num_bytes >> 20 else f"{self.num_bytes >> 10} KB"
        )
        return f"{self.operation} {size}{'' if self.dtype == 'float32' else f' {self.dtype}'}"


CASES = [
    Case("all_reduce", "float32", 1 << 10, 20),
    Case("all_reduce", "float32", 64 << 10, 20),
    Case("all_reduce", "float32", 1 << 20, 5),
    Case("all_reduce", "float32", 25 << 20, 2),
    Case("all_reduce", "bfloat16", 25 << 20, 2),
    Case("reduce_scatter", "float32", 4 << 20, 3),
    Case("all_gather", "float32", 4 << 20, 3),
    Case("broadcast", "float32", 4 << 20, 3),
]


class Layout(NamedTuple):
    """Where the ranks are."""

    hosts: int
    per_host: int
    is_in_turn: bool

    @classmethod
    def of(cls, text: str) -> Layout:
        hosts, _, per_host, *in_turn = text.split()
        return cls(int(hosts), int(per_host), bool(in_turn))


def predict(arm: str, case: Case, layout: Layout) -> tuple[float, float]:
    """Return how many K a host sends, and how many delays of a link are on the critical path."""
    hosts, per_host, is_in_turn = layout
    size, halves = hosts * per_host, 2 if case.operation == "all_reduce" else 1
    edges = per_host if is_in_turn else 1  # how often the flat algorithms send what one link needs
    ours = arm in ("shm", "mpi", "before")  # of `before` it is what it would take now
    if case.operation == "broadcast":
        return 1.0, math.log2(hosts) + ours
    if arm == "gloo":
        delays = halves * (size - 1) * edges * hosts / size
        return halves * edges * (size - 1) / size, math.ceil(delays)
    if arm == "raw" and case.operation == "all_reduce" and case.num_bytes < DOUBLING_BYTES:
        return per_host * math.log2(hosts), math.log2(hosts)
    fraction = halves * (hosts - 1) / hosts
    if arm == "raw":
        return edges * fraction, halves * math.log2(hosts)
    if case.operation == "all_reduce":
        return fraction, 1 + (case.num_bytes > SUM_BYTES) * (1 if hosts == 2 else 2)
    return fraction, hosts


# In the ranks


class TorchRank:
    """One rank of a process group over Gloo, `shm` or `mpi4py`."""

    def __init__(self, backend: str, port: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        torch.set_num_threads(1)
        self.rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        self.size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        store = TCPStore(address(0), port, self.size, self.rank == 0)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        self.barrier, self.close = dist.barrier, dist.destroy_process_group

    def operation(self, case: Case) -> Callable[[], Any]:
        import torch
        import torch.distributed as dist

        dtype = getattr(torch, case.dtype)
        whole = torch.zeros(case.num_bytes // dtype.itemsize, dtype=dtype)
        part = torch.zeros(whole.numel() // self.size, dtype=dtype)
        calls = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
            "all_gather": lambda: dist.all_gather_single(whole, part),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }
        return calls[case.operation]


class RawRank:
    """One rank of MPI without torch."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.barrier, self.close = self._comm.Barrier, lambda: None

    def operation(self, case: Case) -> Callable[[], Any]:
        import numpy as np

        whole = np.full(case.num_bytes // 4, 0, np.float32)
        part = np.full(whole.size // self.size, 0, np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: self._comm.Allreduce(self._in_place, whole),
            "reduce_scatter": lambda: self._comm.Reduce_scatter_block(whole, part),
            "all_gather": lambda: self._comm.Allgather(part, whole),
            "broadcast": lambda: self._comm.Bcast(whole, 0),
        }
        return calls[case.operation]


def serve(arm: str, socket: str, port: int) -> None:
    """Be one rank of an arm."""
    rank = TorchRank(ARMS[arm], port) if ARMS[arm] else RawRank()
    ready: dict[Case, Callable[[], Any]] = {}

    def run(*fields: Any) -> tuple[float, float]:
        """Return the seconds of a call, and the bytes that this host has sent for it."""
        case = Case(*fields)
        if case not in ready:
            ready.clear()  # the tensors of the case before
            ready[case] = rank.operation(case)
            for _ in range(2):  # shm moves a tensor that comes again
                ready[case]()
        rank.barrier()
        sent, begin = link_bytes()[0], time.perf_counter()
        for _ in range(case.times):
            ready[case]()
        rank.barrier()
        seconds = time.perf_counter() - begin
        return seconds / case.times, (link_bytes()[0] - sent) / case.times

    live.serve(socket, rank.rank, rank.size, {"run": run})
    rank.close()


# The driver


@contextlib.contextmanager
def running_arms(
    hosts: Hosts, layout: Layout, names: list[str], before: Path | None
) -> Iterator[dict[str, ArmProcess]]:
    """Start each arm's ranks on the hosts, with an mpirun on the first; end them at the end."""
    env = {**os.environ, **MPI_ENV, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    env["OMPI_MCA_plm_rsh_agent"] = str(hosts.enter)
    places = ",".join(f"{name}:{layout.per_host}" for name in hosts.names)
    line = [str(hosts.enter), hosts.names[0], "mpirun", "--bind-to", "none", "-H", places]
    line += ["--map-by", "node" if layout.is_in_turn else "slot", sys.executable, __file__]
    arms: dict[str, ArmProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for i, name in enumerate(names):
                socket, log = Path(folder) / name, Path(folder) / f"{name}.log"
                command = [*line, "--serve", name, str(socket), str(BASE_PORT + i)]
                tree = {"SEVERAL_HOSTS_TREE": str(before)} if name == "before" else {}
                arms[name] = ArmProcess(command, {**env, **tree}, socket, log)
            for arm in arms.values():
                arm.meet(live.START_S)
                arm.pause()
            yield arms
        finally:
            is_done = sys.exc_info()[0] is None
            for arm in arms.values() if is_done else ():
                arm.release()  # all of them exit at the same time
            for arm in arms.values():
                arm.end(is_done)


def measure(
    layout: Layout, names: list[str], cases: list[Case], blocks: int, before: Path | None
) -> dict[str, Any]:
    """Return the links, and each case's times, bytes and predictions by arm; print them."""
    order = random.Random(0)
    results: dict[str, Any] = {}
    with running_hosts(layout.hosts, RATE_MBIT, DELAY_MS) as hosts:
        link = measure_links(hosts)
        print(", ".join(f"{name} {value:.3g}" for name, value in link.items()), flush=True)
        with running_arms(hosts, layout, names, before) as arms:
            for case in cases:
                able = [n for n in names if n != "raw" or case.dtype == "float32"]
                seconds: dict[str, list[float]] = {name: [] for name in able}
                sent: dict[str, list[float]] = {name: [] for name in able}
                for block in range(blocks + 1):
                    for name in order.sample(able, len(able)):
                        ranks = arms[name].call("run", *case)
                        if block > 0:  # the first is the warm-up
                            seconds[name].append(max(s for s, _ in ranks))
                            sent[name].append(max(num_bytes for _, num_bytes in ranks))
                results[str(case)] = report(case, layout, link, seconds, sent)
    return {"link": link, "cases": results}


def report(
    case: Case,
    layout: Layout,
    link: dict[str, Any],
    seconds: dict[str, list[float]],
    sent: dict[str, list[float]],
) -> dict[str, Any]:
    """Print and return a case's rows by arm."""
    rows: dict[str, Any] = {}
    print(
        f"{case!s:24}{'ms':>24}{'predicted':>11}{'K sent':>9}{'predicted':>11}  shm takes", end=""
    )
    print(" of its time")
    for name, times in seconds.items():
        fraction, delays = predict(name, case, layout)
        transfer_s = fraction * case.num_bytes / (link["stream_mbit"] / 8 * 1e6)
        row = {
            "ms": live.interval([1000 * s for s in times]),
            "predicted_ms": 1000 * transfer_s + delays * link["round_trip_ms"] / 2,
            "k_sent": statistics.median(sent[name]) / case.num_bytes,
            "predicted_k": fraction,
        }
        if "shm" in seconds and name != "shm":
            pairs = zip(seconds["shm"], times, strict=True)
            row["shm_takes"] = live.interval([ours / theirs for ours, theirs in pairs])
        rows[name] = row
        cells = f"{interval_text(row['ms']):>24}{row['predicted_ms']:>11.2f}"
        cells += f"{row['k_sent']:>9.2f}{row['predicted_k']:>11.2f}"
        ratio = interval_text(row["shm_takes"]) if "shm_takes" in row else ""
        print(f"  {name:22}{cells}  {ratio}", flush=True)
    return rows


def interval_text(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="by commas")
    parser.add_argument("--arms", default="gloo,shm,mpi,raw", help="by commas")
    parser.add_argument("--before", type=Path, help="another checkout, whose shm is an arm")
    parser.add_argument("--only", help="operations, by commas")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    names = args.arms.split(",") + (["before"] if args.before else [])
    cases = [c for c in CASES if not args.only or c.operation in args.only.split(",")]
    before = args.before and args.before.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so remove the hosts
    about = {"rate_mbit": RATE_MBIT, "delay_ms": DELAY_MS}
    for text in args.layouts.split(","):
        print(f"\n{text}")
        found = measure(Layout.of(text), names, cases, args.blocks, before)
        # Other layouts in the file stay; this one is replaced, with all its cases.
        known = json.loads(args.output.read_text()) if args.output.exists() else {}
        layouts = known.get("layouts", {}) | {text: {**found, **live.machine()}}
        live.write_summary(args.output, {**about, "layouts": layouts})


if __name__ == "__main__":
    main()
