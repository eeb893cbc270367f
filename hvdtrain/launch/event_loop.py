"""The loop of a launcher: what its supervisors print, the signals that it gets, the end of all.

Used by `launcher` and `elastic`, which decide which ranks are started, and what an exit means;
`supervisor` has the messages. A host has one connection, however many ranks run there. To end what
a supervisor runs, the launcher closes its stdin; the kernel does the same when the launcher dies.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, Generic, Literal, TypeVar

from hvdtrain.errors import HvdtrainError
from hvdtrain.job import job_secret
from hvdtrain.launch.host_list import Host
from hvdtrain.launch.output import LineReader, RankOutput
from hvdtrain.launch.remote import RemoteShell, travelling
from hvdtrain.system import cores, signals

STOP_S = 30.0  # after Ctrl-C or SIGTERM: torchrun allows its ranks as much
END_S = 12.0  # after a failure: a supervisor needs up to 10
POLL_S = 0.5  # a signal may set an earlier deadline
_MAX_FILES = 1 << 16  # three for each host
MARK = re.compile(rb"\[(\d+)\]<(stdout|stderr|ready|exit|supervisor|signal)>([:+])(.*)", re.DOTALL)


@dataclass(frozen=True)
class Job:
    """What to start, and where. `hosts` have as many slots as ranks."""

    hosts: Sequence[Host]
    command: Sequence[str]
    env: Mapping[str, str]
    """The environment of the ranks on this host, and, of `named` variables, on others."""
    named: Sequence[str] = ()
    remote: RemoteShell = RemoteShell()
    start_timeout_s: float = 120.0
    output: Path | None = None
    verbose: bool = False
    master_addr: str | None = None
    master_port: int | None = None
    bind_to: str = cores.CORE
    """What each rank is bound to: see `system.cores`."""
    max_restarts: int = 0
    """How often to start all ranks again, after a failed rank or a lost host."""
    slots: Sequence[Host] = ()
    """All that the ranks may use, `hosts` among them: another start leaves out a lost host."""


class RankFailed(HvdtrainError):
    """A rank that failed. `exit_code` is its own, 128 + number if a signal has killed it."""

    def __init__(self, who: str, code: int, rank: int | None = None) -> None:
        self.is_killed = code < 0
        self.exit_code = code if code >= 0 else 128 - code
        super().__init__(f"{who} {how_ended(code)}", rank=rank)


class JobStopped(HvdtrainError):
    """A signal to the launcher has ended the job. `exit_code` is 128 + its number."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        why = ": the terminal has closed; nohup keeps a job running"
        super().__init__(f"ended by {signal_name(number)}{why if number == signal.SIGHUP else ''}")


