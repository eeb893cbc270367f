"""The launcher: a supervisor on every host, their output, and the end of the job.

Used by `hvdtrain launch`; `supervisor` has the diagram. To end a host's ranks the launcher closes
the stdin of their supervisor; the kernel does the same when the launcher dies. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from hvdtrain.errors import HvdtrainError, InputError, LaunchError, WorldError
from hvdtrain.job.world import RESTART_VARIABLE
from hvdtrain.launch.host_list import Host, choose_slots
from hvdtrain.launch.output import LineReader, RankOutput, rank_folder
from hvdtrain.launch.remote import (
    Program,
    RemoteShell,
    is_this_host,
    master_address,
    start_with_pipes,
    through_stdin,
)
from hvdtrain.system import signals
from hvdtrain.system.cores import CORE

PORTS = range(20000, 30000)  # below the ports that the kernel gives to clients
_PORT_TRIES = 5
_PORT_IS_BUSY = 75  # the agent's exit code
STOP_S = 40.0  # after Ctrl-C or SIGTERM: torch's agent allows its ranks 30
END_S = 12.0  # after a failure: a supervisor needs up to 10
_POLL_S = 1.0  # a signal may set an earlier deadline
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


class HostLost(WorldError):
    """The connection to a host has ended, or what runs there for the launcher."""

    def __init__(self, host: str, text: str) -> None:
        super().__init__(text)
        self.host = host


def free_port() -> int:
    """Return a port of this host that is free, and that the kernel gives to no client meanwhile."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port := random.choice(PORTS)))
            return port


def forwarded(number: int) -> str:
    """Return the name of the signal that the ranks get: they save at SIGTERM, not at SIGHUP."""
    return "SIGINT" if number == signal.SIGINT else "SIGTERM"


def raise_stop(number: int | None) -> None:
    """Raise what ends the command after this signal: KeyboardInterrupt or JobStopped."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise JobStopped(number)


@dataclass(frozen=True)
class Job:
    """What to start, and where. `hosts` have as many slots as ranks."""

    hosts: Sequence[Host]
    command: Sequence[str]
    env: Mapping[str, str]
    """The environment of the ranks on this host, and, of `named` variables, on others."""
    named: Sequence[str] = ()
    remote: RemoteShell = field(default_factory=RemoteShell)
    start_timeout_s: float = 120.0
    output: Path | None = None
    verbose: bool = False
    master_port: int | None = None
    bind_to: str = CORE
    """What each rank is bound to: see `system.cores`."""
    max_restarts: int = 0
    """How often to start all ranks again, after a failed rank or a lost host."""
    slots: Sequence[Host] = ()
    """All that the ranks may use, `hosts` among them: another start leaves out a lost host."""

    def command_lines(self, port: int) -> list[list[str]]:
        """Return the command line of each host's supervisor. Raises InputError."""
        options = ["--nproc-per-node", ",".join(str(host.slots) for host in self.hosts)]
        options += ["--master-addr", master_address([host.name for host in self.hosts])]
        options += ["--master-port", str(port), "--start-timeout", f"{self.start_timeout_s:g}"]
        options += ["--bind-to", self.bind_to, *(["--verbose"] if self.verbose else [])]
        options += ["--error-files", str(self.output)] if self.output is not None else []
        lines = []
        for node, host in enumerate(self.hosts):
            line = [sys.executable, "-m", "hvdtrain.launch.supervisor", *options]
            line += ["--node-rank", str(node), *self.command]
            lines.append(self.remote.line(host.name, line, self.env))
        return lines

    def run(self) -> None:
        """Run the ranks to their end, again if they fail and `max_restarts` allows it. Raises
        RankFailed for the first that failed, WorldError for a lost host, LaunchError for one that
        did not start, KeyboardInterrupt for Ctrl-C, and JobStopped for SIGTERM and SIGHUP.
        """
        try:
            if self.output is not None:
                self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output-filename {self.output}: {error.strerror}") from None
        job, name, cause = self, uuid.uuid4().hex, ""
        for number in range(self.max_restarts + 1):
            restart = {"job": name, "number": number, "of": self.max_restarts, "cause": cause}
            env = dict(self.env)
            if self.max_restarts:
                env[RESTART_VARIABLE] = json.dumps(restart)
            try:
                replace(job, env=env)._run_once(is_restart=number > 0)
                return
            except (RankFailed, WorldError) as error:
                if number == self.max_restarts:
                    raise
                cause = str(error)
                label = f"restart {number + 1} of {self.max_restarts}"
                again = f"{label}: {cause}; all ranks start again"
                if isinstance(error, HostLost):
                    job = job._without(error.host)
                    again += f" on {','.join(map(str, job.hosts))}"
                print(again, file=sys.stderr, flush=True)

    def _without(self, lost: str) -> Job:
        """Return this job on the other hosts, if their slots suffice for its ranks, else itself."""
        slots = [host for host in self.slots if host.name != lost]
        size = sum(host.slots for host in self.hosts)
        if sum(host.slots for host in slots) < size:
            return self
        return replace(self, slots=slots, hosts=choose_slots(slots, size, None, None))

    def _run_once(self, is_restart: bool) -> None:
        for _ in range(_PORT_TRIES):
            attempt = _Attempt(self, self.master_port or random.choice(PORTS), is_restart)
            attempt.run()
            if not attempt.port_is_busy or self.master_port:
                break
        if attempt.port_is_busy:
            raise LaunchError(
                f"port {attempt.port} of {self.hosts[0].name} is in use; give another --master-port"
            )
        raise_stop(attempt.stopped_by)
        if attempt.error is not None:
            raise attempt.error


