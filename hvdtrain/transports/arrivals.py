"""When ranks arrive at collectives: recorded by the transports `shm` and `mpi`, while switched on.

`hvdtrain.training.callbacks.stragglers` reads it. An all-reduce makes the steps of all ranks
equally long, so only the time for which each rank waits for the others shows who is late. Every
operation of these transports begins with a comparison of calls, which ends when the last rank has
arrived:

    queued              begins            all have arrived          ends
      |-- other operations --|-- wait for ranks --|-- move the bytes --|

Gloo, NCCL and real Horovod do not show when the last rank arrives.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar

RECORDING_TRANSPORTS = ("shm", "mpi")
"""The transports that record arrivals."""

_LIMIT = 100_000  # the most operations kept between two calls of `take`

Interval = tuple[float, float]
"""Begin and end, by time.monotonic()."""


class Arrivals:
    """The operations of this process since the last `take`, of all process groups."""

    current: ClassVar[Arrivals | None] = None
    """What the transports record into; None: nothing is recorded."""

    def __init__(self) -> None:
        self._operations: deque[tuple[float, float, bool]] = deque(maxlen=_LIMIT)
        self._waits: deque[Interval] = deque(maxlen=_LIMIT)

    def timed(self, run: Callable[[], None], is_awaited: bool) -> Callable[[], None]:
        """Return `run`, an operation that is queued now, so that it records its end.

        `is_awaited`: the caller does nothing else until then.
        """
        queued = time.monotonic()

        @functools.wraps(run)  # a work queue names the collective by its function
        def timed() -> None:
            run()
            self._operations.append((queued, time.monotonic(), is_awaited))

        return timed

    def add_wait(self, begin: float) -> None:
        """Record that this rank has waited for others from `begin` until now."""
        self._waits.append((begin, time.monotonic()))

    def take(self) -> tuple[list[Interval], list[Interval]]:
        """Return the intervals in which the training thread only waited for operations, and those
        in which operations waited for other ranks; then drop both.

        The thread goes on computing after it has queued an operation of the backward pass, until
        the last one: from then on it waits for all of them.
        """
        operations, self._operations = self._operations, deque(maxlen=_LIMIT)
        waits, self._waits = self._waits, deque(maxlen=_LIMIT)
        blocked = [(queued, end) for queued, end, is_awaited in operations if is_awaited]
        queued = [(queued, end) for queued, end, is_awaited in operations if not is_awaited]
        if queued:
            blocked.append((max(at for at, _ in queued), max(end for _, end in queued)))
        return _union(blocked), list(waits)


def overlap(intervals: list[Interval], begin: float, end: float) -> float:
    """Return the seconds of disjoint `intervals` that lie between `begin` and `end`."""
    return sum(max(0.0, min(end, to) - max(begin, at)) for at, to in intervals)


def _union(intervals: list[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same time."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
