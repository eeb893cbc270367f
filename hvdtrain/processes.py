"""Other processes: whether one still runs, and how to stop a child with all that it has started.

Used by `launcher_watch` and `horovod_build`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import psutil


def is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended. A zombie has: its parent may never wait for it."""
    try:
        ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return process.is_running() and process.status() not in ended
    except psutil.Error:
        return False


def stop_tree(child: subprocess.Popen[str], grace_s: float = 5.0) -> None:
    """Stop a child that leads its own session: SIGTERM to its group, then SIGKILL to its tree.

    Open MPI and horovodrun put their ranks into other process groups, so the group is not enough:
    the descendants are listed while their parents are still alive. Return when all have ended, or
    after two times `grace_s`.
    """
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(child.pid).children(recursive=True)
    _signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    _signal_group(child.pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()
    child.wait()
    # A compiler that is still dying would write into a folder that is removed next.
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(map(is_running, descendants)):
        time.sleep(0.02)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
