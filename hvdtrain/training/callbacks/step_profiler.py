"""`--profile START:STEPS`: a callback that writes one Chrome trace of all ranks, for Perfetto.

    before the first step   all ranks meet in barriers, and note when they enter and leave
    in the steps            torch.profiler records operators (and GPU kernels); the collectives of
                            shm and mpi, and the calls of the backend, are recorded beside it
    after the last one      rank 0 gathers the events, corrects the clocks and writes `profile.json`

In the trace a process is a rank. Torch's profiler sees neither the worker threads of the transports
nor Horovod's thread: of Horovod, the trace has the time for which the main thread waits.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function

from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError
from hvdtrain.training.callback import Callback
from hvdtrain.transports import work_queue

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer

FILE = "profile.json"
_BARRIERS = 5
_CALLS = """average_gradients all_reduce broadcast_ broadcast_object all_gather_object
    barrier""".split()
"""The collective methods of a backend that steps may call."""
_OWN_TRACKS = 1 << 40  # above all ids of threads and CUDA streams

Event = dict[str, Any]


class StepProfiler(Callback):
    """Traces some steps on every rank."""

    def __init__(self, first: int, num: int) -> None:
        self._first, self._last = first, first + num - 1
        self._profile: profile | None = None
        self._is_over = False
        self._barriers: list[tuple[int, int]] = []
        """When this rank has entered and left each barrier, in ns."""
        self._events: list[Event] = []
        """What torch does not record, with times in ns."""
        self._tracks: dict[str, int] = {}
        self._step_began = 0

    def on_start(self, trainer: Trainer) -> None:
        """Start at once if the first step follows."""
        if trainer.progress.step >= self._first:
            self._is_over = True
            trainer.console.print_line(
                f"profile  not taken: the run continues after step {trainer.progress.step}, and "
                f"--profile begins with step {self._first}"
            )
        self._start_if_due(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        """Start before the first step, stop after the last one."""
        if self._profile is not None:
            now, step = time.time_ns(), trainer.progress.step
            self._add("steps", f"step {step}", self._step_began, now)
            self._step_began = now
            if step == self._last:
                self._finish(trainer)
        self._start_if_due(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Write the trace of the steps so far if the run ends before the last traced step."""
        if self._profile is not None:
            self._finish(trainer)
        elif not self._is_over:
            trainer.console.print_line(
                f"profile  not taken: the run has ended after step {trainer.progress.step}, and "
                f"--profile begins with step {self._first}"
            )

    def _start_if_due(self, trainer: Trainer) -> None:
        if self._is_over or self._profile is not None or trainer.progress.step + 1 != self._first:
            return
        for _ in range(_BARRIERS):
            entered = time.time_ns()
            trainer.backend.barrier()
            self._barriers.append((entered, time.time_ns()))
        activities = [ProfilerActivity.CPU]
        if trainer.backend.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        _record_calls(trainer.backend)
        work_queue.observer = self._observe
        self._step_began = time.time_ns()

    def _observe(
        self, queue: work_queue.WorkQueue, name: str, start: int, end: int, num_bytes: int
    ) -> None:
        self._add(f"{queue.name} {id(queue)}", name, start, end, {"bytes": num_bytes})

    def _add(self, track: str, name: str, start: int, end: int, args: Event | None = None) -> None:
        tid = self._tracks.setdefault(track, _OWN_TRACKS + len(self._tracks))
        event = {"ph": "X", "cat": "hvdtrain", "name": name, "tid": tid, "args": args or {}}
        self._events.append({**event, "start": start, "end": end})

    def _finish(self, trainer: Trainer) -> None:
        """Stop, and write the trace on rank 0. Collective."""
        assert self._profile is not None
        work_queue.observer = None
        for name in _CALLS:
            delattr(trainer.backend, name)
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            mine = {"trace": json.loads(file.read_bytes()), "pid": os.getpid()}
        self._profile, self._is_over = None, True
        mine |= {"events": self._events, "tracks": self._tracks, "barriers": self._barriers}
        packed = zlib.compress(json.dumps(mine).encode(), 1)
        everyone = trainer.backend.all_gather_object(packed)
        with trainer.backend.share_errors():
            if trainer.run_dir is not None:
                path = trainer.run_dir / FILE
                parts = [json.loads(zlib.decompress(one)) for one in everyone]
                names = [f"rank {k}" for k in range(len(parts))]
                for k, host in enumerate(trainer.backend.hosts):
                    names[k] += f" on {host}"
                try:
                    path.write_text(json.dumps(merge_traces(parts, names)))
                except OSError as error:
                    raise InputError(f"cannot write {path}: {error.strerror}") from None
                last = min(self._last, trainer.progress.step)
                trainer.console.print_line(
                    f"profile  steps {self._first} to {last} of {len(parts)} "
                    f"rank{'s' * (len(parts) > 1)}: {path}; open it at https://ui.perfetto.dev"
                )


