"""Bytes at each rank's link, and time of a step: a parameter server beside a ring all-reduce.

    sudo python benchmarks/parameter_server.py       # Linux, root: makes network namespaces

Every rank is a host of its own: a network namespace on a bridge, whose link has a limited rate in
both directions (tc tbf). The kernel counts the bytes of each link. The model has K = 1 MiB of
gradients. Prediction, in each direction and step, for N ranks: the server K (N - 1), each worker K;
sharded servers and the ring 2 K (N - 1) / N at every rank. Beside them, on one host without a
network: this project's shared memory.

    python benchmarks/parameter_server.py --accuracy

Two ranks of the digits, five seeds. Prediction: asynchronous training ends within one per cent of
the accuracy of synchronous training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import live
from benchmarks.namespaces import link_bytes, make_hosts, remove_hosts

RESULTS = Path(__file__).parent / "results" / "parameter_server.json"
ARMS: dict[str, dict[str, Any]] = {
    "ps": {"backend": "ps"},
    "ps, sharded": {"backend": "ps", "ps_servers": "all"},
    "ps, asynchronous": {"backend": "ps", "ps_async": True},
    "ddp/gloo": {"backend": "ddp", "transport": "gloo"},
    "ddp/shm": {"backend": "ddp", "transport": "shm"},
}
SIZES = (2, 4, 8)
STEPS = 10
RATE_MBIT = 200
MODEL_BYTES = 1 << 20


def work(arm: str) -> dict[str, float]:
    """Train in one rank; return seconds and bytes of a step."""
    import torch
    from torch import nn

    from hvdtrain import BackendOptions, open_backend

    torch.set_num_threads(1)
    options = dict(ARMS[arm])
    name = options.pop("backend")
    with open_backend(name, options=BackendOptions(device="cpu", **options)) as backend:
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        net, optimizer = backend.prepare(model, optimizer, "share")
        batch = torch.randn(4, 128)

        def step() -> None:
            with backend.gradients(optimizer):
                net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        backend.barrier()
        sent, received, begin = *link_bytes(), time.monotonic()
        for _ in range(STEPS):
            step()
        backend.barrier()
        seconds, after = time.monotonic() - begin, link_bytes()
    return {
        "seconds": seconds / STEPS,
        "sent": (after[0] - sent) / STEPS / MODEL_BYTES,
        "received": (after[1] - received) / STEPS / MODEL_BYTES,
    }


def run(arm: str, n: int, hosts: list[str], port: int) -> list[dict[str, float]]:
    """Start a rank on each host; return what each measured."""
    alone = ARMS[arm].get("transport") == "shm"
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
        sys.exit(f"{arm}, {n} ranks: exit codes {codes}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def accuracy(is_async: bool, seed: int) -> float:
    """Train the digits on two ranks; return the accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        line += ["-m", "hvdtrain", "--backend", "ps", "--seed", str(seed), "--threads", "1"]
        line += ["--run-dir", f"{folder}/run", *["--ps-async"] * is_async]
        subprocess.run(line, check=True, capture_output=True)
        about = json.loads(Path(folder, "run", "run.json").read_text())
    return float(about["metrics"]["accuracy"])


def show(found: dict[str, Any]) -> dict[str, Any]:
    """Print the table of some runs, and return its rows by name."""
    rows = {}
    print(f"{'K sent and received by':24}{'rank 0':>18}{'each other rank':>18}{'ms a step':>22}")
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
        print(f"{name:24}{sizes[0]:>18}{sizes[1]:>18}{spread:>22}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accuracy", action="store_true")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args.worker)))
        return
    if args.accuracy:
        for mode in (False, True):
            values = [accuracy(mode, seed) for seed in range(5)]
            print(f"{'a' * mode}synchronous: {statistics.fmean(values):.4f} of {values}")
        return
    found: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    port = 29700
    for n in SIZES:
        hosts: list[str] = []
        try:
            hosts = make_hosts(n, RATE_MBIT)
            order = [
                arm for _ in range(args.rounds) for arm in random.sample(list(ARMS), len(ARMS))
            ]
            for arm in order:
                port += 1
                found.setdefault(f"{arm}, {n} ranks", []).append(run(arm, n, hosts, port))
        finally:
            remove_hosts(n)
        rows |= show({name: runs for name, runs in found.items() if name.endswith(f" {n} ranks")})
    about = {"rate_mbit": RATE_MBIT, "model_bytes": MODEL_BYTES}
    live.write_summary(RESULTS, {**about, "runs": rows})


if __name__ == "__main__":
    main()
