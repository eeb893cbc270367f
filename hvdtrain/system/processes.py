"""Other processes: whether one still runs, and how to stop a child with all that it has started.

Used by `launcher_watch`, `horovod_build` and `launch`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)  # not loaded between fork and exec, which can deadlock


def is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended. A zombie has: its parent may never wait for it."""
    try:
        ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return process.is_running() and process.status() not in ended
    except psutil.Error:
        return False


class WatchedProcess:
    """Another process, which need not be a child. Its end is seen through a descriptor, closed with
    this object, and where the kernel or this Python has none for a process (before Linux 5.3), in
    /proc.
    """

    def __init__(self, pid: int) -> None:
        self._fd, self._process = -1, None
        try:
            self._fd = os.pidfd_open(pid)
            # Not at the end of Python, while a thread may still watch it.
            weakref.finalize(self, os.close, self._fd).atexit = False
        except ProcessLookupError:  # it has ended already
            pass
        except (AttributeError, OSError):
            with contextlib.suppress(psutil.Error):
                self._process = psutil.Process(pid)

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        if self._fd < 0:
            return self._process is None or not is_running(self._process)
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        return bool(waiting.poll(0))


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends: they stay below it."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot adopt orphans (prctl)")


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this signal to this process when the thread that has started it ends."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot end with the parent (prctl)")


def end_descendants(number: signal.Signals, grace_s: float = 5.0) -> None:
    """Send a signal to every process below this one, and SIGKILL to those that have not ended after
    `grace_s`. Return when none is left, or after two times `grace_s`.
    """
    myself, deadline = psutil.Process(), time.monotonic() + 2 * grace_s
    while (left := myself.children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(left, 0.1 if number == signal.SIGKILL else grace_s)
        number = signal.SIGKILL  # also for what they have started meanwhile


def stop_tree(child: subprocess.Popen[str], grace_s: float = 5.0) -> None:
    """Stop a child that leads its own session: SIGTERM to its group, then SIGKILL to its tree.

    Open MPI and horovodrun put their ranks into other process groups, so the group is not enough:
    the descendants are listed while their parents are still alive. Return when all have ended, or
    after two times `grace_s`.
    """
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(child.pid).children(recursive=True)
    signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    signal_group(child.pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()
    child.wait()
    # A compiler that is still dying would write into a folder that is removed next.
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(map(is_running, descendants)):
        time.sleep(0.02)


def signal_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to a process group; return whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def with_descendants(pids: Iterable[int]) -> list[int]:
    """Return processes and those that they have started. psutil would look at all of the host."""
    found: list[int] = []
    for pid in pids:
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += with_descendants(map(int, children.read_text().split()))
    return found
