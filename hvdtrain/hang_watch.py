"""The hang watch: which rank keeps the others waiting, and the Python line that it is in.

`backends.open_backend` starts one in each rank. Its thread answers while the main thread computes,
reads data or waits in a collective. A rank whose collective has failed asks rank 0:

    rank that has waited              rank 0                             every rank
      |---- ask, with its state -------->|---- show ------------------------->|
      |                                  |<--- state: step, line, stacks -----|
      |<--- verdict ---------------------|---- verdict ---------------------->|

A rank that does not ask either runs something else, and its state says what, or it is stopped, and
does not answer. The first verdict stands: what fails afterwards is a consequence. Rank 0 writes the
stacks of all ranks to the run directory; every rank writes torch's record of its collectives.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain._torch.flight_record import flight_record, last_call
from hvdtrain.addresses import listen_addresses
from hvdtrain.failure import line_of, print_stderr
from hvdtrain.peer_sockets import InvalidMessage
from hvdtrain.peers import Peers
from hvdtrain.world import World

FOLDER = "hangs"
"""In the run directory: `rank-N.txt`, the stacks, and `flight_N`, which torchfrtrace reads."""

_TICK_S = 1.0  # interval of heartbeats
_ASKING_S = 1.0  # for how long further ranks may ask: they did not wait from the same instant on
_STATES_S = 2.5  # how long rank 0 waits for states; a rank that runs answers at once
_VERDICT_S = 5.0
_LISTED = 4


@dataclass
class RankProgress:
    """What the heartbeat says of a rank. The Trainer sets it, and a loop of one's own may."""

    step: int | None = None
    """The optimizer step at work, counted from 1."""
    run_dir: str | None = None
    """The run directory; on rank 0."""


@dataclass(frozen=True)
class _State:
    """What a rank is doing. `asks`: its own collective has failed, so it asks who was late."""

    asks: bool
    where: str
    call: str
    stacks: str


