"""End this rank when its launcher has ended: a launcher killed with -9 ends none of its ranks.

Used by the commands and by `rendezvous`. A thread polls the launcher's process. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import threading
import time

import psutil

from hvdtrain.job.world import World, is_mpi, rank_variable
from hvdtrain.system.processes import is_running

_POLL_S = 1.0
_GRACE_S = 3.0  # from SIGTERM to SIGKILL of a rank whose launcher has ended
# In the line that `horovodrun --mpi` gives to /bin/sh (horovod/runner/mpi_run.py)
_HOROVODRUN_FLAGS = ("--tag-output", "-mca pml ob1", "-mca btl ^openib")

launcher_has_ended = threading.Event()
"""Set once the thread has found that the launcher has ended."""

_threads: list[threading.Thread] = []  # at most one


def end_with_launcher(world: World) -> None:
    """Watch the launcher from a thread, and end this rank once the launcher has ended.

    Not collective; a second call does nothing. The launcher is the first ancestor without this
    rank's variable: a shell in between (`mpirun bash -c ...`) has it too. Not PR_SET_PDEATHSIG,
    which would watch that shell, or the launcher's thread that started this process.
    """
    variable = rank_variable(world)
    if _threads or variable is None:
        return
    try:
        launcher = first_ancestor_without(variable)
        own_name = not is_mpi(world) or world.launcher in ("jsrun", "pals")
        watched = {world.started_by if own_name else "mpirun": launcher}
        shell = launcher.parent() if world.launcher == "openmpi" else None
        if shell is not None and _is_horovodrun(shell):
            watched["horovodrun --mpi"] = shell
    except (psutil.Error, OSError):  # all ancestors have the variable, or /proc is not mounted
        return
    thread = threading.Thread(target=_watch, args=(world, watched), daemon=True, name="launcher")
    _threads.append(thread)
    thread.start()


def _watch(world: World, watched: dict[str, psutil.Process]) -> None:
    """Wait until one of the processes has ended; then end this rank."""
    while not (ended := [name for name, process in watched.items() if not is_running(process)]):
        time.sleep(_POLL_S)
    name = f"{ended[-1]} (process {watched[ended[-1]].pid})"
    launcher_has_ended.set()
    message = f"[{world}] error: {name} has ended, so this rank ends too\n"
    with contextlib.suppress(OSError):  # stderr may have ended with the launcher
        if select.select([], [2], [], 0)[1]:  # a full pipe must not block this thread
            os.write(2, message.encode())
    _delete_segments()
    os.kill(os.getpid(), signal.SIGTERM)  # lets the run record its end
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _delete_segments() -> None:
    """Delete the files of Open MPI's shared memory that this rank has mapped: mpirun does so as it
    ends, but not if it is killed. The mappings stay until the ranks end. Open MPI 4 names them
    vader_segment, 5 sm_segment.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for path in set(re.findall(r"(/dev/shm/(?:vader|sm)_segment\S+)\n", maps.read())):
            with contextlib.suppress(OSError):  # another rank has
                os.unlink(path)


def first_ancestor_without(variable: str) -> psutil.Process:
    """Return the nearest ancestor whose environment lacks `NAME=value`: the launcher of a rank.

    Not collective. Raises psutil.Error if an ancestor has ended.
    """
    name, _, value = variable.partition("=")
    process = psutil.Process(os.getppid())
    with contextlib.suppress(psutil.AccessDenied):  # another user's, such as slurmstepd
        while process.environ().get(name) == value:
            process = psutil.Process(process.ppid())
    return process


def _is_horovodrun(process: psutil.Process) -> bool:
    """Whether a process is the shell that `horovodrun --mpi` becomes, to run one mpirun.

    That shell ends after mpirun, unless it is killed, which mpirun does not notice. A user's own
    shell, such as `sh -c "mpirun ... & sleep 5"`, may end first: its mpirun has other flags.
    """
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    match words:
        case [shell, "-c", line] if os.path.basename(shell) == "sh" and line.startswith("mpirun "):
            return all(f" {flags} " in line for flags in _HOROVODRUN_FLAGS)
    return False
