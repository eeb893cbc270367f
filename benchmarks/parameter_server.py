"""Bytes at each rank's link, and time of a step: a parameter server beside a ring all-reduce.

    sudo python benchmarks/parameter_server.py       # Linux, root: makes network namespaces

The server is that of examples/parameter_server.py. Every rank is a host of its own: a network
namespace whose link has a limited rate in both directions (`namespaces.py`). The kernel counts the
bytes of each link. The model has K = 1 MiB of gradients. Prediction, in each direction and
step, for W workers: the server's link K W, each worker's K; in a ring 2 K (W - 1) / W at every
rank. Beside them, on one host without a network: this project's shared memory.
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
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import live
from benchmarks.namespaces import link_bytes, running_hosts

RESULTS = Path(__file__).parent / "results" / "parameter_server.json"
SERVERS = {"server, synchronous": "synchronous", "server, asynchronous": "asynchronous"}
RINGS = {"ddp/gloo": "gloo", "ddp/shm": "shm"}
ARMS = [*SERVERS, *RINGS]
WORKERS = (2, 4, 8)
WARM_STEPS, STEPS = 2, 20
RATE_MBIT = 200
MODEL_BYTES = 1 << 20


def work(arm: str) -> dict[str, float]:
    """Train in one rank; return seconds and bytes of a step."""
    import torch
    from torch import nn

    from examples import parameter_server
    from hvdtrain import BackendOptions, open_backend

    torch.set_num_threads(1)
    options = BackendOptions(device="cpu", transport=RINGS.get(arm, "gloo"))
    with open_backend("ddp", options=options) as backend:
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs, labels = torch.randn(4, 128), torch.zeros(4, dtype=torch.int64)
        take: Callable[[int], None]
        if arm in RINGS:
            net, optimizer = backend.prepare(model, optimizer)

            def take(steps: int) -> None:
                for _ in range(steps):
                    with backend.gradients(optimizer):
                        loss = nn.functional.cross_entropy(net(inputs), labels)
                        loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()

        elif backend.world.rank == parameter_server.SERVER:
            server = parameter_server.Server(model, optimizer, backend.world.size - 1)

            def take(steps: int) -> None:
                server.serve(SERVERS[arm], steps)

        else:

            def take(steps: int) -> None:
                parameter_server.work(model, repeat((inputs, labels)), steps, lambda *_: None)

        take(WARM_STEPS)
        backend.barrier()
        sent, received, begin = *link_bytes(), time.monotonic()
        take(STEPS)
        backend.barrier()
        seconds, after = time.monotonic() - begin, link_bytes()
    return {
        "seconds": seconds / STEPS,
        "sent": (after[0] - sent) / STEPS / MODEL_BYTES,
        "received": (after[1] - received) / STEPS / MODEL_BYTES,
    }


def run(arm: str, workers: int, hosts: list[str], port: int) -> list[dict[str, float]]:
    """Start a rank on each host; return what each measured."""
    n = workers + (arm in SERVERS)
    alone = arm == "ddp/shm"
    address = "127.0.0.1" if alone else "10.77.0.1"
    env = {**os.environ, "WORLD_SIZE": str(n), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    processes = []
    for rank in range(n):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank if alone else 0)}
        place["LOCAL_WORLD_SIZE"] = str(n if alone else 1)
        inside = [] if alone else ["ip", "netns", "exec", hosts[rank]]
        command = [*inside, sys.executable, __file__, "--worker", arm]
        processes.append(
            subprocess.Popen(command, env={**env, **place}, stdout=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    codes = [process.returncode for process in processes]
    if any(codes):
        sys.exit(f"{arm}, {workers} workers: exit codes {codes}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def show(found: dict[str, Any]) -> dict[str, Any]:
    """Print the table of some runs, and return its rows by name."""
    rows = {}
    print(f"{'K sent and received by':32}{'rank 0':>18}{'each other rank':>18}{'ms a step':>22}")
    for name, rounds in found.items():
        first, others = [r[0] for r in rounds], [r for ranks in rounds for r in ranks[1:]]
        sizes = []
        rows[name] = {"ms": [1000 * r["seconds"] for r in first]}
        for who, its in (("rank 0", first), ("each other rank", others)):
            both = [statistics.median(r[way] for r in its) for way in ("sent", "received")]
            rows[name][f"K sent and received by {who}"] = both
            sizes.append(f"{both[0]:.2f}, {both[1]:.2f}")
        times = sorted(1000 * r["seconds"] for r in first)
        spread = f"{statistics.median(times):.0f} [{times[0]:.0f}, {times[-1]:.0f}]"
        print(f"{name:32}{sizes[0]:>18}{sizes[1]:>18}{spread:>22}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args.worker)))
        return
    found: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    port = 29700
    for workers in WORKERS:
        with running_hosts(workers + 1, RATE_MBIT) as hosts:
            order = [arm for _ in range(args.rounds) for arm in random.sample(ARMS, len(ARMS))]
            for arm in order:
                port += 1
                name = f"{arm}, {workers} workers"
                found.setdefault(name, []).append(run(arm, workers, hosts.names, port))
        rows |= show(
            {name: runs for name, runs in found.items() if name.endswith(f" {workers} workers")}
        )
    about = {"rate_mbit": RATE_MBIT, "model_bytes": MODEL_BYTES, "steps": STEPS}
    live.write_summary(RESULTS, {**about, "runs": rows})


if __name__ == "__main__":
    main()
