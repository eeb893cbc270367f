"""The processes of one arm: its real launcher and its ranks, which are stopped except in a call.

`arm_pool` starts, calls and ends them. While one arm runs, the ranks of all others are stopped,
because idle ranks of some backends poll and would take CPU time from the timed arm. Imports no
torch.

    comparison (`ArmProcess`)                         each rank (the probe)
    meet:   listen, start the launcher   <----   connect: (rank, ranks, pid, host)
    begin:  SIGCONT, (call, *arguments)  ---->   run the call
    finish: receive from all, SIGSTOP    <----   (True, answer) or (False, error text)
    end:    SIGCONT, None                ---->   close the backend, exit
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil

from hvdtrain.launch.real_launchers import error_line, first_to_end
from hvdtrain.launch.remote_hosts import RemoteHosts
from hvdtrain.system.processes import end_with_parent, with_descendants

END_S = 10.0  # for launcher and ranks to exit by themselves
_CLEAR_S = 10.0  # for processes that the launcher leaves behind to exit
_EXIT_S = 20.0  # for a launcher to exit and print the reason, after a rank has ended
_CLOSING_S = 1.0  # for a process that exits to close its connection
_PORT_IN_USE = re.compile("EADDRINUSE|Address already in use|address already in use")


class ArmFailed(Exception):
    """An arm cannot continue; the text gives the reason in one line."""


class _Rank(NamedTuple):
    pid: int
    host: str | None
    """None for this one."""
    connection: Connection
    about: str
    """The optimizer whose step it has taken."""


class ArmProcess:
    """All ranks of one arm. The constructor starts the launcher; `meet` waits for the ranks."""

    def __init__(
        self,
        command: list[str],
        env: Mapping[str, str],
        address: Path,
        log: Path,
        remote: RemoteHosts | None = None,
    ) -> None:
        """Start `command`, whose ranks connect to `address`, a socket's path in a private folder.

        `remote`: other hosts that may have ranks. Raises ArmFailed or LaunchError.
        """
        self.size, self.log = 0, log
        self._remote = remote
        self._ranks: list[_Rank] = []
        self._call_name = "start"
        self._released = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(socket.SOMAXCONN)
        self._listener.settimeout(0.2)
        if remote is not None:
            remote.forward(address)
        with open(self.log, "ab") as output:
            self._log_begin = output.tell()  # the log may have output of earlier starts
            try:
                self.process = subprocess.Popen(
                    command,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the comparison alone
                    # If the comparison dies. A launcher then terminates its ranks.
                    preexec_fn=partial(end_with_parent, signal.SIGTERM),
                )
            except OSError as error:
                self._listener.close()
                raise ArmFailed(f"cannot start {command[0]}: {error.strerror}") from None

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank has connected; they keep running. Raise ArmFailed."""
        ranks: dict[int, _Rank] = {}
        deadline = time.monotonic() + timeout_s
        while not ranks or len(ranks) < self.size:
            try:
                connection = Connection(self._listener.accept()[0].detach())
                rank, self.size, pid, place, about = pickle.loads(connection.recv_bytes())
            except TimeoutError:
                if self.process.poll() is not None:
                    raise ArmFailed(
                        f"the command took no optimizer step: {self._error_line()}"
                    ) from None
                if time.monotonic() > deadline:
                    raise ArmFailed(_missing_text(ranks, self.size, timeout_s)) from None
                continue
            except (EOFError, OSError):
                raise ArmFailed(
                    f"a rank ended before its first step: {self._error_line()}"
                ) from None
            host = None if self._remote is None else self._remote.host_at(place)
            ranks[rank] = _Rank(pid, host, connection, about)
        self._listener.close()
        self._ranks = [ranks[rank] for rank in sorted(ranks)]
        if sorted(ranks) != list(range(self.size)):
            raise ArmFailed(f"started ranks {sorted(ranks)}, not 0 to {self.size - 1}")

    def call(self, what: str, *arguments: object, timeout_s: float = 300.0) -> list[Any]:
        """Run the call `what` on every rank; return the answers in rank order. Raise ArmFailed."""
        self.begin(what, *arguments)
        return self.finish(timeout_s)

    def begin(self, what: str, *arguments: object) -> None:
        """Continue the ranks and send them the call `what`, without waiting. Raise ArmFailed."""
        self._call_name = what
        self._signal(signal.SIGCONT)
        self._send((what, *arguments))

    def finish(self, timeout_s: float = 300.0) -> list[Any]:
        """Wait for the call's answers, stop the ranks, and return the answers in rank order.

        Raise ArmFailed if a rank fails, ends, or does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        answers: list[Any] = [None] * self.size
        waiting = set(range(self.size))
        while waiting:
            rank_of = {self._ranks[rank].connection.fileno(): rank for rank in waiting}
            # No polling: this process shares the cores with the ranks that are timed.
            for ready in wait(list(rank_of), max(0.0, deadline - time.monotonic())):
                rank = rank_of[cast("int", ready)]
                waiting.discard(rank)
                answers[rank] = self._receive(rank, waiting)
            if waiting and time.monotonic() > deadline:
                late = f"ranks {sorted(waiting)}"
                raise ArmFailed(f"{late} did not finish {self._call_name!r} in {timeout_s:.0f} s")
        self.pause()
        return answers

    def _receive(self, rank: int, others: set[int]) -> Any:
        """Return the answer of a rank. `others` have not answered yet. Raise ArmFailed."""
        try:
            ok, answer = pickle.loads(self._ranks[rank].connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ended([rank, *filter(self._has_ended, others)]) from None
        if not ok:
            # A rank that ended is why this one failed, but its connection may close a little later.
            deadline = time.monotonic() + _CLOSING_S
            if ended := [rank for rank in others if self._has_ended(rank, deadline)]:
                raise self._ended(ended)
            raise ArmFailed(answer)
        return answer

    def _ended(self, ended: list[int]) -> ArmFailed:
        """Return the error for ranks that ended. The launcher kills the others after the first, so
        its output decides which was first.
        """
        line, doing = self._error_line(), repr(self._call_name)
        if first := first_to_end(self._text()):
            return ArmFailed(f"{first}, during {doing}: {line}")
        names = ", ".join(map(str, sorted(ended)))
        return ArmFailed(f"rank{'s' * (len(ended) > 1)} {names} ended during {doing}: {line}")

    def _has_ended(self, rank: int, deadline: float = 0.0) -> bool:
        """Return whether a rank has ended, or ends by `deadline`. Discard its answer, if any."""
        connection = self._ranks[rank].connection
        try:
            if connection.poll(max(0.1, deadline - time.monotonic())):
                connection.recv_bytes()
        except (EOFError, OSError):
            return True
        return False

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return [rank.pid for rank in self._ranks]

    def cpu_s(self) -> float:
        """Return the CPU seconds of the ranks on this host and of the processes that they have
        started, such as the workers of a DataLoader. Those on other hosts do not count.
        """
        total = 0.0
        for pid in with_descendants(rank.pid for rank in self._ranks if rank.host is None):
            with contextlib.suppress(psutil.Error):
                total += sum(psutil.Process(pid).cpu_times()[:4])  # ended children included
        return total

    def pause(self) -> None:
        """Stop the ranks until the next call."""
        self._signal(signal.SIGSTOP)

    def release(self) -> None:
        """Send the ranks the message to exit normally; `end` waits for them."""
        if self._released:
            return
        self._released = True
        with contextlib.suppress(ArmFailed):
            self._signal(signal.SIGCONT)
            self._send(None)

    def end(self, gently: bool = True) -> None:
        """End launcher and ranks, and leave no process behind. Safe to call twice."""
        if gently and self._ranks and self.process.poll() is None:
            self.release()
            self._wait(END_S)
        self._listener.close()
        for rank in self._ranks:
            rank.connection.close()
        if self.process.poll() is None:
            # SIGTERM lets a launcher clean up after its ranks: Open MPI's files in /dev/shm.
            self._signal(signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            self._wait(END_S)
        self._signal(signal.SIGKILL)
        self._ranks = []
        self.process.kill()
        self.process.wait()
        self._end_group()

    def _wait(self, timeout_s: float) -> int | None:
        """Wait for the launcher to exit; return its exit code, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.process.returncode

    def _end_group(self) -> None:
        """Kill what is left of the launcher's process group, after a grace period: horovodrun's
        resource tracker removes its semaphores only after the launcher has ended.
        """
        deadline = time.monotonic() + _CLEAR_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)  # raises once the group is empty
                time.sleep(0.01)
            os.killpg(self.process.pid, signal.SIGKILL)

    def _send(self, message: object) -> None:
        data = pickle.dumps(message)
        ended = []
        for number, rank in enumerate(self._ranks):
            try:
                rank.connection.send_bytes(data)
            except OSError:
                ended.append(number)
        if ended:
            raise self._ended(ended)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the ranks and their child processes, on other hosts too."""
        for host in {rank.host for rank in self._ranks}:
            pids = [rank.pid for rank in self._ranks if rank.host == host]
            if host is not None and self._remote is not None:
                self._remote.send_signal(host, pids, number)
                continue
            for pid in with_descendants(pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _text(self) -> str:
        """Return what launcher and ranks have printed in this start."""
        return self.log.read_bytes()[self._log_begin :].decode(errors="replace")

    def _error_line(self) -> str:
        """Wait for the launcher to exit. Return the last error line of the log, else a notice, else
        the last line, with the exit code, and what to do where two arms want one port.
        """
        code = self._wait(_EXIT_S)
        line = error_line(self._text())
        if code is not None:
            line += f" (exit code {code})"
        if _PORT_IN_USE.search(self._text()):
            line += "; the arms run at the same time: write {port} in the command for a free port"
        return line


def _missing_text(ranks: Mapping[int, _Rank], size: int, timeout_s: float) -> str:
    """Return which ranks have not connected. `ranks`: those that have."""
    if ranks:
        first = min(ranks)
        missing = sorted(set(range(size)) - set(ranks))
        return (
            f"ranks {missing} took no optimizer step in {timeout_s:.0f} s, and rank {first} waits "
            f"after one of {ranks[first].about}: an optimizer that only some ranks "
            "use cannot be compared"
        )
    return (
        f"no rank took an optimizer step in {timeout_s:.0f} s; give a longer --timeout, check "
        "--optimizer, and start Python without -I and -E, which ignore PYTHONPATH"
    )
