"""Bytes between hosts, and time, of shm's collectives over two hosts, beside Gloo's.

    sudo python benchmarks/several_hosts.py          # Linux, root: makes network namespaces

Two hosts, which are network namespaces whose links have a limited rate (tc tbf), with 1, 2 and 4
ranks each, in the usual order of ranks and dealt out in turn. The kernel counts what each host
sends. The tensor has K = 4 MiB: what is reduced, the result of all_gather, or what is broadcast.

Prediction, in K a host, for H hosts with L ranks each. shm: all_reduce 2 (H - 1) / H,
reduce_scatter and all_gather (H - 1) / H, broadcast 1 at the root's host; the number of ranks does
not count. Gloo, whose ring has N = H L ranks: all_reduce 2 (N - 1) / N, as every host has one
outgoing edge; dealt out in turn, all edges go out, and it is L times as much.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import live
from benchmarks.namespaces import link_bytes, make_hosts, remove_hosts

RESULTS = Path(__file__).parent / "results" / "several_hosts.json"
K = 4 << 20
RATE_MBIT = 1000
HOSTS = 2
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
PER_HOST = (1, 2, 4)


def work(transport: str, repeats: int) -> dict[str, Any]:
    """Run every operation in one rank; return the seconds and the K sent by this host, of each."""
    import warnings

    import torch
    import torch.distributed as dist

    import hvdtrain.transports  # noqa: F401  registers shm

    warnings.simplefilter("ignore", FutureWarning)  # of names that torch 2.15 deprecates
    torch.set_num_threads(1)
    dist.init_process_group(transport)
    size, numel = dist.get_world_size(), K // 4
    whole, part = torch.zeros(numel), torch.zeros(numel // size)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    found = {}
    for name in OPERATIONS:
        calls[name]()
        calls[name]()
        dist.barrier()
        sent, begin = link_bytes()[0], time.monotonic()
        for _ in range(repeats):
            calls[name]()
        dist.barrier()
        seconds = time.monotonic() - begin
        found[name] = [seconds / repeats, (link_bytes()[0] - sent) / repeats / K]
        dist.barrier()
    dist.destroy_process_group()
    return found


def run(transport: str, per_host: int, in_turn: bool, hosts: list[str], port: int) -> Any:
    """Start the ranks; return rank 0's figures, and the K that the other host has sent."""
    size = per_host * HOSTS
    processes = []
    for rank in range(size):
        host = hosts[rank % HOSTS if in_turn else rank // per_host]
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
        env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port)}
        env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", host, sys.executable, __file__, "--worker", transport]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{transport}, {size} ranks: {[p.returncode for p in processes]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args.worker, args.repeats)))
        return
    found: dict[str, list[Any]] = {}
    arms = [(t, n, turn) for t in ("shm", "gloo") for n in PER_HOST for turn in (False, True)]
    arms = [arm for arm in arms if arm[1] > 1 or not arm[2]]
    port, hosts = 29800, make_hosts(HOSTS, RATE_MBIT)
    try:
        for _ in range(args.rounds):
            for transport, n, turn in random.sample(arms, len(arms)):
                port += 1
                order = "in turn" if turn else "in order"
                name = f"{transport}, {HOSTS} x {n}, {order}"
                found.setdefault(name, []).append(run(transport, n, turn, hosts, port))
    finally:
        remove_hosts(HOSTS)
    print(f"{'K sent by the busier host, ms':28}" + "".join(f"{o:>24}" for o in OPERATIONS))
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted(found, reverse=True):
        cells, rows[name] = [], {}
        for operation in OPERATIONS:
            sent = max(ranks[operation][1] for ranks in found[name][0])
            times = sorted(1000 * ranks[0][operation][0] for ranks in found[name])
            spread = f"{statistics.median(times):.0f} [{times[0]:.0f}, {times[-1]:.0f}]"
            cells.append(f"{sent:.2f}, {spread}")
            rows[name][operation] = {"k_sent": sent, "ms": times}
        print(f"{name:28}" + "".join(f"{cell:>24}" for cell in cells))
    live.write_summary(RESULTS, {"rate_mbit": RATE_MBIT, "bytes": K, "runs": rows})


if __name__ == "__main__":
    main()
