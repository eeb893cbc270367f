"""The CPU load of other processes while something is timed, and the steal time of the host.

`hvdtrain compare` drops blocks with too much of it. The kernel counts in ticks of 10 ms, so a
window is off by a few ticks; `LoadMeter` states the error.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import psutil

_MIN_MOVING_S = 0.05  # counters that did not move in this much own CPU time never do


@dataclass(frozen=True)
class Load:
    """Shares of our cores' time in a window, 0 to 1. None: the machine does not report them."""

    foreign: float | None = None
    steal: float | None = None


class LoadMeter:
    """Measures the load of others on some cores, from its creation to `stop`.

    Our own are this process and what is given to `add`. Others are counted only on `cores`, those
    that this job may use: what runs on the rest of a shared node takes nothing from them.

    A window of 0.3 s on two cores is 60 ticks in all. Five counters of each core are truncated to
    whole ticks at both ends, and the kernel may sample the running process only at timer ticks.
    Compared with the nanosecond counters of all processes, on two saturated cores, the foreign
    share was within 7 % of the cores nine times in ten, at worst 16 %; in windows of 1 s it was
    within 2 %. That is good enough for a limit of 50 %, not for one of 5 %. Interrupts and the
    kernel's network threads belong to no process and count as foreign: our own TCP causes some.
    """

    def __init__(self, cores: Collection[int]) -> None:
        self._cores = cores
        self._own_s = -time.process_time()
        self._is_known = True
        self._began = time.monotonic()
        self._begin = self._counters()

    def add(self, own_s: float | None) -> None:
        """Add CPU seconds of our other processes. None: they are unknown, as of one that failed."""
        self._is_known &= own_s is not None
        self._own_s += own_s or 0.0

    def stop(self) -> Load:
        """Return the load of others since the creation; unknown if our own time is."""
        whole_s = (time.monotonic() - self._began) * len(self._cores)
        own_s, end = self._own_s + time.process_time(), self._counters()
        if self._begin is None or end is None or not self._is_known or whole_s <= 0:
            return Load()
        busy_s, steal_s = (after - before for after, before in zip(end, self._begin, strict=True))
        if not busy_s and own_s > _MIN_MOVING_S:
            return Load()
        return Load(*(min(max(s / whole_s, 0.0), 1.0) for s in (busy_s - own_s, steal_s)))

    def _counters(self) -> tuple[float, float] | None:
        """Return the busy and the stolen seconds of the cores together since the machine started.
        None if some have no counters, as where a container numbers its cores anew, or if all are
        zero, as in some sandboxes.
        """
        try:
            every = psutil.cpu_times(percpu=True)
            found = [every[core] for core in self._cores]
            busy = sum(t.user + t.nice + t.system + t.irq + t.softirq for t in found)
            return (busy, sum(t.steal for t in found)) if any(map(any, found)) else None
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            return None
