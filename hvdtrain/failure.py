"""How a rank that fails ends the whole job: once said, named, and without leaving the others
waiting.

torchrun and horovodrun stop the other ranks when one exits with an error. Under a plain mpirun they
would wait for ever: the failed rank waits for them in MPI_Finalize, they for it in a collective.
There it must call MPI_Abort.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hvdtrain.errors import HvdtrainError, WorldError
from hvdtrain.world import World, agent_keeps_store, is_mpi, rank_variable

# Ranks that fail together speak in turn; the first to speak ends the job before the next one does.
_TURN_S = 0.5
_LONGEST_TURN_S = 3.0
# A rank that merely lost a peer lets that one say why.
_WITNESS_S = 3.0
# The flags, files and variables of a host are the same for its ranks: local rank 0 speaks for them,
# rank 0 for what all know. The others end, and say why, if that has not ended the job by then: they
# may have the problem alone. Once the ranks are in step none waits: it would be missed, and blamed.
_SPOKESMAN_S = 6.0
# Hydra (MPICH, Intel MPI) drops what a rank has just printed if it hears of its abort before it has
# read that: one time in ten or so.
_FORWARD_S = 0.3
_LONGEST_FORWARD_S = 5.0
# The line of an error that quotes what it was given: a number of 10,000 digits, say.
_LONGEST_LINE = 2000
# Ctrl-C in a terminal reaches a rank directly and again by way of its launcher.
_SAME_REQUEST_S = 2.0
_LAUNCHER_CHECK_S = 1.0
_ORPHAN_S = 3.0  # from SIGTERM to SIGKILL of a rank whose launcher has ended
# Of the line that `horovodrun --mpi` gives to /bin/sh (horovod/runner/mpi_run.py).
_HOROVODRUNS_FLAGS = ("--tag-output", "-mca pml ob1", "-mca btl ^openib")
_PYTHONS = ("python", "pypy", "pt_")


def exit_code(error: BaseException) -> int:
    """The exit code that `error` ends a command with: see `hvdtrain.errors`."""
    if isinstance(error, HvdtrainError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    return 1


@contextmanager
def guard(world: World) -> Iterator[None]:
    """End the job, with one report, where the block raises or exits with an error. Not collective.

    SIGTERM raises SystemExit(143) inside the block, and Ctrl-C KeyboardInterrupt, so that what is
    open is closed and its end recorded. A second request ends the process at once.
    """
    handler = _raise_once()
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    except BaseException as error:
        error = cause_of(error)
        if exit_code(error) == 0:
            raise
        end_job(world, error)
    finally:
        _requested.clear()
        for number, old in zip(numbers, previous, strict=True):
            signal.signal(number, old)


def cause_of(error: BaseException) -> BaseException:
    """Return the request to end that became `error` on its way through C++, else `error` itself.

    Python that autograd or a process group calls may be where Ctrl-C arrives; what leaves them then
    is a RuntimeError about a value that is no tensor. Not collective.
    """
    return _requested[0] if _requested and isinstance(error, Exception) else error


_requested: list[BaseException] = []  # by a signal inside `guard`; at most one


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let no Ctrl-C or SIGTERM into the block: what it puts in order takes a while. Not collective.

    In the main thread.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, previous, strict=True):
            signal.signal(number, old)


def end_with_launcher(world: World) -> None:
    """Watch the launcher from a thread, and end this rank once it has ended: nobody else would.

    Not collective; a second call does nothing. The launcher is the first ancestor without this
    rank's variable: a shell in between (`mpirun bash -c ...`) has it too. Not PR_SET_PDEATHSIG,
    which would watch that shell, or the launcher's thread that made us.
    """
    variable = rank_variable(world)
    if _watching or variable is None:
        return
    pid = _first_ancestor_without(variable)
    born = _start_time(pid)
    if born is None:  # not on Linux, or /proc is not mounted
        return
    name = "mpirun" if is_mpi(world) else world.launcher
    watched: dict[int, tuple[str | None, str]] = {pid: (born, f"{name} (process {pid})")}
    shell = _parent(pid)
    if world.launcher == "openmpi" and _is_horovodrun(shell):
        watched[shell] = (_start_time(shell), f"horovodrun --mpi (process {shell})")
    watch = threading.Thread(target=_watch, args=(world, watched), daemon=True, name="launcher")
    _watching.append(watch)
    watch.start()


_watching: list[threading.Thread] = []
_orphaned = threading.Event()


def _watch(world: World, watched: dict[int, tuple[str | None, str]]) -> None:
    """Wait for the end of one of the processes: each with its start time, and its name."""
    ended = ["torchrun"] if 1 in watched and _agent_has_ended(world) else []
    while not ended:
        for pid, (born, name) in watched.items():
            if _start_time(pid) != born or born is None:
                ended.append(name)
        if not ended:
            time.sleep(_LAUNCHER_CHECK_S)
    _orphaned.set()
    said = f"[{world}] error: {ended[-1]} has ended, so this rank ends too\n"
    with contextlib.suppress(OSError):  # stderr may have gone with the launcher
        if select.select([], [2], [], 0)[1]:  # nor may a full pipe hold this up
            os.write(2, said.encode())
    os.kill(os.getpid(), signal.SIGTERM)  # so that an orderly end is recorded, where one is left
    time.sleep(_ORPHAN_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _first_ancestor_without(variable: str) -> int:
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError):  # another user's process, such as slurmstepd
        while variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = int(_stat(pid)[1])
    return pid


def _parent(pid: int) -> int:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return 0


def _is_horovodrun(pid: int) -> bool:
    """Whether a process is the shell that `horovodrun --mpi` becomes, to run one mpirun.

    That shell ends after mpirun, if it is not killed; mpirun takes no notice. A shell of a user's
    own, such as `sh -c "mpirun ... & sleep 5"`, may end first: its mpirun has other flags.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return (
        len(words) == 4  # what ends the last is followed by nothing
        and words[0].rpartition("/")[2] == "sh"
        and words[1] == "-c"
        and words[2].startswith("mpirun ")
        and all(f" {flags} " in words[2] for flags in _HOROVODRUNS_FLAGS)
    )


