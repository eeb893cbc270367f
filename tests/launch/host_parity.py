"""`host_parity.py BACKEND TRANSPORT FOLDER`: train on every rank; rank 0 saves the parameters."""

import sys
from pathlib import Path

import torch

from hvdtrain import BackendOptions, open_backend
from tests.parity.reference import Case
from tests.parity.trained import train

# 200 samples in micro-batches of 16 over all ranks are 12 of them, at 1, 2 and 4 ranks.
CASE = Case(global_batch_size=32)


def main() -> None:
    name, transport, folder = sys.argv[1:]
    with open_backend(name, options=BackendOptions(timeout_s=60, transport=transport)) as backend:
        for precision in ("fp32", "fp64"):
            state = train(backend, CASE, precision, Path(folder, precision))
            if backend.world.rank == 0:
                torch.save(state, Path(folder, f"{precision}.pt"))
        if backend.world.rank == 0:
            print(f"trained {backend.world.size} {backend.world.cross_size} {backend.transport}")


if __name__ == "__main__":
    main()
