"""How a rank that fails ends the whole job: with one report, and with no rank left waiting.

Used by the commands, the backends and `hvd`. torchrun and horovodrun stop the other ranks when one
exits with an error. Under a plain mpirun they would wait for ever: the failed rank waits for them
in MPI_Finalize, they wait for it in a collective. So it must call MPI_Abort.

Ranks that fail together delay their reports by different times, because the first report ends the
job: see `_report_delay_s`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

from hvdtrain.errors import HvdtrainError, Preempted, WorldError, notes_of, printable
from hvdtrain.job.launcher_watch import launcher_has_ended
from hvdtrain.job.world import World
from hvdtrain.system import signals

# Delays of reports. By rank: the first report ends the job before the next rank prints.
_STAGGER_S = 0.5
_MAX_STAGGER_S = 3.0
# A rank that merely lost a peer lets that peer report the cause first.
_LOST_PEER_DELAY_S = 3.0
# Options, files and variables are the same for all ranks of a host: local rank 0 reports an error
# in them, and rank 0 one that all ranks raise. The others wait longer, and report only if that has
# not ended the job, because they may have the problem alone. Once the backend is open no rank waits
# so long: its peers would miss it, and report it as lost.
_NOT_THE_REPORTER_DELAY_S = 6.0
# Hydra (MPICH, Intel MPI) drops the last output of a rank in about one of ten runs if it receives
# the abort before it has read that output.
_FORWARD_S = 1.0
# An error may quote its input, such as a number of 10,000 digits.
_MAX_CHARACTERS = 2000
DEBUG_VARIABLE = "HVDTRAIN_DEBUG"
"""Shows every frame of an error, not those of the user's code alone."""
# Ctrl-C in a terminal reaches a rank directly, and again through its launcher.
_REPEATED_SIGNAL_S = 2.0