def _agent_has_ended(world: World) -> bool:
    """Whether process 1, our parent, is the reaper of orphans rather than torchrun's agent.

    So it is where it runs no Python, or the store refuses that the agent serves from before the
    ranks start: the agent ended before this rank looked.
    """
    if world.launcher != "torchrun":
        return False
    with contextlib.suppress(OSError):  # another user's
        if not os.path.basename(os.readlink("/proc/1/exe")).startswith(_PYTHONS):
            return True
    if not (world.one_host and agent_keeps_store(world)):
        return False
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(place, timeout=2).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):  # not known, or no address: reported later
        pass
    return False


def _start_time(pid: int) -> str | None:
    """When a process began, which tells it from a later one of its number; None once it ended."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def end_job(world: World, error: BaseException) -> NoReturn:
    """Report `error` as this rank's; end the process and, under MPI, the job."""
    code = exit_code(error)
    if world.size == 1:
        report(world, error)
        sys.exit(code)
    try:
        if threading.current_thread() is threading.main_thread():
            # From here on the launcher may end us, because another rank has spoken: in silence.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        time.sleep(_turn_s(world, error))
        report(world, error)
        sys.stdout.flush()
    finally:  # even where the terminal has gone
        _leave(code)


def _turn_s(world: World, error: BaseException) -> float:
    """How long a rank lets others speak before it reports `error`."""
    if _orphaned.is_set() or (isinstance(error, WorldError) and error.launcher_ended):
        return 0.0  # nobody is left who would end this rank
    turn_s = min(_TURN_S * world.rank, _LONGEST_TURN_S)
    if isinstance(error, WorldError):
        return turn_s + _WITNESS_S
    if not isinstance(error, HvdtrainError) or (error.in_step and not error.everywhere):
        return turn_s
    speaks = world.rank == 0 if error.everywhere else world.local_rank == 0
    return turn_s if speaks else turn_s + _SPOKESMAN_S


