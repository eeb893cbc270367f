"""One process of a rendezvous: opens the store, writes a value and reads those of all ranks.

`python -m tests.rendezvous_process TIMEOUT_S VALUE TIMES` prints one line of JSON: the values, or
the error.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

from hvdtrain.errors import HvdtrainError
from hvdtrain.job.rendezvous import complete_world, open_store
from hvdtrain.job.world import detect


def main() -> None:
    timeout_s, value, times = sys.argv[1:]
    world = detect()
    answer: dict[str, object] = {"rank": world.rank}
    try:
        world = complete_world(world, float(timeout_s))
        answer["place"] = [world.local_rank, world.local_size, world.cross_rank, world.cross_size]
        stores = []  # kept open, as a process group keeps its store
        for meeting in range(int(times)):
            store = open_store(world, float(timeout_s))
            stores.append(store)
            store.set(f"value/{world.rank}", f"{value}{meeting}")
            read = [store.get(f"value/{rank}").decode() for rank in range(world.size)]
        answer["read"] = read
        if world.rank > 0:
            store.set(f"left/{world.rank}", "")  # does not wait for an answer
        else:  # it serves until all have read
            left = [f"left/{rank}" for rank in range(1, world.size)]
            store.wait(left, timedelta(seconds=20))
    except HvdtrainError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    # One write(2): an unbuffered print makes two, and another rank may write between them.
    os.write(1, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main()
