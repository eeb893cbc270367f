"""`host_training.py WHAT BACKEND TRANSPORT FOLDER`: train on the ranks of hosts; see test_hosts.py.

`parity`: rank 0 saves the parameters. `sharded`: train and resume, with and without sharding; rank
0 prints the digests of all runs, and how many ranks of each host share the parameters.
"""

import sys
from pathlib import Path

import torch

from hvdtrain import Backend, BackendOptions, open_backend
from tests.methods.test_sharded_training import resumed
from tests.parity.reference import Case
from tests.parity.trained import train

# 200 samples in micro-batches of 16 over all ranks are 12 of them, at 1, 2 and 4 ranks.
CASE = Case(global_batch_size=32)


def parity(backend: Backend, folder: Path) -> str:
    for precision in ("fp32", "fp64"):
        state = train(backend, CASE, precision, folder / precision)
        if backend.world.rank == 0:
            torch.save(state, folder / f"{precision}.pt")
    return f"trained {backend.world.size} {backend.world.cross_size} {backend.transport}"


def sharded(backend: Backend, folder: Path) -> str:
    found = resumed(backend, folder)
    digests = f"trained {len(found)} times to {len(set(found.values()))} digest: {found}"
    return f"{digests}\nranks by host {backend.optimizer_shares}"


def main() -> None:
    what, name, transport, folder = sys.argv[1:]
    with open_backend(name, options=BackendOptions(timeout_s=60, transport=transport)) as backend:
        backend.print({"parity": parity, "sharded": sharded}[what](backend, Path(folder)))


if __name__ == "__main__":
    main()