def _leave(code: int) -> NoReturn:
    try:
        if "PMI_FD" in os.environ:
            _until_read()
            time.sleep(_FORWARD_S)
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(code)
        if "PMI_FD" in os.environ:
            # Unlike the other launchers, Hydra (MPICH, Intel MPI) takes no notice of a rank that
            # ends before MPI_Init, where the others then wait for ever. This is its own protocol.
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    finally:
        # Not sys.exit: the exit handlers of Horovod and MPI wait for the other ranks.
        os._exit(code)


def _until_read() -> None:
    """Wait until a launcher on a busy machine has taken what was printed from its pipes."""
    deadline = time.monotonic() + _LONGEST_FORWARD_S
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # closed
            while stat.S_ISFIFO(os.fstat(fd).st_mode) and time.monotonic() < deadline:
                if struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4))) == (0,):
                    break
                time.sleep(0.01)


def report(world: World, error: BaseException) -> None:
    """Print one line for an error of ours, the traceback for any other, with the rank, to stderr.

    What every rank knows is printed by rank 0 alone.
    """
    if isinstance(error, HvdtrainError):
        if error.everywhere and world.rank > 0:
            return
        unknown = world.launcher == "none"  # the rank is presumed, or there is one only
        where = "" if error.everywhere or unknown or world.size == 1 else f"[{world}] "
        text = f"{where}error: {_shorten(str(error))}\n"
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted\n" if world.rank == 0 else ""
    elif isinstance(error, SystemExit):
        said = "" if error.code is None or isinstance(error.code, int) else f"{error.code}\n"
        if world.size > 1 and not _orphaned.is_set():  # which has been reported
            said += f"[{world}] exits with code {exit_code(error)}\n"
        text = said
    else:
        head = f"[{world}] failed:\n" if world.size > 1 else ""
        text = head + _format(error)
    sys.stderr.write(text)  # one write, so that the lines of two ranks do not mix
    sys.stderr.flush()


def print_stderr(text: str) -> None:
    """Print to stderr from a thread that must go on: nothing happens where stderr is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _shorten(text: str) -> str:
    """Leave out the middle of lines that are too long to read."""
    half = _LONGEST_LINE // 2
    lines = [
        f"{line[:half]} [... {len(line) - 2 * half} characters ...] {line[-half:]}"
        if len(line) > _LONGEST_LINE
        else line
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def _format(error: BaseException) -> str:
    """Format the traceback of `error`; of user code alone where that, or a call of it, raised."""
    report = traceback.TracebackException.from_exception(error)
    left = [report]
    while left:
        part = left.pop()
        frames = list(part.stack)
        users = [frame for frame in frames if _is_users(frame.filename)]
        if users and _in(frames[-1].filename, _folders("hvdtrain")):
            users = frames[frames.index(users[0]) :]  # ours raised: how it came to that matters
        if users:
            part.stack = traceback.StackSummary.from_list(users)
        elif frames and frames[-1].name == "reraise":  # of a loader process: its text has them
            part.stack = traceback.StackSummary()
        left += [other for other in (part.__cause__, part.__context__) if other is not None]
        left += getattr(part, "exceptions", None) or []  # of an ExceptionGroup, from Python 3.11 on
    return "".join(report.format())


def _is_users(file: str) -> bool:
    """Whether a file is none of Python's, torch's, click's or ours; the built-in tasks count as the
    user's.
    """
    if _in(file, [os.path.join(folder, "tasks") for folder in _folders("hvdtrain")]):
        return True
    if "site-packages" not in file and _in(file, [os.path.dirname(os.__file__)]):
        return False
    return not (file.startswith("<frozen") or _in(file, _folders("hvdtrain", "torch", "click")))


def _folders(*packages: str) -> list[str]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    return [os.path.dirname(file) for file in files if file]


def _in(file: str, folders: list[str]) -> bool:
    return any(file.startswith(folder + os.sep) for folder in folders)


def _raise_once() -> Callable[[int, FrameType | None], None]:
    """Make a handler that raises at the first signal, passes over its echo, and then kills."""
    first: list[float] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        if first:
            if time.monotonic() - first[0] > _SAME_REQUEST_S:
                os._exit(128 + signum)
            return
        first.append(time.monotonic())
        stop = KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)
        _requested[:] = [stop]
        raise stop

    return handle
