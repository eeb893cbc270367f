"""`python -m hvdtrain.launch.supervisor [PORT]`: run one host's ranks, leave no process behind.

The launchers start one on each host, on other hosts by ssh, and keep the connection to it. All but
the text of the ranks is one line for each message:

    launcher                                        supervisor
    stdin: {"env": {...}}, variables of all    ->
                                               <-   stdout: [0]<ready>:PORT, one that is free
    {"start": ID, "command": [...], ...}       ->   starts a rank
                                               <-   [ID]<stdout>:line, [ID]<stderr>:line
    {"signal": "SIGTERM"}, {"end": ID}         ->   signals all ranks; ends one
                                               <-   [ID]<exit>:CODE
                                               <-   [0]<signal>:15, for its own SIGTERM
    stdin closes, also when a launcher dies    ->   ends all that the ranks have started

It is two processes. The inner one has the loop and starts the ranks; the outer one, its guard, ends
the ranks if the inner one is killed. The inner one ends them if the guard is killed. Both adopt
orphans: every process that the ranks have started, at any depth, stays their descendant. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from hvdtrain.launch.output import LineReader
from hvdtrain.launch.placement import free_port
from hvdtrain.system import signals
from hvdtrain.system.processes import adopt_orphans, end_descendants, signal_group

GRACE_S = 5.0  # from SIGTERM to SIGKILL of a rank that must end
_CANNOT_START = 127  # exit code, as a shell's
_MAX_PIECE = 1 << 16  # of a line, in bytes
_NEVER = 1e9  # by the time since the host's start; `select` takes no infinity
_LOST = b"[0]<supervisor>:\n"


def main(arguments: Sequence[str]) -> int:
    """Run the ranks until stdin closes; return 0, or 1 if the loop has failed."""
    adopt_orphans()
    read, write = os.pipe()
    inner = os.fork()
    if not inner:
        os.close(write)  # the guard's end alone stays open, until the guard ends
        return _Loop(read).run(*map(int, arguments))
    signals.set_handler(lambda number, frame: os.kill(inner, number), signal.SIGTERM)
    if os.waitpid(inner, 0)[1] == 0:
        return 0
    # Before the ranks end: those of other hosts fail without them. Not to stdout, where a line of
    # the inner process may be unfinished.
    with contextlib.suppress(OSError):  # the launcher has ended, too
        if select.select([], [2], [], 0)[1]:  # a full pipe must not block
            os.write(2, _LOST)
    end_descendants(signal.SIGTERM, GRACE_S)
    return 1


class _Loop:
    """The loop of the inner process."""

    def __init__(self, guard: int) -> None:
        # In this order: of a guard that was killed on another host, sshd closes stdin, too.
        self._inputs = [guard, 0]
        self._lines = LineReader()
        self._ranks: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # number, by process
        self._pipes: dict[Any, tuple[bytes, bytes]] = {}  # mark, and the unfinished line
        self._unsent = bytearray()
        self._kill_at: dict[int, float] = {}  # by process group
        self._end_at = _NEVER  # once stdin has closed: of SIGKILL to all
        self._has_children = False

    def run(self, port: int = 0) -> int:
        """Run until all has ended; return 0."""
        adopt_orphans()
        os.set_blocking(1, False)
        wake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signals.set_handler(lambda number, frame: None, signal.SIGCHLD, signal.SIGTERM)
        # It gets the numbers of these signals.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._report(0, "ready", free_port(port))
        while self._inputs or (
            time.monotonic() < self._end_at and (self._has_children or self._pipes or self._unsent)
        ):
            inputs = [wake, *self._inputs, *([] if self._unsent else self._pipes)]
            timeout_s = max(0.0, min([self._end_at, *self._kill_at.values()]) - time.monotonic())
            ready = select.select(inputs, [1] if self._unsent else [], [], timeout_s)[0]
            self._send(b"")
            for each in ready:
                if each == wake:
                    if signal.SIGTERM in os.read(wake, 1 << 10):  # scancel signals each step
                        self._report(0, "signal", signal.SIGTERM)
                    self._reap()
                elif each in self._inputs:
                    self._handle_input(each)
                else:
                    self._relay(each)
            for group, due in [*self._kill_at.items()]:
                if time.monotonic() >= due:
                    signal_group(group, signal.SIGKILL)
                    del self._kill_at[group]
        end_descendants(signal.SIGKILL, GRACE_S)
        os.set_blocking(1, True)
        self._send(b"")
        while any([self._relay(pipe) for pipe in [*self._pipes]]):
            pass
        return 0

    def _handle_input(self, fd: int) -> None:
        """Carry out the messages of the launcher; end all when it, or the guard, has ended."""
        lines, is_open = self._lines.read(fd)
        for message in map(json.loads, lines if is_open else []):
            if "start" in message:
                self._start(message)
            elif "end" in message:
                for pid, (number, _) in self._ranks.items():
                    if number == message["end"]:
                        self._end(pid)
            elif "signal" in message:
                for pid in self._ranks:
                    signal_group(pid, signal.Signals[message["signal"]])
            else:
                os.environ.update(message["env"])
        if not is_open:
            if fd:  # the guard's
                self._send(_LOST)  # before the exits of the ranks
            self._inputs = []
            self._end_at = time.monotonic() + GRACE_S
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGTERM)
            self._reap()

    def _start(self, message: dict[str, Any]) -> None:
        """Start a rank, in a session of its own."""
        number, command = message["start"], message["command"]
        env = {**message["defaults"], **os.environ, **message["env"]}
        try:
            if error_file := env.get("TORCHELASTIC_ERROR_FILE"):
                os.makedirs(os.path.dirname(error_file), exist_ok=True)
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            for line in f"cannot start {command[0]}: {error}".splitlines():
                self._report(number, "stderr", line)
            self._report(number, "exit", _CANNOT_START)
            return
        process.returncode = 0  # `_reap` waits for it
        self._ranks[process.pid] = number, process
        self._has_children = True
        for kind in ("stdout", "stderr"):
            pipe = getattr(process, kind)
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe] = f"[{number}]<{kind}>".encode(), b""

    def _reap(self) -> None:
        """Report the ranks that have ended; also reap adopted orphans, as init does. First those
        that were killed, which others may have lost; last those that SIGTERM has ended.
        """
        codes = {}
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in self._ranks:
                    codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            self._has_children = False
        for pid in sorted(codes, key=lambda pid: (codes[pid] == -signal.SIGTERM, codes[pid] >= 0)):
            number, process = self._ranks.pop(pid)
            for pipe in (process.stdout, process.stderr):  # its last lines come before its exit
                self._relay(pipe)
            self._report(number, "exit", codes[pid])
            self._end(pid)

    # Ending

    def _end(self, group: int) -> None:
        """End a rank, or what it has left in its process group: SIGTERM, then SIGKILL."""
        self._kill_at.pop(group, None)
        if signal_group(group, signal.SIGTERM):
            self._kill_at[group] = time.monotonic() + GRACE_S

    # Output

    def _report(self, number: int, kind: str, value: object) -> None:
        self._send(f"[{number}]<{kind}>:{value}\n".encode())

    def _relay(self, pipe: Any) -> bool:
        """Send what a pipe holds, each line after the mark of its pipe and ":"; return whether it
        held anything.

        A piece that ends with a carriage return (a progress bar), has no end, or is too long, is a
        line after "+" instead of ":".
        """
        data = pipe.read(_MAX_PIECE) if pipe in self._pipes else None
        if data is None:  # `_reap` has read it, or closed it
            return False
        mark, rest = self._pipes[pipe]
        *pieces, rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", rest + data)
        if not data or len(rest) > _MAX_PIECE:
            pieces, rest = [*pieces, rest], b""
        marked = [
            (b":%b" if piece.endswith(b"\n") else b"+%b\n") % piece for piece in pieces if piece
        ]
        self._send(b"".join(mark + line for line in marked))
        self._pipes[pipe] = mark, rest
        if not data:
            pipe.close()
            del self._pipes[pipe]
        return bool(data)

    def _send(self, data: bytes) -> None:
        """Write to the launcher. What it does not take yet is kept, and no pipe is read then."""
        self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: os.write(1, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the launcher has ended: stdin closes, too
            self._unsent.clear()


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
