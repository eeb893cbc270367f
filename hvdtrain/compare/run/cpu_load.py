"""The CPU load of other processes while an arm is timed, and the steal time of the host.

`block_timer` measures it, and drops blocks with too much of it. /proc/stat counts in ticks of
10 ms, so a window is off by a few ticks; `LoadMeter` states the error.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.compare.formatting import tell_apart

PROC_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq; guests are within user
_STEAL = 7
_MIN_MOVING_S = 0.05  # counters that did not move in this much own CPU time never do


@dataclass(frozen=True)
class Load:
    """Shares of all cores' time in a window, 0 to 1. None: the machine does not report them."""

    foreign: float | None
    steal: float | None


@dataclass(frozen=True)
class _Counters:
    at_s: float  # monotonic clock
    busy: int  # clock ticks of all cores since the machine started
    steal: int
    cores: int


class LoadMeter:
    """Measures windows one after another: `start`, the window, `stop`.

    A window of 0.3 s on two cores is 60 ticks in all. Five counters are truncated to whole ticks at
    both ends, and the kernel may sample the running process only at timer ticks. Compared with the
    nanosecond counters of all processes, on two saturated cores, the foreign share was within 7 %
    of the cores nine times in ten, at worst 16 %; in windows of 1 s it was within 2 %. That is good
    enough for a limit of 50 %, not for one of 5 %. Interrupts and the kernel's network threads
    belong to no process and count as foreign: an arm over TCP causes some of it.
    """

    def __init__(self, path: Path = PROC_STAT) -> None:
        self._path = path
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._begin: _Counters | None = None

    def start(self) -> None:
        """Begin a window, and discard the previous one."""
        self._begin = self._read_counters()

    def stop(self, own_cpu_s: float) -> Load:
        """End the window, in which our own processes used `own_cpu_s` CPU seconds together.

        They include the calling process, if it did anything in the window.
        """
        begin, end = self._begin, self._read_counters()
        if begin is None or end is None:
            return Load(None, None)
        if end.busy == begin.busy and own_cpu_s > _MIN_MOVING_S:
            return Load(None, None)
        whole = (end.at_s - begin.at_s) * end.cores
        foreign = (end.busy - begin.busy) / self._ticks_per_s - own_cpu_s
        return Load(
            _share(foreign, whole), _share((end.steal - begin.steal) / self._ticks_per_s, whole)
        )

    def _read_counters(self) -> _Counters | None:
        """Return the counters; None if they are missing, or all zero as in some sandboxes."""
        try:
            lines = self._path.read_text().splitlines()
            at_s = time.monotonic()
            counters = [int(field) for field in lines[0].removeprefix("cpu ").split()]
        except (OSError, ValueError, IndexError):
            return None
        cores = sum(line.startswith("cpu") and line[3:4].isdigit() for line in lines)
        if not cores or not any(counters) or len(counters) <= _STEAL:
            return None
        return _Counters(at_s, sum(counters[i] for i in _BUSY), counters[_STEAL], cores)


def _share(seconds: float, whole: float) -> float | None:
    return min(max(seconds / whole, 0.0), 1.0) if whole > 0 else None


def load_average() -> list[float] | None:
    """Return the load average over 1, 5 and 15 minutes; None if the system has none."""
    try:
        return list(os.getloadavg())
    except (OSError, AttributeError):
        return None


def too_busy(load: Load, limit: float) -> str | None:
    """Return why a block with this load is dropped, or None. `limit`: a share of all cores."""
    share = (load.foreign or 0.0) + (load.steal or 0.0)
    if share <= limit or limit >= 1:
        return None
    stolen = f", {100 * load.steal:.0f} % of it the host" if load.steal else ""
    shares = tell_apart(100 * share, 100 * limit, 0, "f")
    return f"others took {shares[0]} % of the cores{stolen} (limit {shares[1]} %)"
