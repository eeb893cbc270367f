"""The hang watch: which rank keeps the others waiting, and the Python line that it is in.

`backends.open_backend` starts one in each rank. The Monitor's thread answers while the main thread
computes, reads data or waits in a collective. A rank whose collective has failed asks rank 0:

    rank that has waited              rank 0                             every rank
      |---- ask, with its state -------->|---- show ------------------------->|
      |                                  |<--- state: step, line, stacks -----|
      |<--- verdict ---------------------|---- verdict ---------------------->|

A rank that does not ask either runs something else, and its state says what, or it is stopped, and
does not answer. The first verdict stands: what fails afterwards is a consequence. Rank 0 writes the
stacks of all ranks to the run directory.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain._torch.flight_record import last_call
from hvdtrain.liveness.failure import line_of, print_stderr
from hvdtrain.liveness.monitor import Monitor, check
from hvdtrain.liveness.peer_sockets import InvalidMessage

FOLDER = "hangs"
"""In the run directory: `rank-N.txt`, the stacks."""

_ASKING_S = 1.0  # for how long further ranks may ask: they did not wait from the same instant on
_STATES_S = 2.5  # how long rank 0 waits for states; a rank that runs answers at once
_VERDICT_S = 5.0
_WAIT_S = 0.5  # between two looks at rank 0
_LISTED = 4


@dataclass(frozen=True)
class _State:
    """What a rank is doing. `asks`: its own collective has failed, so it asks who was late."""

    stacks: str
    asks: bool
    where: str
    call: str


class HangWatch:
    """This rank's part of the watch: a topic of the Monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self._world = monitor, monitor.world
        self._states: dict[int, _State] = {}  # on rank 0
        self._asked_at: float | None = None  # on rank 0
        self._verdict = ""
        self._is_known = threading.Event()
        self._topic = monitor.open("hang watch", self._receive, self._lose, self._tick)

    def explain(self, error: BaseException) -> str:
        """Return which rank kept this one waiting, and where it is, within seconds. Not collective.

        `error` is what the collective has raised here; one without a traceback is about the
        collective that the main thread is in. Returns the first verdict each time.
        """
        if not self._is_known.is_set():
            raised = traceback.TracebackException.from_exception(error)
            stack, text = raised.stack, "".join(raised.format())
            if not stack:
                stack, text = _main_stack(), _stacks()
            header = ["state", True, line_of(stack), last_call()]
            self._topic.send([0], header, text.encode())
            deadline = time.monotonic() + _VERDICT_S
            while not self._is_known.is_set():
                if time.monotonic() < deadline and self.monitor.silent_s(0) < _VERDICT_S:
                    self._is_known.wait(_WAIT_S)
                else:
                    self._write(f"rank-{self._world.rank}.txt", _stacks().encode())
                    self._announce(f"{self.monitor.describe(0)} {self._silence(0)}")
        return self._verdict

    # In the thread of the Monitor

    def _receive(self, rank: int, header: list[Any], payload: bytes) -> None:
        what, *rest = header
        if what == "show":
            header = ["state", False, line_of(_main_stack()), last_call()]
            self._topic.send([0], header, _stacks().encode())
        elif what == "verdict":
            (verdict,) = check(rest, str)
            if not verdict:
                raise InvalidMessage("an empty verdict")
            self._announce(verdict)
        elif what == "state" and not self._is_known.is_set():
            known = self._states.get(rank)
            if known is None or not known.asks:
                stacks = payload.decode(errors="replace")
                self._states[rank] = _State(stacks, *check(rest, bool, str, str))
            if self._asked_at is None:
                self._asked_at = time.monotonic()
                self._topic.send(range(self._world.size), ["show"])

    def _lose(self, rank: int, why: str) -> None:
        if self._world.rank > 0:
            self._announce(f"{self.monitor.describe(0)} {why}{self._since(0)}")

    def _tick(self) -> None:
        """On rank 0: conclude once all that can be known is known."""
        if self._asked_at is None or self._is_known.is_set():
            return
        waited_s = time.monotonic() - self._asked_at
        ranks = range(self._world.size)
        missing = [r for r in ranks if r not in self._states and r not in self.monitor.lost]
        asking = [r for r, state in self._states.items() if state.asks]
        is_complete = not missing and (waited_s > _ASKING_S or len(asking) == len(ranks))
        if is_complete or waited_s > _STATES_S:
            self._conclude(missing, asking)

    def _conclude(self, missing: list[int], asking: list[int]) -> None:
        """Send the verdict to all ranks, and write or print the stacks."""
        others = [r for r in self._states if r not in asking and r not in self.monitor.lost]
        late = sorted({*self.monitor.lost, *missing}) or sorted(others) or sorted(asking)
        listed = "; ".join(map(self._describe, late[:_LISTED]))
        more = f"; and {len(late) - _LISTED} more" if len(late) > _LISTED else ""
        steps = [s for s in (self.monitor.progress(r).step for r in asking) if s is not None]
        text = f"{f'in step {max(steps)}: ' if steps else ''}{listed}{more}"
        folder = self._folder()
        if folder is None:
            for rank in late[:_LISTED]:
                if rank in others:
                    main, _, _ = self._states[rank].stacks.partition("\n\n")
                    print_stderr(f"{self.monitor.describe(rank)}, {main}")
        else:
            for rank, state in self._states.items():
                self._write(f"rank-{rank}.txt", state.stacks.encode())
            text += f"; stacks of all ranks: {folder}"
        self._topic.send(range(self._world.size), ["verdict", text])

    def _announce(self, verdict: str) -> None:
        if not self._is_known.is_set():
            self._verdict = verdict
            self._is_known.set()

    # In words

    def _describe(self, rank: int) -> str:
        name = self.monitor.describe(rank)
        if rank in self.monitor.lost:
            return f"{name} {self.monitor.lost[rank]}{self._since(rank)}"
        if rank not in self._states:
            return f"{name} {self._silence(rank)}"
        state, step = self._states[rank], self.monitor.progress(rank).step
        doing = "is waiting" if state.asks else "has not arrived"
        at = "" if step is None else f" in step {step},"
        called = f" (last collective: {state.call})" if state.call else ""
        return f"{name} {doing}: it is{at} in {state.where}{called}"

    def _silence(self, rank: int) -> str:
        seconds = self.monitor.silent_s(rank)
        return (
            f"has not run for {seconds:.0f} s{self._since(rank)}: its process is stopped, or a "
            "library blocks Python in it"
        )

    def _since(self, rank: int) -> str:
        step = self.monitor.progress(rank).step
        return "" if step is None else f" (last seen in step {step})"

    # Files

    def _folder(self) -> Path | None:
        """Return the folder of the dumps, if this host sees the run directory; else None."""
        run_dir = self.monitor.progress(0).run_dir
        return Path(run_dir, FOLDER) if run_dir and Path(run_dir).is_dir() else None

    def _write(self, name: str, data: bytes) -> None:
        folder = self._folder()
        if folder is not None and data:
            with suppress(OSError):  # a full disk must not hide the error itself
                folder.mkdir(exist_ok=True)
                (folder / name).write_bytes(data)


def _main_stack() -> traceback.StackSummary:
    return traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))


def _stacks() -> str:
    """Return the stacks of this process's threads, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    first = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != first)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
