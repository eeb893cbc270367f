"""The loop of a launcher: what its supervisors print, the signals that it gets, the end of all.

Used by `launcher` and `elastic`, which decide what is started, and what an exit means. To end what
a supervisor runs, the launcher closes its stdin; the kernel does the same when the launcher dies.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import re
import selectors
import signal
import subprocess
import time
from types import FrameType
from typing import Generic, TypeVar

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.output import LineReader, RankOutput
from hvdtrain.launch.remote import Program
from hvdtrain.system import signals

STOP_S = 40.0  # after Ctrl-C or SIGTERM: torch's agent allows its ranks 30
END_S = 12.0  # after a failure: a supervisor needs up to 10
_POLL_S = 0.5  # a signal may set an earlier deadline
_KINDS = rb"stdout|stderr|start|exit|agent|supervisor|signal"
MARK = re.compile(rb"\[(\d+)\]<(" + _KINDS + rb")>([:+])(.*)", re.DOTALL)


class RankFailed(HvdtrainError):
    """A rank that failed. `exit_code` is its own, 128 + number if a signal has killed it."""

    def __init__(self, who: str, code: int, rank: int | None = None) -> None:
        self.is_killed = code < 0
        self.exit_code = code if code >= 0 else 128 - code
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        super().__init__(f"{who} {how}", rank=rank)


class JobStopped(HvdtrainError):
    """A signal to the launcher has ended the job. `exit_code` is 128 + its number."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        why = ": the terminal has closed; nohup keeps a job running"
        super().__init__(f"ended by {signal_name(number)}{why if number == signal.SIGHUP else ''}")


class Supervised:
    """What a launcher has started on a host: a `supervisor` or an `elastic_worker`."""

    def __init__(self, host: str, process: Program) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.host, self.process = host, process
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr

    def send(self, text: str) -> None:
        """Write a line to it, if it still runs."""
        with contextlib.suppress(OSError, ValueError):
            self.stdin.write(f"{text}\n".encode())
            self.stdin.flush()

    def end(self) -> None:
        """Let it end what it runs: SIGTERM, then SIGKILL."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def close(self) -> None:
        """Kill it, if it still runs, and close its pipes."""
        self.end()
        self.process.kill()
        self.process.wait()
        self.stdout.close()
        self.stderr.close()


S = TypeVar("S", bound=Supervised)


class EventLoop(Generic[S]):
    """Runs a job from its first supervisor to the end of the last one, in one thread."""

    def __init__(self, output: RankOutput) -> None:
        self.supervisors: list[S] = []
        """Those that have not ended."""
        self.error: HvdtrainError | None = None
        self.stopped_by: int | None = None
        self._output = output
        self._deadline = math.inf
        self._is_ending = False
        self._lines = LineReader()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Run until all supervisors have ended, and leave none behind. Raises `error`,
        KeyboardInterrupt for Ctrl-C, and JobStopped for SIGTERM and SIGHUP.
        """
        with self._selector, signals.handled(self._forward, *signals.stop_launcher()):
            try:
                self._run()
            finally:
                self._end()
                deadline = time.monotonic() + END_S
                try:
                    while self.supervisors and time.monotonic() < deadline:
                        self._relay()
                finally:
                    for supervisor in self.supervisors:
                        supervisor.close()
                    self._output.close()
        if self.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stopped_by is not None:
            raise JobStopped(self.stopped_by)
        if self.error is not None:
            raise self.error

    # What a job decides

    def _run(self) -> None:
        """Start supervisors and relay their output, until the job is over."""
        raise NotImplementedError

    def _handle_line(self, supervisor: S, line: bytes) -> None:
        """Handle a line of a supervisor, of what it runs, or of ssh."""
        raise NotImplementedError

    def _handle_exit(self, supervisor: S, code: int | None) -> None:
        """Handle the exit of a supervisor, or of the remote shell; None if it runs on."""
        raise NotImplementedError

    # What all share

    def _add(self, supervisor: S) -> None:
        self.supervisors.append(supervisor)
        for stream in (supervisor.stdout, supervisor.stderr):
            self._selector.register(stream, selectors.EVENT_READ, supervisor)

    def _relay(self) -> None:
        """Handle what the supervisors have written and their exits; wait for it half a second."""
        for key, _ in self._selector.select(_POLL_S):
            supervisor = key.data
            if supervisor not in self.supervisors:  # it has ended, with both of its pipes
                continue
            lines, is_open = self._lines.read(key.fd)
            for line in lines:
                self._handle_line(supervisor, line)
            if not is_open:
                self._selector.unregister(key.fileobj)
                if key.fileobj is supervisor.stdout:
                    self._finish(supervisor)

    def _finish(self, supervisor: S) -> None:
        """Print the rest of a supervisor's stderr, and handle its exit."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its stdout
            supervisor.process.wait(END_S)
        for line in self._lines.read_rest(supervisor.stderr.fileno()):
            self._handle_line(supervisor, line)
        with contextlib.suppress(KeyError):  # it has closed its stderr before
            self._selector.unregister(supervisor.stderr)
        self.supervisors.remove(supervisor)
        self._handle_exit(supervisor, supervisor.process.poll())
        supervisor.close()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: send the first signal to all ranks; the next one ends them."""
        if self.stopped_by is not None:
            if number != signal.SIGHUP:  # both kernel and shell send it as a terminal closes
                self._deadline = 0.0
            return
        self.stopped_by = number
        self._deadline = time.monotonic() + STOP_S
        for supervisor in self.supervisors:
            # Ranks save at SIGTERM, not at SIGHUP.
            supervisor.send("SIGINT" if number == signal.SIGINT else "SIGTERM")

    def _end(self) -> None:
        """Let every supervisor end what it runs."""
        self._is_ending = True
        for supervisor in self.supervisors:
            supervisor.end()


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
