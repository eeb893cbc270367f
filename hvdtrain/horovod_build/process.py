"""Child processes that leave nothing behind, and signals that can wait."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0


@dataclass(frozen=True)
class Done:
    """How a child ended. `code` is None when it ran out of time, 127 when it does not exist."""

    code: int | None
    stdout: str
    stderr: str = ""

    @property
    def output(self) -> str:
        """Both streams, standard error last."""
        return f"{self.stdout}\n{self.stderr}".strip()


def own_environment() -> dict[str, str]:
    """Return a copy of the environment in which this interpreter's programs come first."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join(
        [os.path.dirname(sys.executable), env.get("PATH") or os.defpath],
    )
    return env


def run(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60.0) -> Done:
    """Run a command to its end or its time limit and collect its output. Raises nothing."""
    try:
        with started(command, env=env, stderr=subprocess.PIPE) as child:
            try:
                out, err = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                stop(child)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = child.communicate(timeout=GRACE_S)
                    return Done(None, out, err)
                return Done(None, "")
            return Done(child.returncode, out, err)
    except OSError as error:
        return Done(127, "", str(error))


@contextlib.contextmanager
def started(
    command: Sequence[str], *, env: Mapping[str, str], stderr: int = subprocess.STDOUT
) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own; on the way out its whole tree is gone.

    It starts in the root folder, so that no file of the working folder shadows a Python module.
    """
    child = subprocess.Popen(
        command,
        env=dict(env),
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            stop(child)
        for pipe in (child.stdout, child.stderr):
            if pipe:
                pipe.close()


def stop(child: subprocess.Popen[str]) -> None:
    """End a child and all below it: a polite signal to its group, then SIGKILL to what is left.

    Open MPI and horovodrun put their ranks into groups of their own, so the group is not enough:
    the descendants are listed while their parents still live.
    """
    below = _descendants(child.pid)
    _signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    _signal_group(child.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    child.wait()
    # A compiler that is still dying would write into the folder that is removed next.
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and any(_is_alive(pid) for pid in below):
        time.sleep(0.02)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that they unwind as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with _handlers(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), leave)):
        yield


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back until the block is done, then let them act."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    with _handlers(dict.fromkeys(SIGNALS, note)):
        yield
    if arrived:
        signal.raise_signal(arrived[0])


def last_line(text: str) -> str:
    """Return the line of an output that says most: an exception's, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: ", line)]
    return (errors or lines or ["no output"])[-1]


@contextlib.contextmanager
def _handlers(handlers: Mapping[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    # Only the main thread may set handlers; elsewhere there are no signals to handle either.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _descendants(pid: int) -> list[int]:
    """List the processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            _, parent = _state_and_parent(int(entry))
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _is_alive(pid: int) -> bool:
    return _state_and_parent(pid)[0] not in "ZX"


def _state_and_parent(pid: int) -> tuple[str, int]:
    """Read both from /proc, as psutil may be what is missing here; ("X", -1) once it is gone."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name is in parentheses and may hold anything, these as well.
            state, parent, *_ = file.read().rpartition(")")[2].split()
            return state, int(parent)
    return "X", -1