class HostConnection(subprocess.Popen[bytes]):
    """A supervisor that a launcher has started on a host, or the remote shell that leads to it."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def __init__(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C reaches the launcher alone.
        super().__init__(
            command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self.host = host
        self.port: int | None = None
        """A free port of the host, once the supervisor runs; 0 if the wanted one is in use."""
        self.ranks: set[int] = set()
        """Those that have not ended."""
        self._queued = b""

    def send(self, **message: Any) -> None:
        """Send what is queued, and a message if one is given, once the supervisor runs: until then
        the pipe may fill up.
        """
        if message:
            self._queued += f"{json.dumps(message)}\n".encode()
        with contextlib.suppress(OSError, ValueError):  # it has ended
            while self._queued and self.port is not None:
                self._queued = self._queued[os.write(self.stdin.fileno(), self._queued) :]

    def end(self) -> None:
        """Let the supervisor end what it runs: SIGTERM, then SIGKILL."""
        self.stdin.close()

    def close(self) -> None:
        """Kill the supervisor, if it still runs, and close its pipes."""
        with self:
            self.kill()


@dataclass(eq=False)
class Rank:
    """A rank that has been started, with its number in messages and its slot on its host."""

    number: int
    connection: HostConnection
    slot: int
    folder: str
    """Where its files are, below --output-filename."""

    @property
    def host(self) -> str:
        """The host on which it runs."""
        return self.connection.host

    @property
    def label(self) -> object:
        """What its lines are marked with."""
        return self.number


R = TypeVar("R", bound=Rank)


class EventLoop(Generic[R]):
    """Runs a job from its first connection to the end of the last one, in one thread."""

    def __init__(self, job: Job, mode: Literal["ab", "wb"] = "ab") -> None:
        self.job = job
        self.connections: list[HostConnection] = []
        """Those whose supervisor has not ended."""
        self.ranks: dict[int, R] = {}
        """All that have been started, by their number in messages."""
        self.error: HvdtrainError | None = None
        self.stopped_by: int | None = None
        # Through the stdin of a supervisor, not on its command line: some are secrets (HF_TOKEN).
        self._variables = {**travelling(job.env, job.named), **job_secret.variable_of(job.env)}
        self._output = RankOutput(job.output, mode)
        self._deadline = math.inf
        self._has_forwarded = False
        self._is_ending = False
        self._lines = LineReader()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Run until all supervisors have ended, and leave none behind. Raises `error`,
        KeyboardInterrupt for Ctrl-C, and JobStopped for SIGTERM and SIGHUP.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MAX_FILES if hard < 0 else min(hard, _MAX_FILES)  # RLIM_INFINITY is -1
        if 0 <= soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        with self._selector, signals.handled(self._forward, *signals.stop_launcher()):
            try:
                self._begin()
                while not self._is_ending and time.monotonic() < self._deadline:
                    self._relay()
                    self._decide()
            finally:
                self._end()
                deadline = time.monotonic() + END_S
                try:
                    while self.connections and time.monotonic() < deadline:
                        self._relay()
                finally:
                    for connection in self.connections:
                        connection.close()
                    self._output.close()
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # of `hvdtrain.run`
        if self.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stopped_by is not None:
            raise JobStopped(self.stopped_by)
        if self.error is not None:
            raise self.error

    # What a job decides

    def _begin(self) -> None:
        """Connect to the hosts, or begin to look for them."""
        raise NotImplementedError

    def _decide(self) -> None:
        """Decide what comes next, after each wake; call `_end` once the job is over."""
        raise NotImplementedError

    def _handle_ready(self, connection: HostConnection) -> None:
        """Handle the start of a supervisor."""

    def _handle_exit(self, rank: R, code: int) -> None:
        """Handle the exit of a rank."""
        raise NotImplementedError

    def _handle_lost(self, connection: HostConnection, code: int | None) -> None:
        """Handle a supervisor that was killed: `code` is None; or that has ended, or its remote
        shell, with an exit code.
        """
        raise NotImplementedError

    # What all share

    def _connect(self, host: str, port: int | None = None) -> HostConnection:
        """Start a supervisor on a host. Raises InputError, OSError."""
        job = self.job
        line = [sys.executable, "-m", "hvdtrain.launch.supervisor", *([str(port)] if port else [])]
        command = job.remote.line(host, line, job.env)
        if job.verbose:
            self._output.say(f"{host}: {shlex.join(command)}")
        connection = HostConnection(host, command, job.env)
        connection.send(env=self._variables)
        self.connections.append(connection)
        for stream in (connection.stdout, connection.stderr):
            self._selector.register(
                stream, selectors.EVENT_READ, partial(self._read, connection, stream)
            )
        return connection

    def _start(self, rank: R, slots: int, variables: Mapping[str, object]) -> None:
        """Start a rank with these variables, bound to its share of the host's slots."""
        job, env = self.job, {name: str(value) for name, value in variables.items()}
        if job.output is not None:  # for torch's @record
            env["TORCHELASTIC_ERROR_FILE"] = str(job.output / rank.folder / "error.json")
        defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        defaults |= {"OMP_NUM_THREADS": "1"} if slots > 1 else {}  # both as torchrun
        self.ranks[rank.number] = rank
        rank.connection.ranks.add(rank.number)
        command = cores.command(job.bind_to, f"{rank.slot}/{slots}", job.command)
        rank.connection.send(start=rank.number, command=command, env=env, defaults=defaults)

    def _relay(self) -> None:
        """Handle what the supervisors have written and their exits; wait for it half a second.
        Before, pass on the first signal, between messages.
        """
        if self.stopped_by is not None and not self._has_forwarded:
            self._has_forwarded = True
            # Ranks save at SIGTERM, not at SIGHUP.
            name = "SIGINT" if self.stopped_by == signal.SIGINT else "SIGTERM"
            for connection in self.connections:
                if connection.ranks and connection.port is not None:
                    connection.send(signal=name)
                else:
                    connection.end()
        for key, _ in self._selector.select(POLL_S):
            if key.fd in self._selector.get_map():  # else it has ended, with both of its pipes
                key.data()

    def _read(self, connection: HostConnection, stream: IO[bytes]) -> bool:
        """Handle the lines that a supervisor's pipe holds; return whether it is open."""
        lines, is_open = self._lines.read(stream.fileno())
        for line in lines:
            self._handle_line(connection, line)
        if not is_open:
            with contextlib.suppress(KeyError):  # it has closed its stderr before
                self._selector.unregister(stream)
            if stream is connection.stdout:
                self._finish(connection)
        return is_open

    def _handle_line(self, connection: HostConnection, line: bytes) -> None:
        """Print a line of a rank or of ssh, or handle what a supervisor reports."""
        match = MARK.fullmatch(line)
        if match is None:  # of ssh, or of the remote shell
            self._output.say(f"{connection.host}: {line.decode(errors='replace')}")
            return
        number, kind, text = int(match[1]), match[2].decode(), match[4]
        if kind in ("stdout", "stderr"):
            rank, text = self.ranks[number], text + b"\n" * (match[3] == b":")
            self._output.print(rank.label, kind, text, rank.folder)
        elif kind == "ready":
            connection.port = int(text)
            connection.send()
            self._handle_ready(connection)
        elif kind == "exit":
            self._end_rank(self.ranks[number], int(text))
        elif kind == "supervisor":
            self._handle_lost(connection, None)
        elif self.stopped_by is None:
            self._forward(int(text), None)

    def _end_rank(self, rank: R, code: int) -> None:
        """Handle the exit of a rank, once; let a supervisor without ranks end."""
        if rank.number in rank.connection.ranks:
            rank.connection.ranks.remove(rank.number)
            self._handle_exit(rank, code)
            if not rank.connection.ranks:
                rank.connection.end()

    def _finish(self, connection: HostConnection) -> None:
        """Print the rest of a supervisor's stderr, and handle its exit."""
        code = 255
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its stdout
            code = connection.wait(END_S)
        # Do not wait for the end of the pipe: a process that still runs may keep it open.
        os.set_blocking(connection.stderr.fileno(), False)
        while self._read(connection, connection.stderr):
            pass
        self.connections.remove(connection)
        self._handle_lost(connection, code)
        connection.close()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: `_relay` sends the first signal to all ranks; the next one ends them."""
        if self.stopped_by is not None:
            if number != signal.SIGHUP:  # both kernel and shell send it as a terminal closes
                self._deadline = 0.0
            return
        self.stopped_by = number
        self._deadline = time.monotonic() + STOP_S

    def _end(self) -> None:
        """Let every supervisor end what it runs."""
        self._is_ending = True
        for connection in self.connections:
            connection.end()


def how_ended(code: int) -> str:
    """Return how a process has ended, by its exit code: below 0 for a signal."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