class HangWatch:
    """This rank's part of the watch. The constructor is collective.

    `hosts` are the hosts of all ranks. Raises PeerLost naming the ranks that did not arrive.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        hosts: list[str],
        progress: RankProgress,
        timeout_s: float,
    ) -> None:
        self._world = world
        self._hosts = hosts
        self._progress = progress
        self._heard: dict[int, list[Any]] = {}  # step and run directory, by rank
        self._lost: dict[int, str] = {}
        self._states: dict[int, _State] = {}  # on rank 0
        self._asked_at: float | None = None  # on rank 0
        self._verdict = ""
        self._is_known = threading.Event()
        self._peers = Peers(
            PrefixStore("hang-watch", store),
            world.rank,
            world.size,
            None,
            listen_addresses(world) if world.rank == 0 else [],
            timeout_s,
            tick_s=_TICK_S,
            status=lambda: json.dumps([progress.step, progress.run_dir]).encode(),
            thread_name="hang-watch",
        )
        self._peers.start(self._receive, self._lose, self._tick)

    def explain(self, error: BaseException) -> str:
        """Return who kept this rank waiting, and where it is; within seconds. Not collective.

        `error` is what the collective has raised here; one without a traceback is about the
        collective that the main thread is in. Returns the first verdict each time.
        """
        if not self._is_known.is_set():
            raised = traceback.TracebackException.from_exception(error)
            stack, text = raised.stack, "".join(raised.format())
            if not stack:
                stack, text = _main_stack(), _stacks()
            record = flight_record(self._world.size)
            header = ["state", True, line_of(stack), last_call(record)]
            self._peers.send(0, header, text.encode())
            if not self._wait_for_verdict():
                self._write(f"rank-{self._world.rank}.txt", _stacks().encode())
                self._write_record(record)
                self._announce(f"{self._name(0)} {self._silence(0)}")
        return self._verdict

    def _wait_for_verdict(self) -> bool:
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline and self._peers.silent_s(0) < _VERDICT_S:
            if self._is_known.wait(_TICK_S / 2):
                return True
        return self._is_known.is_set()

    def close(self) -> None:
        """Close the connections. Twice is safe."""
        self._peers.close()

    # In the thread of the connections

    def _receive(self, rank: int, header: list[Any], payload: bytes) -> None:
        what, *rest = header
        if what == "alive":
            self._heard[rank] = _check(_parsed(payload), (int, NoneType), (str, NoneType))
        elif what == "show":
            record = flight_record(self._world.size)
            self._write_record(record)
            header = ["state", False, line_of(_main_stack()), last_call(record)]
            self._peers.send(0, header, _stacks().encode())
        elif what == "verdict":
            (verdict,) = _check(rest, str)
            if not verdict:
                raise InvalidMessage("an empty verdict")
            self._announce(verdict)
        elif what == "state" and not self._is_known.is_set():
            known = self._states.get(rank)
            if known is None or not known.asks:
                asks, where, call = _check(rest, bool, str, str)
                self._states[rank] = _State(asks, where, call, payload.decode(errors="replace"))
            if self._asked_at is None:
                self._asked_at = time.monotonic()
                self._peers.send_all(range(self._world.size), ["show"])

    def _lose(self, rank: int, why: str) -> None:
        self._lost[rank] = why
        if self._world.rank > 0:
            self._announce(f"{self._name(0)} {why}{self._since(0)}")

    def _tick(self) -> None:
        """On rank 0: conclude once all that can be known is known."""
        if self._asked_at is None or self._is_known.is_set():
            return
        waited_s = time.monotonic() - self._asked_at
        ranks = range(self._world.size)
        missing = [r for r in ranks if r not in self._states and r not in self._lost]
        asking = [r for r, state in self._states.items() if state.asks]
        is_complete = not missing and (waited_s > _ASKING_S or len(asking) == len(ranks))
        if is_complete or waited_s > _STATES_S:
            self._conclude(missing, asking)

    def _conclude(self, missing: list[int], asking: list[int]) -> None:
        """Send the verdict to all ranks, and write or print the stacks."""
        others = [r for r in self._states if r not in asking and r not in self._lost]
        late = sorted({*self._lost, *missing}) or sorted(others) or sorted(asking)
        listed = "; ".join(map(self._describe, late[:_LISTED]))
        more = f"; and {len(late) - _LISTED} more" if len(late) > _LISTED else ""
        steps = [step for step, _ in map(self._heartbeat, asking) if step is not None]
        text = f"{f'in step {max(steps)}: ' if steps else ''}{listed}{more}"
        folder = self._folder()
        if folder is None:
            for rank in late[:_LISTED]:
                if rank in others:
                    main, _, _ = self._states[rank].stacks.partition("\n\n")
                    print_stderr(f"{self._name(rank)}, {main}")
        else:
            for rank, state in self._states.items():
                self._write(f"rank-{rank}.txt", state.stacks.encode())
            text += f"; stacks of all ranks: {folder}"
        self._peers.send_all(range(self._world.size), ["verdict", text])

    def _announce(self, verdict: str) -> None:
        if not self._is_known.is_set():
            self._verdict = verdict
            self._is_known.set()

    # In words

    def _describe(self, rank: int) -> str:
        if rank in self._lost:
            return f"{self._name(rank)} {self._lost[rank]}{self._since(rank)}"
        if rank not in self._states:
            return f"{self._name(rank)} {self._silence(rank)}"
        state, (step, _) = self._states[rank], self._heartbeat(rank)
        doing = "waits" if state.asks else "has not come"
        at = "" if step is None else f" in step {step},"
        called = f" (last collective: {state.call})" if state.call else ""
        return f"{self._name(rank)} {doing}: it is{at} in {state.where}{called}"

    def _silence(self, rank: int) -> str:
        seconds = self._peers.silent_s(rank)
        return (
            f"has not run for {seconds:.0f} s{self._since(rank)}: its process is stopped, or a "
            "library blocks Python in it"
        )

    def _since(self, rank: int) -> str:
        step, _ = self._heartbeat(rank)
        return "" if step is None else f" (last seen in step {step})"

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._hosts[rank]})"

    def _heartbeat(self, rank: int) -> list[Any]:
        if rank == self._world.rank:
            return [self._progress.step, self._progress.run_dir]
        return self._heard.get(rank, [None, None])

    # Files

    def _folder(self) -> Path | None:
        """Return the folder of the dumps, if this host sees the run directory; else None."""
        _, run_dir = self._heartbeat(0)
        return Path(run_dir, FOLDER) if run_dir and Path(run_dir).is_dir() else None

    def _write(self, name: str, data: bytes) -> None:
        folder = self._folder()
        if folder is not None and data:
            with suppress(OSError):  # a full disk must not hide the error itself
                folder.mkdir(exist_ok=True)
                (folder / name).write_bytes(data)

    def _write_record(self, record: dict[str, Any]) -> None:
        self._write(f"flight_{self._world.rank}", pickle.dumps(record) if record else b"")


def _parsed(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise InvalidMessage("no JSON") from None


def _check(values: Any, *kinds: Any) -> list[Any]:
    """Return `values`, a list of these types. Raises InvalidMessage for any other value."""
    same = isinstance(values, list) and len(values) == len(kinds)
    if not same or not all(map(isinstance, values, kinds)):
        raise InvalidMessage(f"values that are not {kinds}")
    return list(values)


def _main_stack() -> traceback.StackSummary:
    return traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))


def _stacks() -> str:
    """Return the stacks of this process's threads, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    first = threading.main_thread().ident
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sorted(frames.items(), key=lambda item: item[0] != first)
    ]
    return "\n".join(parts)