class _Attempt:
    """One start of the job: its processes, and the first error."""

    def __init__(self, job: Job, port: int, is_restart: bool) -> None:
        self.job = job
        self.port = port
        self._lines = LineReader()
        self._output = RankOutput(job.output, "ab" if is_restart else "wb")
        self.error: HvdtrainError | None = None
        self.stopped_by: int | None = None
        self.port_is_busy = False
        self._processes: list[Program] = []
        self._not_started = [host.name for host in job.hosts]
        self._deadline = time.monotonic() + job.start_timeout_s
        self._is_ending = False
        self._variables = json.dumps(through_stdin(job.env, job.named)).encode()

    def run(self) -> None:
        """Run until all supervisors have ended, and leave none behind."""
        lines = self.job.command_lines(self.port)
        numbers = signals.stop_launcher()
        with signals.handled(self._forward, *numbers), selectors.DefaultSelector() as selector:
            try:
                for node, line in enumerate(lines):
                    if self.stopped_by is None:
                        self._start(node, line, selector)
                self._relay(selector)
            except BrokenPipeError:  # `hvdrun ... | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                raise SystemExit(128 + signal.SIGPIPE) from None
            finally:
                self._end()
                self._wait()
                self._output.close()

    def _start(self, node: int, line: list[str], selector: selectors.BaseSelector) -> None:
        if self.job.verbose:
            self._output.say(f"{self.job.hosts[node].name}: {shlex.join(line)}")
        process = start_with_pipes(line, self.job.env)
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            process.stdin.write(self._variables + b"\n")
            process.stdin.flush()
        assert process.stdout is not None
        assert process.stderr is not None
        selector.register(process.stdout, selectors.EVENT_READ, (node, True))
        selector.register(process.stderr, selectors.EVENT_READ, (node, False))

    def _relay(self, selector: selectors.BaseSelector) -> None:
        """Read and handle the supervisors' output until the stdout of each is closed."""
        running = set(range(len(self._processes)))
        while running:
            left_s = self._deadline - time.monotonic()
            ready = selector.select(min(max(left_s, 0.0), _POLL_S))
            if time.monotonic() >= self._deadline:
                self._handle_deadline()
            for key, _ in ready:
                node, is_stdout = key.data
                try:
                    lines, is_open = self._lines.read(key.fd)
                except BlockingIOError:  # `read_rest` has emptied it since
                    continue
                for line in lines:
                    self._handle_line(node, line)
                if not is_open:
                    selector.unregister(key.fileobj)
                    if is_stdout:
                        running.discard(node)
                        self._handle_exit(node)

    def _handle_line(self, node: int, line: bytes) -> None:
        """Print a line of a rank, or note what a supervisor reports."""
        host = self.job.hosts[node].name
        match = MARK.fullmatch(line)
        if match is None:  # of ssh, of the remote shell, or of the agent
            self._output.say(f"{host}: {line.decode(errors='replace')}")
            return
        number, kind, text = int(match[1]), match[2].decode(), match[4]
        if kind in ("stdout", "stderr"):
            size = sum(host.slots for host in self.job.hosts)
            text += b"\n" if match[3] == b":" else b""
            self._output.print(number, kind, text, rank_folder(number, size))
        elif kind == "start":
            self._not_started.remove(host)
            if not self._not_started and self.stopped_by is None and not self._is_ending:
                self._deadline = math.inf
        elif kind == "signal":
            if self.stopped_by is None:
                self._forward(int(text), None)
        elif kind == "supervisor":
            # Its agent reports it before the ranks end, so that no rank that loses them is blamed.
            # Of a process of this host the exit code says more.
            if not is_this_host(host):
                self._fail(HostLost(host, f"the supervisor on {host} was killed"))
        else:
            rank = number if kind == "exit" else None
            who = "the agent" if rank is None else f"rank {rank}"
            self._fail(RankFailed(f"{who} on {host}", int(text), rank))

    def _handle_exit(self, node: int) -> None:
        """Handle the exit of a supervisor, or of the remote shell: has the job failed?"""
        host, process = self.job.hosts[node].name, self._processes[node]
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its stdout
            process.wait(END_S)
        assert process.stderr is not None
        for line in self._lines.read_rest(process.stderr.fileno()):
            self._handle_line(node, line)
        code = process.poll()
        what = f"{self.job.remote.name} to {host}"
        if is_this_host(host):
            what = f"the supervisor on {host}"
        if code is not None and code < 0:
            self._fail(RankFailed(what, code))
        elif code == _PORT_IS_BUSY and host in self._not_started:
            self.port_is_busy = self.error is None
            self._end()
        elif code:
            text = f"{what} ended with code {code}"
            if host in self._not_started:
                self._fail(LaunchError(f"{text} before its ranks started; see its lines above"))
            else:
                self._fail(HostLost(host, text))
        elif host in self._not_started and not self._is_ending and self.stopped_by is None:
            text = f"{what} ended with code 0, but has started no ranks"
            self._fail(LaunchError(f"{text}; does its shell run commands?"))

    def _handle_deadline(self) -> None:
        """Handle a passed deadline: a late start fails; after a signal end; at last SIGKILL."""
        if self._is_ending:
            self._deadline = math.inf
            for process in self._processes:
                process.kill()
        elif self.stopped_by is not None:
            self._end()
        else:
            names, limit = ", ".join(self._not_started), f"{self.job.start_timeout_s:g} s"
            self._fail(LaunchError(f"no ranks on {names} within --start-timeout {limit}"))

    def _fail(self, error: HvdtrainError) -> None:
        """Keep the first error, and end the ranks of all hosts."""
        if self.error is None and self.stopped_by is None and not self.port_is_busy:
            self.error = error
        self._end()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: send the first signal to all agents; the next one ends the ranks."""
        if self.stopped_by is not None:
            if number != signal.SIGHUP:  # both kernel and shell send it as a terminal closes
                self._end()
            return
        self.stopped_by = number
        self._deadline = time.monotonic() + STOP_S
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # it has ended
                process.stdin.write(f"{forwarded(number)}\n".encode())
                process.stdin.flush()

    def _end(self) -> None:
        """Let every supervisor end its host's ranks, by closing its stdin."""
        if not self._is_ending:
            self._is_ending = True
            self._deadline = time.monotonic() + END_S
            for process in self._processes:
                assert process.stdin is not None
                with contextlib.suppress(OSError):  # it has ended
                    process.stdin.close()

    def _wait(self) -> None:
        """Wait for the supervisors, after their stdin has closed; kill those that do not end."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._deadline - time.monotonic()))
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
