"""`host_sharded.py BACKEND TRANSPORT FOLDER`: train and resume, with and without sharding.

Rank 0 prints the digests of all runs, and how many ranks of each host share the parameters.
"""

import sys
from pathlib import Path

from hvdtrain import BackendOptions, open_backend
from tests.methods.test_sharded_training import resumed


def main() -> None:
    name, transport, folder = sys.argv[1:]
    with open_backend(name, options=BackendOptions(timeout_s=60, transport=transport)) as backend:
        found = resumed(backend, Path(folder))
        if backend.world.rank == 0:
            print(f"trained {len(found)} times to {len(set(found.values()))} digest: {found}")
            print(f"ranks by host {backend.optimizer_shares}")


if __name__ == "__main__":
    main()