def exit_code(error: BaseException) -> int:
    """Return the exit code that `error` ends a command with: see `hvdtrain.errors`."""
    if isinstance(error, HvdtrainError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    return 1


def ended_by(*numbers: signal.Signals) -> AbstractContextManager[None]:
    """Let these signals end the block as SIGTERM does inside `guard`."""
    return signals.handled(_RaiseOnce(), *numbers)


@contextmanager
def guard(world: World) -> Iterator[None]:
    """End the job, with one report, if the block raises or exits with an error. Not collective.

    Inside the block SIGTERM raises SystemExit(143), and Ctrl-C KeyboardInterrupt, so that files are
    closed and the end of the run is recorded. A second signal ends the process at once. (The
    Trainer handles them itself: see `training.preemption`. Its Preempted, which all ranks raise,
    leaves without a report.)
    """
    with signals.handled(_RaiseOnce(), *signals.STOP):
        try:
            yield
        except BaseException as error:
            error = cause_of(error)
            if exit_code(error) == 0 or isinstance(error, Preempted):
                raise
            end_job(world, error)
        finally:
            _requested.clear()


def cause_of(error: BaseException) -> BaseException:
    """Return the exception of a signal that C++ has replaced by `error`, else `error` itself.

    Ctrl-C may arrive in Python code that autograd or a process group calls. They then raise a
    RuntimeError about a value that is no tensor. Not collective.
    """
    return _requested[0] if _requested and isinstance(error, Exception) else error


_requested: list[BaseException] = []  # what a signal inside `guard` has raised; at most one


def end_job(world: World, error: BaseException) -> NoReturn:
    """Report `error` as this rank's; end the process and, under MPI, the job."""
    code = exit_code(error)
    if world.size == 1:
        try:
            report(world, error)
        except OSError:  # the terminal is closed; Python would flush stderr once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.exit(code)
    try:
        # From here on the launcher may end this rank because another one has reported: silently.
        signals.set_handler(signal.SIG_DFL, *signals.STOP)
        time.sleep(_report_delay_s(world, error))
        report(world, error)
        sys.stdout.flush()
    finally:  # even if the terminal is closed
        _abort(code)


def report_causes_first() -> None:
    """Delay the end of this process by an uncaught error about a lost peer: that peer ends first.

    A launcher names the rank that ends first, and takes its exit code. Then it ends this one.
    Not collective; twice is safe.
    """
    show = sys.excepthook
    if getattr(show, "reports_causes_first", False):
        return

    def show_later(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            if is_peer_error(error):
                time.sleep(_LOST_PEER_DELAY_S)
        finally:
            show(kind, error, trace)

    show_later.reports_causes_first = True  # type: ignore[attr-defined]
    sys.excepthook = show_later


def abort_mpi_at_exit() -> None:
    """Let this process end by MPI_Abort, if it uses MPI: MPI_Finalize would wait for a lost rank.

    Not collective; twice is safe.
    """
    atexit.unregister(_abort_mpi)
    atexit.register(_abort_mpi, 1)


def _abort_mpi(code: int) -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # its reader has ended
                stream.flush()
        mpi.COMM_WORLD.Abort(code)


def is_peer_error(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from or after, is about a lost peer."""
    while error is not None:
        if getattr(error, "lost_peer", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _report_delay_s(world: World, error: BaseException) -> float:
    """Return how long a rank waits before it reports `error`: another report may end the job."""
    if launcher_has_ended.is_set() or (isinstance(error, WorldError) and error.launcher_ended):
        return 0.0  # no one is left to end this rank
    delay_s = min(_STAGGER_S * world.rank, _MAX_STAGGER_S)
    if is_peer_error(error):
        return delay_s + _LOST_PEER_DELAY_S
    if not isinstance(error, HvdtrainError) or (error.after_open and not error.on_all_ranks):
        return delay_s
    is_reporter = world.rank == 0 if error.on_all_ranks else world.local_rank == 0
    return delay_s if is_reporter else delay_s + _NOT_THE_REPORTER_DELAY_S


def _abort(code: int) -> NoReturn:
    try:
        if "PMI_FD" in os.environ:
            time.sleep(_FORWARD_S)
        _abort_mpi(code)
        if "PMI_FD" in os.environ:
            # Unlike the other launchers, Hydra (MPICH, Intel MPI) ignores a rank that ends before
            # MPI_Init, in which the others then wait for ever. This is Hydra's own protocol.
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    finally:
        # Not sys.exit: the exit handlers of Horovod and MPI wait for the other ranks.
        os._exit(code)


def report(world: World, error: BaseException) -> None:
    """Print `error` with its rank to stderr: one line for an HvdtrainError, else the traceback.

    An error that every rank raises is printed by rank 0 alone.
    """
    if isinstance(error, HvdtrainError):
        if error.on_all_ranks and world.rank > 0:
            return
        unknown = world.launcher == "none"  # the rank is guessed, or there is one only
        where = "" if error.on_all_ranks or unknown or world.size == 1 else f"[{world}] "
        text = _format_all(error) if _shows_all() else ""
        text += f"{where}error: {_shorten(printable(str(error)))}\n"
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted\n" if world.rank == 0 else ""
    elif isinstance(error, Preempted):  # every rank has it
        text = f"error: {error}\n" if world.rank == 0 else ""
    elif isinstance(error, SystemExit):
        text = "" if isinstance(error.code, int | None) else f"{error.code}\n"
        if world.size > 1 and not launcher_has_ended.is_set():  # that has been reported
            text += f"[{world}] exits with code {exit_code(error)}\n"
    else:
        head = f"[{world}] failed:\n" if world.size > 1 else ""
        text = head + _format(error)
    sys.stderr.write(text)  # one write, so that the lines of two ranks do not mix
    sys.stderr.flush()


def print_stderr(text: str) -> None:
    """Print to stderr from a thread that must not fail: a closed stderr is ignored."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _shorten(text: str) -> str:
    """Cut the middle out of lines that are too long to read."""
    half = _MAX_CHARACTERS // 2
    return "\n".join(
        f"{line[:half]} [... {len(line) - 2 * half} characters ...] {line[-half:]}"
        if len(line) > _MAX_CHARACTERS
        else line
        for line in text.split("\n")
    )


def _format(error: BaseException) -> str:
    """Format the traceback of `error`, reduced to the frames of user code if it has any.

    An error raised inside hvdtrain keeps everything from the first user frame on.
    """
    if _shows_all():
        return _format_all(error)
    summary = traceback.TracebackException.from_exception(error)
    left_out = 0
    for part in _parts(summary):
        frames = list(part.stack)
        users = _of_user(frames)
        if users and frames[-1].filename.startswith(_folders("hvdtrain")):
            users = frames[frames.index(users[0]) :]  # our frames show what the user code called
        if users or (frames and frames[-1].name == "reraise"):  # the text has a worker's frames
            part.stack = traceback.StackSummary.from_list(users)
        left_out += len(frames) - len(part.stack)
    text = "".join(summary.format())
    if not left_out:
        return text
    hint = f"frames of hvdtrain and libraries are left out; {DEBUG_VARIABLE}=1 shows them"
    return f"{text.rstrip()}\n({left_out} {hint})\n"


def _shows_all() -> bool:
    return os.getenv(DEBUG_VARIABLE, "0") != "0"


def _format_all(error: BaseException) -> str:
    """Format the whole traceback of `error`, and of what is behind it, `from None` or not."""
    summary = traceback.TracebackException.from_exception(error)
    for part in _parts(summary):
        part.__suppress_context__ = False
    notes = [f"{note}\n" for note in notes_of(error)] if sys.version_info < (3, 11) else []
    return "".join([*summary.format(), *notes])


def _parts(summary: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an error, its causes and contexts, and the members of a group (from Python 3.11)."""
    parts = [summary]
    for part in parts:
        yield part
        behind = part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())
        parts += filter(None, behind)


def line_of(stack: traceback.StackSummary) -> str:
    """Return where a stack is: its innermost line of user code, else its innermost line, such as
    "model.py:12, forward", with a note if that is within torch's loading of data.
    """
    frames = list(stack)
    if not frames:
        return "no Python code"
    frame = (_of_user(frames) or frames)[-1]
    loads = any("/torch/utils/data/" in other.filename for other in frames)
    line = f"{os.path.basename(frame.filename)}:{frame.lineno}, {frame.name}"
    return f"the data loader, at {line}" if loads else line


def _of_user(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames of user code: without those of installed libraries, if others are left."""
    users = [frame for frame in frames if _is_users(frame.filename)]
    return [frame for frame in users if "site-packages" not in frame.filename] or users


def _is_users(file: str) -> bool:
    """Return whether a file is user code, as built-in tasks are: not Python's, torch's or ours."""
    if file.startswith(tuple(f"{folder}tasks{os.sep}" for folder in _folders("hvdtrain"))):
        return True
    if "site-packages" not in file and file.startswith(_folders("os")):
        return False
    return not file.startswith(("<frozen", *_folders("hvdtrain", "torch", "click")))


def _folders(*packages: str) -> tuple[str, ...]:
    """Return what the paths of all files of these packages begin with, if they are imported."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    return tuple(f"{os.path.dirname(file)}{os.sep}" for file in files if file)


class _RaiseOnce:
    """A signal handler that raises at the first signal and ends the process at a later one.

    It ignores a repetition within two seconds.
    """

    _first_at: float | None = None
    is_obeyed = False
    """Whether the first signal passes: the rank ends already, as another rank's signal asked."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._first_at is not None:
            if time.monotonic() - self._first_at > _REPEATED_SIGNAL_S:
                os._exit(128 + number)
            return
        self._first_at = time.monotonic()
        if self.is_obeyed:
            return
        stop = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        _requested[:] = [stop]
        raise stop


def pass_first_signal(handlers: Iterable[object]) -> None:
    """Let those of `handlers` that are of `guard` or `ended_by` ignore a first signal: this rank
    ends already, as a signal to another rank asked. Not collective.
    """
    for handler in handlers:
        if isinstance(handler, _RaiseOnce):
            handler.is_obeyed = True
