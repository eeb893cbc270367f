"""The live ranks of one arm: started by its real launcher, standing still but for a call.

While one arm works the ranks of all others are stopped (SIGSTOP): idle ranks of some backends poll,
and would take time from the one that is measured. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, cast

END_S = 10.0
_CLEAR_S = 10.0
_WORDS_S = 20.0  # for a launcher to end and say why, once a rank has ended
_CLOSING_S = 1.0  # for a process that ends to close all that it has open
# How launchers say which rank ended first, and with what.
_FIRST_TO_END = (
    r"Root Cause \(first observed failure\):.*?rank +: (\d+).*?exitcode +: (-?\d+)",  # torchrun
    r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code: +(\d+)",  # Open MPI
    r"Process name: (\d+)\s+Exit code: +(\d+)",  # horovodrun
    r"noticed that process rank (\d+) with PID .*? exited on signal (\d+)",  # Open MPI
)
_PDEATHSIG = 1  # of prctl(2)


class ArmFailed(Exception):
    """An arm that cannot go on; the text says why, in one line."""


class Ranks:
    """All ranks of one arm. They begin to start when this is made; `meet` waits for them."""

    def __init__(
        self,
        command: list[str],
        size: int,
        env: Mapping[str, str],
        address: Path,
        log: Path,
        launched: bool = True,
    ) -> None:
        """`command` gets `address` as its last argument: of a socket, in a folder of ours alone.

        Not `launched`: it is no launcher, but the only rank itself.
        """
        self.size, self.log = size, log
        self.pids: list[int] = []
        self._connections: list[Connection] = []
        self._doing = "start"
        self._released = False
        self._listener = Listener(str(address), "AF_UNIX", backlog=size)
        with open(self.log, "ab") as output:
            self._log_begin = output.tell()  # of this start
            try:
                self.process = subprocess.Popen(
                    [*command, str(address)],
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the comparison
                    preexec_fn=_end_with_parent if launched else _die_with_parent,
                )
            except OSError as error:
                self._listener.close()
                raise ArmFailed(f"cannot start {command[0]}: {error.strerror}") from None

    def meet(self, timeout_s: float) -> None:
        """Wait until every rank has connected. They run; `finish` stops them. Raises ArmFailed."""
        by_rank: dict[int, tuple[int, Connection]] = {}
        socket = self._listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(0.2)
        deadline = time.monotonic() + timeout_s
        while len(by_rank) < self.size:
            try:
                connection = self._listener.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise ArmFailed(f"did not start: {self._last_words()}") from None
                if time.monotonic() > deadline:
                    missing = sorted(set(range(self.size)) - set(by_rank))
                    raise ArmFailed(f"ranks {missing} did not start in {timeout_s:.0f} s") from None
                continue
            try:
                rank, pid = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                raise ArmFailed(f"a rank ended as it started: {self._last_words()}") from None
            by_rank[rank] = (pid, connection)
        self._listener.close()
        for rank in sorted(by_rank):
            self.pids.append(by_rank[rank][0])
            self._connections.append(by_rank[rank][1])
        if sorted(by_rank) != list(range(self.size)):
            raise ArmFailed(f"started ranks {sorted(by_rank)}, not 0 to {self.size - 1}")

    def call(self, what: str, *arguments: object, timeout_s: float = 300.0) -> list[Any]:
        """Let every rank do `what`, and return their answers in rank order. Raises ArmFailed."""
        self.begin(what, *arguments)
        return self.finish(timeout_s)

    def begin(self, what: str, *arguments: object) -> None:
        """Have every rank begin to do `what`. Raises ArmFailed."""
        self._doing = what
        self._signal(signal.SIGCONT)
        self._send((what, *arguments))

    def finish(self, timeout_s: float = 300.0) -> list[Any]:
        """Wait for what has begun, stop the ranks, and return their answers in rank order.

        Raises ArmFailed.
        """
        deadline = time.monotonic() + timeout_s
        answers: list[Any] = [None] * self.size
        waiting = set(range(self.size))
        while waiting:
            rank_of = {self._connections[rank].fileno(): rank for rank in waiting}
            # No polling: this process shares the cores with the ranks that are timed.
            for ready in wait(list(rank_of), max(0.0, deadline - time.monotonic())):
                rank = rank_of[cast("int", ready)]
                waiting.discard(rank)
                answers[rank] = self._receive(rank, waiting)
            if waiting and time.monotonic() > deadline:
                raise ArmFailed(
                    f"ranks {sorted(waiting)} did not finish {self._doing!r} in {timeout_s:.0f} s"
                )
        self._signal(signal.SIGSTOP)
        return answers

    def _receive(self, rank: int, others: set[int]) -> Any:
        """The answer of a rank. `others` have not been heard yet. Raises ArmFailed."""
        try:
            ok, answer = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            raise self._ended([rank, *filter(self._has_ended, others)]) from None
        if not ok:
            # One that is gone is why this one failed. Its connection to us may be closed last.
            deadline = time.monotonic() + _CLOSING_S
            if gone := [rank for rank in others if self._has_ended(rank, deadline)]:
                raise self._ended(gone)
            raise ArmFailed(answer)
        return answer

    def _ended(self, gone: list[int]) -> ArmFailed:
        """What to say of ranks that are gone: the launcher ends the others after the first."""
        words, doing = self._last_words(), repr(self._doing)
        for pattern in _FIRST_TO_END:
            if found := re.search(pattern, self._text(), flags=re.DOTALL):
                rank, code = found.groups()
                what = "signal" if "signal" in pattern else "code"
                return ArmFailed(f"rank {rank} ended, with {what} {code}, during {doing}: {words}")
        names = ", ".join(map(str, sorted(gone)))
        who = f"rank {names}" if len(gone) == 1 else f"ranks {names}"
        return ArmFailed(f"{who} ended during {doing}: {words}")

    def _has_ended(self, rank: int, deadline: float = 0.0) -> bool:
        """Whether a rank is gone, or is by then. Takes its answer, if there is one."""
        connection = self._connections[rank]
        try:
            if connection.poll(max(0.1, deadline - time.monotonic())):
                connection.recv_bytes()
        except (EOFError, OSError):
            return True
        return False

    def pause(self) -> None:
        """Stop the ranks until the next call."""
        self._signal(signal.SIGSTOP)

    def release(self) -> None:
        """Let the ranks end as a program does; `end` waits for it."""
        if self._released:
            return
        self._released = True
        with contextlib.suppress(ArmFailed):
            self._signal(signal.SIGCONT)
            self._send(None)

    def end(self, gently: bool = True) -> None:
        """End launcher and ranks, and leave nothing. Twice is safe."""
        if gently and self._connections and self.process.poll() is None:
            self.release()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self.process.poll() is None:
            # A launcher clears up after its ranks if it is let: Open MPI's files in /dev/shm, say.
            _kill(self.pids, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        _kill(self.pids, signal.SIGKILL)
        self.pids = []
        self.process.kill()
        self.process.wait()
        self._clear()

    def _clear(self) -> None:
        """Kill what the launcher has left, after a moment: horovodrun's resource tracker removes
        its semaphores once the launcher has ended.
        """
        deadline = time.monotonic() + _CLEAR_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.01)
            os.killpg(self.process.pid, signal.SIGKILL)

    def _send(self, message: object) -> None:
        data = pickle.dumps(message)
        gone = []
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(data)
            except OSError:
                gone.append(rank)
        if gone:
            raise self._ended(gone)

    def _signal(self, number: int) -> None:
        _kill(self.pids, number)

    def _text(self) -> str:
        """What launcher and ranks have printed."""
        return self.log.read_bytes()[self._log_begin :].decode(errors="replace")

    def _last_words(self) -> str:
        """The line of the log that says most: the last error, or else the last line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_WORDS_S)
        text = self._text()
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line.strip("-=* ")]
        errors = [line for line in lines if "rror:" in line or "hvdtrain:" in line]
        errors = [line for line in errors if not line.endswith("ChildFailedError:")]  # torchrun's
        code = self.process.poll()
        said = errors[-1] if errors else _notice(text) or (lines or ["it said nothing"])[-1]
        return f"{said} (exit code {code})" if code is not None else said


def _notice(text: str) -> str:
    """The beginning of Open MPI's last notice, which it puts between lines of dashes."""
    blocks = re.split(r"^-{20,}\s*$", text, flags=re.MULTILINE)
    return " ".join(blocks[-2].split())[:200] if len(blocks) > 2 else ""


def _kill(pids: list[int], number: int) -> None:
    """Signal ranks and what they have started: each is the leader of a process group."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def _end_with_parent() -> None:
    """Have the launcher end its ranks should the comparison itself be killed. In the child."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


def _die_with_parent() -> None:
    """The same for a rank itself, which as it stands still would not hear of SIGTERM."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
