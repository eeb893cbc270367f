"""The launcher: a supervisor on every host, their output, and the end of the job.

Used by `hvdtrain launch`; `supervisor` has the diagram. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdtrain.errors import HvdtrainError, InputError, LaunchError, WorldError
from hvdtrain.job.world import RESTART_VARIABLE
from hvdtrain.launch.event_loop import MARK, EventLoop, RankFailed, Supervised
from hvdtrain.launch.host_list import Host, choose_slots
from hvdtrain.launch.output import RankOutput, rank_folder
from hvdtrain.launch.remote import (
    RemoteShell,
    is_this_host,
    master_address,
    start_with_pipes,
    through_stdin,
)
from hvdtrain.system.cores import CORE

PORTS = range(20000, 30000)  # below the ports that the kernel gives to clients
_PORT_TRIES = 5
_PORT_IS_BUSY = 75  # the agent's exit code


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


class _Attempt(EventLoop[Supervised]):
    """One start of the job: a supervisor on each host, and the first error."""

    def __init__(self, job: Job, port: int, is_restart: bool) -> None:
        super().__init__(RankOutput(job.output, "ab" if is_restart else "wb"))
        self.job = job
        self.port = port
        self.port_is_busy = False
        self._lines_of_hosts = job.command_lines(port)
        self._not_started = [host.name for host in job.hosts]

    def _run(self) -> None:
        job = self.job
        self._deadline = time.monotonic() + job.start_timeout_s
        variables = json.dumps(through_stdin(job.env, job.named))
        for host, line in zip(job.hosts, self._lines_of_hosts, strict=True):
            if self.stopped_by is None:
                if job.verbose:
                    self._output.say(f"{host.name}: {shlex.join(line)}")
                supervisor = Supervised(host.name, start_with_pipes(line, job.env))
                self._add(supervisor)
                supervisor.send(variables)
        while self.supervisors and not self._is_ending:
            self._relay()
            if time.monotonic() >= self._deadline:
                names, limit = ", ".join(self._not_started), f"{job.start_timeout_s:g} s"
                self._fail(LaunchError(f"no ranks on {names} within --start-timeout {limit}"))

    def _handle_line(self, supervisor: Supervised, line: bytes) -> None:
        """Print a line of a rank, or note what a supervisor reports."""
        host = supervisor.host
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
            if not self._not_started and self.stopped_by is None:
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

    def _handle_exit(self, supervisor: Supervised, code: int | None) -> None:
        """Decide whether the job has failed."""
        host = supervisor.host
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

    def _fail(self, error: HvdtrainError) -> None:
        """Keep the first error, and end the ranks of all hosts."""
        if self.error is None and self.stopped_by is None and not self.port_is_busy:
            self.error = error
        self._end()
