"""Run child processes, stop their whole trees, and defer signals or turn them into exceptions.

Used by every other module here that runs a program.
"""

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
GRACE_S = 5.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Done:
    """The result of a child. `code` is None after a timeout, 127 if the program cannot start."""

    code: int | None
    stdout: str
    stderr: str = ""

    @property
    def output(self) -> str:
        """Both streams, standard error last."""
        return f"{self.stdout}\n{self.stderr}".strip()


def own_environment() -> dict[str, str]:
    """Return a copy of the environment with this interpreter's folder first on PATH."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join(
        [os.path.dirname(sys.executable), env.get("PATH") or os.defpath],
    )
    return env


def run(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60.0) -> Done:
    """Run a command until it exits or its time is up; return its output. Never raises OSError."""
    try:
        with started(command, env=env, stderr=subprocess.PIPE) as child:
            try:
                out, err = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                stop(child)
                # Read the rest, for a limited time: a detached process may hold the pipe open.
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
    """Start a command in its own session; if it still runs after the block, stop its whole tree.

    Its working directory is /, so that no local file shadows a Python module.
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
    """Stop a child and its descendants: SIGTERM to its group, then SIGKILL to the rest.

    Open MPI and horovodrun put their ranks into other process groups, so the group is not enough:
    the descendants are listed while their parents are still alive.
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
    """Turn SIGTERM and SIGHUP into SystemExit, so that they unwind the stack as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with _handlers(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), leave)):
        yield


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP until the block ends; then raise the first that arrived."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    with _handlers(dict.fromkeys(SIGNALS, note)):
        yield
    if arrived:
        signal.raise_signal(arrived[0])


def last_line(text: str) -> str:
    """Return the most useful line of an output: the last one with an exception, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: ", line)]
    return (errors or lines or ["no output"])[-1]


@contextlib.contextmanager
def _handlers(handlers: Mapping[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    # Python lets only the main thread set handlers, and runs them only there.
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
    """Return both, read from /proc as psutil may be missing; ("X", -1) if there is no process."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name is in parentheses, and may itself contain parentheses and spaces.
            state, parent, *_ = file.read().rpartition(")")[2].split()
            return state, int(parent)
    return "X", -1
