"""The timeline: the phases of each tensor's operations, as a Chrome trace. Written by rank 0.

The coordinator records when ranks have requested an operation, the executor and the bucket channels
when it has run; each phase is written once it has ended. The file is a complete JSON document after
every phase, so it can be read while the program runs, and after it was killed (except for a kill -9
within a write that crosses the end of a page): each write overwrites the closing bracket, and
writes it again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

_LOG = logging.getLogger("hvdtrain")

_CLOSING = b"\n]\n"
# The end of a gradient's name: see `Reducer._bind`.
_OF_OPTIMIZER = re.compile(r"@[^@]*\.[0-9a-f]{8}\.\d+\.\d+(?=$|\.indices$|\.values$)")
Event = tuple[str, int, dict[str, Any]]  # Chrome's phase, the time, and the other fields


class Timeline:
    """A trace file, or none: with `path=None` or an unwritable path every call does nothing.

    Thread safe. Never raises: a failure is logged as a warning, and ends the trace. A tensor's name
    is a process of the trace. An operation consists of the negotiation (NEGOTIATE_ALLREDUCE, with
    an event for every rank that is ready), then of ALLREDUCE with its activities inside.
    """

    def __init__(self, path: str | None = None, mark_cycles: bool = False) -> None:
        self._path = path
        self._mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._pids = {"": 0}
        self._latest_us: dict[int, int] = {}  # the time of each row's latest event
        self._begin_us = self.now_us()
        self._end = 0  # of the file, without the closing bracket
        self._fd = -1
        if path is not None:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._fd = os.open(path, flags, 0o644)
            except OSError as error:
                _LOG.warning("no timeline: %s", error)
            start = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._record("", [_metadata("process_name", start)])

    @property
    def is_open(self) -> bool:
        """Whether events are written."""
        return self._fd >= 0

    def now_us(self) -> int:
        """Return the time in microseconds, from an arbitrary start."""
        return time.monotonic_ns() // 1000

    def close(self) -> None:
        """End the file. Later events are not written."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def negotiated(self, name: str, kind: str, ready_us: Mapping[int, int]) -> None:
        """Record an operation's negotiation. `ready_us`: when each rank has requested it."""
        if ready_us and self.is_open:
            ranks = sorted(ready_us.items(), key=itemgetter(1))
            ready: list[Event] = [("X", at, {"name": str(rank), "dur": 0}) for rank, at in ranks]
            label = {"name": f"NEGOTIATE_{kind.upper()}"}
            self._record(name, [("B", ranks[0][1], label), *ready, ("E", ranks[-1][1], {})])

    def ran(self, name: str, labels: Sequence[str], begin_us: int) -> None:
        """Record that an operation has run until now: its kind, and its activity inside."""
        if self.is_open:
            begins: list[Event] = [("B", begin_us, {"name": label}) for label in labels]
            self._record(name, begins + [("E", self.now_us(), {})] * len(labels))

    def cycle(self) -> None:
        """Record the start of a round of negotiation, if cycles are to be marked."""
        if self._mark_cycles:
            self._record("", [("i", self.now_us(), {"name": "CYCLE_START", "s": "g"})])

    def _record(self, tensor: str, events: list[Event]) -> None:
        # An optimizer's own gradients are named by it as well, where they are matched by name.
        tensor = _OF_OPTIMIZER.sub("", tensor)
        with self._lock:
            if tensor not in self._pids:
                pid = self._pids[tensor] = len(self._pids)
                order = _metadata("process_sort_index", {"sort_index": pid})
                events = [_metadata("process_name", {"name": tensor}), order, *events]
            pid, texts = self._pids[tensor], []
            for phase, at_us, fields in events:
                # Not before the latest: a fast rank begins a step before the one before has ended.
                ts = self._latest_us[pid] = max(at_us - self._begin_us, self._latest_us.get(pid, 0))
                texts.append(json.dumps({"ph": phase, "ts": ts, "pid": pid, **fields}))
            if self._fd >= 0:
                self._write((",\n" if self._end else "[\n") + ",\n".join(texts))

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            if os.pwrite(self._fd, data + _CLOSING, self._end) < len(data + _CLOSING):
                raise OSError("the disk is full")
            self._end += len(data)
        except OSError as error:
            _LOG.warning("the timeline %s ends early: %s", self._path, error)
            with suppress(OSError):
                os.pwrite(self._fd, _CLOSING, self._end)
                os.ftruncate(self._fd, self._end + len(_CLOSING))
            os.close(self._fd)
            self._fd = -1


def _metadata(what: str, args: dict[str, Any]) -> Event:
    return "M", 0, {"name": what, "args": args}
