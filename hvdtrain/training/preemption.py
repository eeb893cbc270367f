"""Preemption: after a signal to any rank, all ranks save after the same step, and end.

The Trainer uses it. No step asks whether a signal has arrived: the ranks agree only once there is
one, over a topic of the Monitor.

    rank r   ["signal", "SIGUSR1 at rank 1"]  ->  rank 0
    rank 0   ["hold", "SIGUSR1 at rank 1"]    ->  all     after the first signal
    rank r   ["begun", 41]                    ->  rank 0  it begins no step after 41 for now
    rank 0   ["last", 43]                     ->  all     1 + the largest of the answers
    rank r   ["bye"], or ["gone"]             ->  rank 0, and rank 0 -> all: it has ended as it
                                                          should, or not

The Monitor's thread answers, so a rank that waits in a collective answers, too, and the
ranks that have begun a step finish it. Every rank receives the last step before it begins it. After
the loss of a rank no last step can be agreed on: a signal, even an earlier one, ends the others.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from contextlib import ExitStack
from types import FrameType
from typing import Any, NoReturn

from hvdtrain.backends import start_peer_watch
from hvdtrain.backends.base import Backend
from hvdtrain.errors import Preempted
from hvdtrain.liveness import failure
from hvdtrain.liveness.monitor import Topic
from hvdtrain.system import signals
from hvdtrain.training.config import TrainConfig

SIGNALS = (*signals.STOP, signal.SIGUSR1, signal.SIGUSR2)
# A launcher may pass on a signal that the rank has received directly, too.
_REPEATED_SIGNAL_S = 2.0
# `timeout hvdtrain` sends a signal to its child, and at once to the process group, too.
_REPEATED_ALONE_S = 0.2


class Preemption:
    """The signals of one run. A context manager: inside the block it handles them."""

    def __init__(self, backend: Backend, config: TrainConfig) -> None:
        self._backend, self._world = backend, backend.world
        self._grace_s = config.grace_s()
        self._pid = os.getpid()
        self._stack = ExitStack()
        self._before: dict[int, Any] = {}  # the handlers outside of the block
        self._first_at: float | None = None
        self._first = signal.SIGTERM
        # Its methods may interrupt themselves in a signal handler, unlike those of queue.Queue.
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Names of signals; "" once the ranks hold; None at the end."""
        self._thread: threading.Thread | None = None
        self._topic: Topic | None = None
        self._changed = threading.Condition()  # guards what follows
        self._begun = 0
        self._last: int | None = None
        self._live = set(range(self._world.size))
        self._answers: dict[int, int] = {}  # on rank 0
        self._said_bye: set[int] = set()
        self._has_lost = False
        """Whether a rank has ended otherwise."""
        self.cause = ""
        """The first signal and the rank that received it; empty before."""

    def __enter__(self) -> Preemption:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._stack.enter_context(signals.handled(self._on_signal, *SIGNALS))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is not None:
            self._events.put(None)
            self._thread.join()
        if self._topic is not None:
            as_it_should = error is None or isinstance(error, Preempted)
            others = [*self._live - {self._world.rank}]
            self._topic.send(others, ["bye" if as_it_should else "gone"])
            self._topic.close()
        if isinstance(error, Preempted):
            failure.pass_first_signal(self._before.values())
        self._stack.close()
        is_by_launcher = self._first_at is not None and self._has_lost
        if is_by_launcher and isinstance(error, Exception) and self._backend._peer_error(error):
            # The signal is that of the launcher, which ends the job after another rank's end.
            raise SystemExit(128 + self._first) from error

    def connect(self) -> None:
        """Let the ranks agree from here on; a signal that has arrived before counts. Collective.

        Raises PeerLost or DistError, which the backend converts.
        """
        start_peer_watch(self._backend)  # `open_backend` may not have opened this backend
        if (watch := self._backend.hang_watch) is not None:
            name = f"preemption {next(watch.monitor.numbers)}"
            self._topic = watch.monitor.open(name, self._on_message, self._on_lost)
        self._thread = threading.Thread(target=self._watch, name="grace", daemon=True)
        self._thread.start()

    def begin_step(self, step: int) -> bool:
        """Return whether `step` is the last one of a preempted run, or follows it. Not collective.

        Blocks while the ranks agree on the last step. Save after a step for which this is true.
        """
        with self._changed:
            # Without rank 0 no one decides: let the next collective report its loss.
            while self.cause and 0 in self._live and self._last is None and step > self._begun:
                self._changed.wait()
            self._begun = max(step, self._begun)
            return self._last is not None and step >= self._last

    def end(self, step: int) -> Preempted:
        """Return what ends the run after `step`, which is saved."""
        return Preempted(self._exit_code, f"{self.cause}; saved after step {step}")

    @property
    def _exit_code(self) -> int:
        """The exit code, equal on all ranks, as the cause is. Ctrl-C asks for no other start."""
        return 130 if self.cause.startswith("SIGINT ") else 143

    # Signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        received, now = signal.Signals(number), time.monotonic()
        is_own = os.getpid() == self._pid  # and not that of a forked child
        if is_own and self._first_at is None and not self._has_lost:
            if received == signal.SIGINT and self._thread is None:  # there is nothing to save yet
                self._act_as_before(received, frame)
            self._first_at, self._first = now, received
            self._events.put(received.name)
            return
        # torchrun's ranks lead sessions of their own: Ctrl-C reaches them once, through the agent,
        # which sends SIGTERM at a second one.
        is_ctrl_c, launcher = self._first == signal.SIGINT, self._world.launcher
        is_once = launcher == "none" or (launcher == "torchrun" and is_ctrl_c)
        repeated_s = _REPEATED_ALONE_S if is_once else _REPEATED_SIGNAL_S
        is_another = self._first_at is None or now - self._first_at > repeated_s
        if is_another or (is_own and self._has_lost):
            self._act_as_before(received, frame)

    def _act_as_before(self, number: signal.Signals, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        else:
            signals.set_handler(signal.SIG_DFL, number)
            signal.raise_signal(number)

    def _watch(self) -> None:
        """Pass signals on, and end this process when the grace period is over. Runs in a thread."""
        deadline: float | None = None
        while True:
            try:
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                event = self._events.get(timeout=left_s)
            except queue.Empty:
                self._end_now()
            if event is None:
                return
            if event:
                self._send([0], ["signal", f"{event} at rank {self._world.rank}"])
                continue
            deadline = time.monotonic() + self._grace_s
            if self._world.rank == 0:
                failure.print_stderr(
                    f"signal   {self.cause}: the run saves and ends, within {self._grace_s:g} "
                    "s (--grace); a second signal ends it at once"
                )

    def _end_now(self) -> NoReturn:
        error = Preempted(
            self._exit_code,
            f"{self.cause}, and no checkpoint within {self._grace_s:g} s (--grace); --resume auto "
            "goes on from the one before",
        )
        if self._world.size > 1:
            failure.end_job(self._world, error)
        failure.report(self._world, error)
        os._exit(self._exit_code)  # sys.exit would end this thread alone

    # Agreement. These methods run in the thread of the connections; with one rank, in `_watch`.

    def _send(self, ranks: list[int], header: list[Any]) -> None:
        if self._topic is not None:
            self._topic.send(ranks, header)
        else:
            self._on_message(0, header, b"")

    def _on_message(self, rank: int, header: list[Any], payload: bytes) -> None:
        kind, value, *_ = *header, None
        with self._changed:
            if kind == "signal" and not self.cause:
                self._send([*self._live], ["hold", value])
            elif kind == "hold" and not self.cause:
                self.cause = value
                self._events.put("")
                self._send([0], ["begun", self._begun])
            elif kind == "begun":
                self._answers[rank] = value
                self._decide()
            elif kind == "last":
                self._last = value
                self._changed.notify_all()
            elif kind == "bye":
                self._said_bye.add(rank)
            elif kind == "gone":
                self._on_lost(rank, "has failed")

    def _on_lost(self, rank: int, why: str) -> None:
        """Handle a lost rank: the job ends. A signal received so far is the launcher's, or no
        checkpoint can follow it any more, so it ends this rank.
        """
        with self._changed:
            self._live.discard(rank)
            self._changed.notify_all()
            self._decide()
            self._has_lost |= rank not in self._said_bye
        main = threading.main_thread().ident
        if self._has_lost and self._first_at is not None and main is not None:
            signal.pthread_kill(main, self._first)  # its handler ends the wait for the lost rank

    def _decide(self) -> None:
        """Send the last step once all live ranks have answered, which they do to rank 0 alone."""
        if self._last is None and self._live <= self._answers.keys():
            self._send([*self._live], ["last", 1 + max(self._answers.values())])
