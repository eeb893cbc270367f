"""Sockets on other hosts for ranks there that somebody else starts, and signals to these, over ssh.

`hvdtrain compare` uses it. One ssh connection to each host stays open, with a shell
that runs the commands. A rank there connects to a Unix socket in a private folder, which ssh
forwards to one here: so no port is open, and who may use the socket is who may log in.
Imports no torch.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.host_list import Host
from hvdtrain.launch.remote import RemoteShell, is_this_host
from hvdtrain.system.commands import run
from hvdtrain.system.processes import end_with_parent

_SHARED = 9  # exit code: the folder is there already
_REPLY_S = 30.0  # to a command on another host, or to the start of a connection
_NO_REPLY = f"no reply in {_REPLY_S:g} s"
# Marks the exit code of a command among the lines that a login shell prints by itself.
_REPLY = "hvdtrain-code:"


class RemoteHosts:
    """Connections to all hosts but this one. A context manager that closes them."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        """Prepare; `folder` is private to the caller, and is made on the other hosts, too."""
        self._names = [host.name for host in hosts if not is_this_host(host.name)]
        self._folder = folder
        self._shells: dict[str, subprocess.Popen[bytes]] = {}
        self._to_clear: list[str] = []

    def __enter__(self) -> RemoteHosts:
        """Connect. Raises LaunchError that names a host which cannot be reached."""
        for name in self._names:
            with self._log(name).open("wb") as log:
                self._shells[name] = subprocess.Popen(
                    ["ssh", *RemoteShell().options(), "-M", "-S", self._control(name), name, "sh"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C reaches the comparison alone
                    preexec_fn=partial(end_with_parent, signal.SIGTERM),
                )
        try:
            for name in self._names:
                # Where hosts share their temporary files the folder exists, with this host's log.
                seen = f"test -e {shlex.quote(str(self._log(name)))} && exit {_SHARED}"
                made = shlex.quote(str(self._folder))
                reply = self._run(name, f"( {seen}; mkdir -m 700 {made} )")
                if reply not in (0, _SHARED):
                    why = " ".join(self._log(name).read_text(errors="replace").split())
                    raise LaunchError(f"ssh to {name}: {why or _NO_REPLY}")
                if reply == 0:
                    self._to_clear.append(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._to_clear:
            self._run(name, f"rm -rf {shlex.quote(str(self._folder))}")
        for shell in self._shells.values():
            shell.terminate()
            shell.communicate()
        self._shells = {}

    def host_at(self, place: str) -> str | None:
        """Return the host of a rank that has connected at the address of `forward` with `place`
        after it; None for this one.
        """
        return self._names[abs(int(place))] if place else None  # -0, -1

    def forward(self, socket: Path) -> None:
        """Make a socket on every host that leads to `socket` here; see `hvdtrain_probe.connect`.

        Raises LaunchError.
        """
        for number, name in enumerate(self._names):
            sockets = f"{socket}-{number}:{socket}"
            line = ["ssh", "-S", self._control(name), "-O", "forward", "-R", sockets, name]
            done = run(line, env=os.environ, timeout_s=_REPLY_S)
            if done.code != 0:
                why = done.stderr.strip() or f"code {done.code}" if done.code else _NO_REPLY
                raise LaunchError(f"ssh to {name} cannot forward a socket: {why}")

    def send_signal(self, name: str, pids: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to processes on a host, and to those that they have started, such as the
        workers of a DataLoader; those that have ended do not matter.
        """
        kind = number.name.removeprefix("SIG")
        each = f'kill -s {kind} "$p"; set -- "$@" $(cat /proc/$p/task/*/children)'
        walk = f"while [ $# -gt 0 ]; do p=$1; shift; {each}; done"
        self._run(name, f"( set -- {' '.join(map(str, pids))}; {walk} ) 2>&-")

    def _run(self, name: str, command: str) -> int | None:
        """Run a command on a host; return its exit code, None if the connection does not reply."""
        shell = self._shells[name]
        assert shell.stdin is not None
        assert shell.stdout is not None
        try:
            shell.stdin.write(f"{command}; echo {_REPLY}$?\n".encode())
            shell.stdin.flush()
        except OSError:  # ssh has ended
            return None
        # Not readline(): what it had buffered would not make the pipe ready for select().
        output, pipe = b"", shell.stdout.fileno()
        deadline = time.monotonic() + _REPLY_S
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(pipe, 4096)
            if not piece:  # ssh has ended
                return None
            output += piece
            if found := re.search(rf"{_REPLY}(\d+)\n".encode(), output):
                return int(found[1])
        return None

    def _control(self, name: str) -> str:
        return str(self._folder / f"ssh-{self._names.index(name)}")

    def _log(self, name: str) -> Path:
        return Path(f"{self._control(name)}.log")