def _record_calls(backend: Backend) -> None:
    """Record each call of a collective method of this backend as a range of the profiler.

    The attributes of the object hide the methods of its class; `_finish` deletes them.
    """

    def recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{backend.name}: {name}"):
                return method(*args, **kwargs)

        return call

    for name in _CALLS:
        setattr(backend, name, recorded(name, getattr(backend, name)))


def clock_offset(mine: Sequence[tuple[int, int]], first: Sequence[tuple[int, int]]) -> int:
    """Return by how many ns a rank's clock is ahead of rank 0's, from their times at barriers.

    No rank leaves a barrier before all have entered it, so each barrier gives two bounds. The
    offset is 0 if the bounds allow it, because ranks of one host share a clock.
    """
    low = max(entered - left for (entered, _), (_, left) in zip(mine, first, strict=True))
    high = min(left - entered for (_, left), (entered, _) in zip(mine, first, strict=True))
    return 0 if low <= 0 <= high else (low + high) // 2


def merge_traces(parts: Sequence[Event], names: Sequence[str]) -> Event:
    """Return one trace of what all ranks have recorded, with the times of rank 0's clock."""
    offsets = [clock_offset(part["barriers"], parts[0]["barriers"]) for part in parts]
    start = parts[0]["barriers"][-1][1]
    events: list[Event] = []
    for rank, (part, name, offset) in enumerate(zip(parts, names, offsets, strict=True)):
        zero = start + offset
        events.append(_metadata(rank, 0, "process_name", {"name": name}))
        events.append(_metadata(rank, 0, "process_sort_index", {"sort_index": rank}))
        for track, tid in part["tracks"].items():
            events.append(_metadata(rank, tid, "thread_name", {"name": track.split()[0]}))
            events.append(_metadata(rank, tid, "thread_sort_index", {"sort_index": -1}))
        for event in part["events"]:
            begin, end = event.pop("start"), event.pop("end")
            times = {"ts": (begin - zero) / 1000, "dur": (end - begin) / 1000}
            events.append({**event, "pid": rank, **times})
        events += _torch_events(part, rank, len(parts), zero)
    offsets_us = [offset / 1000 for offset in offsets]
    about_all = {"clock_offsets_us": offsets_us, "ranks": len(parts)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about_all}


def _torch_events(part: Event, rank: int, size: int, zero: int) -> list[Event]:
    """Return what torch's profiler has recorded on a rank, as that rank's process."""
    events, flows = [], itertools.count()
    ids: dict[Any, int] = {}
    base = part["trace"].get("baseTimeNanoseconds", 0) - zero
    for event in part["trace"]["traceEvents"]:
        # Others than numbers are torch's own marks. GPUs have numbers, and their streams threads.
        if not isinstance(event.get("pid"), int) or event.get("name", "").startswith("process_"):
            continue
        event["pid"] = rank
        if event["ph"] != "M":
            event["ts"] = event["ts"] + base / 1000
        if "id" in event:  # an arrow: its ids are one space for all processes
            known = event.get("cat"), event["id"]
            event["id"] = ids.setdefault(known, next(flows) * size + rank)
        events.append(event)
    return events


def _metadata(pid: int, tid: int, name: str, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
