"""The CPU load of other processes while an arm is timed, and the steal time of the host.

`block_timer` measures it, and drops blocks with too much of it. /proc/stat counts in ticks of
10 ms, so a window is off by a few ticks; `LoadMeter` states the error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.compare.formatting import tell_apart
from hvdtrain.compare.run.messages import StepTimes

PROC_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq; guests are within user
_STEAL = 7
_MIN_MOVING_S = 0.05  # counters that did not move in this much own CPU time never do


@dataclass(frozen=True)
class Load:
    """Shares of our cores' time in a window, 0 to 1. None: the machine does not report them."""

    foreign: float | None
    steal: float | None


@dataclass(frozen=True)
class _Counters:
    at_s: float  # monotonic clock
    busy: int  # clock ticks of the cores since the machine started
    steal: int


class LoadMeter:
    """Measures the load of others on some cores, from its creation to `stop`.

    Our own are this process and the ranks whose times are given to `add`. Others are counted only
    on `cores`, those that this job may use: what runs on the rest of a shared node takes nothing
    from the arms.

    A window of 0.3 s on two cores is 60 ticks in all. Five counters of each core are truncated to
    whole ticks at both ends, and the kernel may sample the running process only at timer ticks.
    Compared with the nanosecond counters of all processes, on two saturated cores, the foreign
    share from the line of all cores was within 7 % of the cores nine times in ten, at worst 16 %;
    in windows of 1 s it was within 2 %. The sum of the lines of two cores differs from that line by
    2 % (standard deviation; 5 % at most of 150 windows of 0.3 s). That is good enough for a limit
    of 50 %, not for one of 5 %. Interrupts and the kernel's network threads belong to no process
    and count as foreign: an arm over TCP causes some of it.
    """

    def __init__(self, cores: Collection[int], path: Path = PROC_STAT) -> None:
        self._cores, self._path = cores, path
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._own_s: float | None = -time.process_time()
        self._begin = self._read_counters()

    def add(self, ranks: Iterable[StepTimes] | None) -> None:
        """Add the CPU time of an arm's ranks. None: the arm failed, so that it is unknown."""
        if ranks is None or self._own_s is None:
            self._own_s = None
        else:
            self._own_s += sum(rank.whole_cpu_s for rank in ranks)

    def stop(self) -> Load:
        """Return the load of others since the creation; unknown if an arm failed meanwhile."""
        begin, end = self._begin, self._read_counters()
        if begin is None or end is None or self._own_s is None:
            return Load(None, None)
        own_s = self._own_s + time.process_time()
        if end.busy == begin.busy and own_s > _MIN_MOVING_S:
            return Load(None, None)
        whole_s = (end.at_s - begin.at_s) * len(self._cores)
        foreign_s = (end.busy - begin.busy) / self._ticks_per_s - own_s
        steal_s = (end.steal - begin.steal) / self._ticks_per_s
        return Load(_share(foreign_s, whole_s), _share(steal_s, whole_s))

    def _read_counters(self) -> _Counters | None:
        """Return the counters of the cores together. None if some have none, as where a container
        numbers its cores anew, or if all are zero, as in some sandboxes.
        """
        try:
            lines = self._path.read_text().splitlines()
            at_s = time.monotonic()
            by_name = {words[0]: words[1:] for line in lines if (words := line.split())}
            counters = [[int(n) for n in by_name[f"cpu{core}"]] for core in self._cores]
            steal = sum(core[_STEAL] for core in counters)
        except (OSError, ValueError, LookupError):
            return None
        busy = sum(core[i] for core in counters for i in _BUSY)
        return _Counters(at_s, busy, steal) if any(map(any, counters)) else None


def _share(seconds: float, whole: float) -> float | None:
    return min(max(seconds / whole, 0.0), 1.0) if whole > 0 else None


def too_busy(load: Load, limit: float) -> str | None:
    """Return why a block with this load is dropped, or None. `limit`: a share of our cores."""
    share = (load.foreign or 0.0) + (load.steal or 0.0)
    if share <= limit or limit >= 1:
        return None
    stolen = f", {100 * load.steal:.0f} % of it the host" if load.steal else ""
    shares = tell_apart(100 * share, 100 * limit, 0, "f")
    return f"others took {shares[0]} % of the cores{stolen} (limit {shares[1]} %)"
