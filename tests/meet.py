"""One process of a rendezvous: opens the store, gives a value and reads everybody's.

`python -m tests.meet TIMEOUT_S VALUE [TIMES]` prints one line of JSON: what it read, or the error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.rendezvous import open_store
from hvdtrain.world import detect


def main() -> None:
    timeout_s, value, *times = sys.argv[1:]
    world = detect()
    _wait_at_gate()
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
        if world.rank > 0:
            store.set(f"left/{world.rank}", "")  # waits for no answer
        else:
            left = [f"left/{rank}" for rank in range(1, world.size)]
            store.wait(left, timedelta(seconds=20))
    except HvdtrainError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["seconds"] = time.monotonic() - begin
    # One write: print makes two where Python does not buffer, and another rank's between them.
    os.write(1, f"{json.dumps(answer)}\n".encode())


def _wait_at_gate(timeout_s: float = 40) -> None:
    """Wait for the processes of the same test, whose imports of torch take how long they will.

    TEST_GATE is an empty folder and their number.
    """
    folder, _, processes = os.environ.get("TEST_GATE", "").rpartition(":")
    deadline = time.monotonic() + timeout_s
    if folder:
        (Path(folder) / str(os.getpid())).touch()
        while len(os.listdir(folder)) < int(processes) and time.monotonic() < deadline:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
