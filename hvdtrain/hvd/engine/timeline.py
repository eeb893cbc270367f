"""The timeline: the events of each tensor's operations, as a Chrome trace. Written by rank 0.

The file is a complete JSON document after every event, so it can be read while the program runs,
and after it was killed (except for a kill -9 within a write that crosses the end of a page, which
may cut the last event). Each event overwrites the closing bracket and writes it again after itself,
in one write. Blanks follow the bracket, and later events overwrite them: a reader that needs
several reads, as most do, gets a complete document as long as the file's size stays the same. A
reader that coincides with a write, which takes microseconds, has to read again. `close` cuts the
blanks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time

_LOG = logging.getLogger("hvdtrain")

_CLOSING = b"\n]\n"
# The end of a gradient's name: see `Reducer._bind`.
_OF_OPTIMIZER = re.compile(r"@[^@]*\.[0-9a-f]{8}\.\d+\.\d+(?=$|\.indices$|\.values$)")
_BLANKS = 1 << 16  # bytes of blanks that the file grows by


class Timeline:
    """A trace file, or none: with `path=None` or an unwritable path every call does nothing.

    Thread safe. Never raises: a failure is logged as a warning, and ends the trace. A tensor's name
    is a process of the trace. An operation consists of the negotiation (NEGOTIATE_ALLREDUCE, with
    an event for every rank that is ready), then of ALLREDUCE with its activities inside.
    """

    def __init__(self, path: str | None = None, mark_cycles: bool = False) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        if path is not None:
            self.open(path, mark_cycles)

    @property
    def is_open(self) -> bool:
        """Whether events are written."""
        return self._fd >= 0

    def open(self, path: str, mark_cycles: bool = False) -> None:
        """Begin a new file, overwriting an existing one. Ends a trace that is being written."""
        self.close()
        with self._lock:
            self._path = path
            self._mark_cycles = mark_cycles
            self._pids: dict[str, int] = {}
            self._depth: dict[str, int] = {}
            self._latest_us: dict[int, int] = {}  # the time of each row's latest event
            self._begin_us = time.monotonic_ns() // 1000
            self._end = self._allocated = 0
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._fd = os.open(path, flags, 0o644)
            except OSError as error:
                _LOG.warning("no timeline: %s", error)
                return
            epoch_us = time.time_ns() // 1000
            self._put(_metadata(0, "process_name", "start_time_since_epoch_in_micros", epoch_us))

    def close(self) -> None:
        """End the open events and the file. Later events are not written."""
        with self._lock:
            if self._fd < 0:
                return
            for name in list(self._depth):
                self._close_all(name)
            if self._fd >= 0:  # else writing has failed
                self._close_file()

    def begin(self, name: str, what: str) -> None:
        """Record the start of the negotiation of an operation, with the first rank's request; of
        the operation; or of an activity inside, such as GLOO_ALLREDUCE.
        """
        if self._fd >= 0:
            with self._lock:
                self._put(self._event("B", name, what))
                self._depth[name] = self._depth.get(name, 0) + 1

    def negotiate_rank_ready(self, name: str, rank: int) -> None:
        """Record a rank's request for the operation."""
        if self._fd >= 0:
            with self._lock:
                self._put(self._event("X", name, str(rank), ', "dur": 0'))

    def negotiate_end(self, name: str) -> None:
        """Record that all ranks have requested the operation."""
        # The depth is 0 if the trace began during the negotiation.
        if self._fd >= 0:
            with self._lock:
                if depth := self._depth.get(name, 0):
                    self._put(self._event("E", name))
                    self._depth[name] = depth - 1

    def end(self, name: str) -> None:
        """Record the end of the operation, done or failed, and of its open events."""
        if self._fd >= 0:
            with self._lock:
                self._close_all(name)

    def bucket(
        self, names: list[str], ready_us: dict[int, int], begin_us: int, activity: str
    ) -> None:
        """Record the allreduces of a bucket's gradients, which have ended now.

        `ready_us`: when each rank has begun the step, by `now_us`: the negotiation. `begin_us`:
        when this rank has sent the bucket.
        """
        if self._fd < 0 or not ready_us:
            return
        with self._lock:
            end = self.now_us()
            all_ready = min(max(ready_us.values()), end)
            for name in names:
                self._put(self._event("B", name, "NEGOTIATE_ALLREDUCE", at=min(ready_us.values())))
                for rank, at in sorted(ready_us.items()):
                    self._put(self._event("X", name, str(rank), ', "dur": 0', at))
                self._put(self._event("E", name, at=all_ready))
                for what in ("ALLREDUCE", activity):
                    self._put(self._event("B", name, what, at=max(begin_us, all_ready)))
                for _ in range(2):
                    self._put(self._event("E", name, at=end))

    def cycle(self) -> None:
        """Record the start of a round of negotiation, if cycles are to be marked."""
        if self._fd >= 0 and self._mark_cycles:
            with self._lock:
                ts = self.now_us()
                self._put(f'{{"ph": "i", "name": "CYCLE_START", "ts": {ts}, "pid": 0, "s": "g"}}')

    def _close_all(self, name: str) -> None:
        """End the open events of an operation. The lock is held."""
        for _ in range(self._depth.pop(name, 0)):
            self._put(self._event("E", name))

    def _event(
        self,
        phase: str,
        tensor: str,
        what: str | None = None,
        more: str = "",
        at: int | None = None,
    ) -> str:
        """Return one event of a tensor, now or at another time of `now_us`."""
        # An optimizer's own gradients are named by it as well, where they are matched by name.
        tensor = _OF_OPTIMIZER.sub("", tensor)
        pid = self._pids.get(tensor) or self._introduce(tensor)
        label = f'"name": {json.dumps(what)}, ' if what is not None else ""
        ts = self.now_us() if at is None else max(at, self._latest_us.get(pid, 0))
        self._latest_us[pid] = ts  # a fast rank is ready for a step before the one before has ended
        return f'{{"ph": "{phase}", {label}"ts": {ts}, "pid": {pid}{more}}}'

    def _introduce(self, tensor: str) -> int:
        pid = self._pids[tensor] = len(self._pids) + 1
        self._put(_metadata(pid, "process_name", "name", tensor))
        self._put(_metadata(pid, "process_sort_index", "sort_index", pid))
        return pid

    def now_us(self) -> int:
        """Return the microseconds since the trace began; it must be open."""
        return time.monotonic_ns() // 1000 - self._begin_us

    def _put(self, event: str) -> None:
        """Write one event. The lock is held."""
        if self._fd < 0:
            return
        lead = ",\n" if self._end else "[\n"
        data = lead.encode() + event.encode()
        end = self._end + len(data)
        data += _CLOSING
        if end + len(_CLOSING) > self._allocated:  # grow the file by blanks, in this same write
            self._allocated = end + _BLANKS
            data += b" " * (self._allocated - end - len(_CLOSING))
        try:
            if os.pwrite(self._fd, data, self._end) < len(data):
                raise OSError("the disk is full")
        except OSError as error:
            _LOG.warning("the timeline %s ends early: %s", self._path, error)
            self._close_file()
        self._end = end

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.pwrite(fd, _CLOSING, self._end)
            os.ftruncate(fd, self._end + len(_CLOSING))
        with contextlib.suppress(OSError):
            os.close(fd)


def _metadata(pid: int, what: str, key: str, value: str | int) -> str:
    args = json.dumps({key: value})
    return f'{{"name": "{what}", "ph": "M", "pid": {pid}, "args": {args}}}'
