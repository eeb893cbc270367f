"""One process of a rendezvous: opens the store, gives a value and reads everybody's.

`python -m tests.meet TIMEOUT_S VALUE [TIMES]` prints one line of JSON: what it read, or the error.
"""

from __future__ import annotations

import json
import sys
import time

from hvdtrain.errors import HvdtrainError
from hvdtrain.rendezvous import open_store
from hvdtrain.world import detect


def main() -> None:
    timeout_s, value, *times = sys.argv[1:]
    world = detect()
    begin = time.monotonic()
    answer: dict[str, object] = {"rank": world.rank}
    try:
        stores = []  # kept, as a process group keeps its own
        for meeting in range(int(times[0]) if times else 1):
            store = open_store(world, float(timeout_s))
            stores.append(store)
            store.set(f"value/{world.rank}", f"{value}{meeting}")
            read = [store.get(f"value/{rank}").decode() for rank in range(world.size)]
            store.add("done", 1)
            while store.add("done", 0) < world.size:  # rank 0 serves until all have read
                time.sleep(0.01)
        answer["read"] = read
        if world.rank == 0:
            time.sleep(0.3)  # for the others' last look at `done`
    except HvdtrainError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["seconds"] = time.monotonic() - begin
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
