"""The run directory: `run.json`, `metrics.jsonl` and checkpoints.

It is the only link between training and reports. Rank 0 alone creates and writes it. `run.json` is
replaced atomically, and first written before the first step, so that a killed run has one, too: its
outcome stays "running", with the id of a dead process, and a resumed run corrects it to "killed".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import psutil

from hvdtrain.errors import HvdtrainError, InputError, Preempted, notes_of
from hvdtrain.liveness.failure import cause_of
from hvdtrain.system import files, signals

FORMAT = 1

_OF_AN_ATTEMPT = """start end error resumed_from last_step process metrics
    params_sha256""".split()
"""The entries of run.json that an attempt keeps, beside its outcome."""
_Identity = tuple[int, int, int]
_held: set[_Identity] = set()
"""The locks that this process holds: the kernel refuses another process alone."""
_held_mutex = threading.Lock()


class RunDirectory:
    """An open run directory. Holds a lock on it, which the kernel releases even after kill -9."""

    def __init__(self, path: Path, resuming: bool, wait_s: float = 0.0) -> None:
        """Create and lock `path`; wait up to `wait_s` for the lock of another process.

        Raises InputError if it cannot be written, is in use, or, unless `resuming`, holds a run.
        """
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._config_before: Any = None
        """The options of the run that is resumed; None if there is none."""
        self._metrics: TextIO | None = None
        self.run: dict[str, Any] = {}
        self._lock = -1
        deadline = time.monotonic() + wait_s
        while not self._try_lock():
            if time.monotonic() >= deadline:
                raise InputError(f"another run is writing to {path}; choose another --run-dir")
            time.sleep(0.1)
        if not resuming and ((path / "run.json").exists() or self.checkpoints.exists()):
            self.close()
            raise InputError(
                f"{path} holds a run already; continue it with --resume auto, or choose "
                f"another --run-dir"
            )

    def _try_lock(self) -> bool:
        """Open and lock the file; return False if another run holds it."""
        file = self.path / ".lock"
        with _held_mutex, _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # Before it is opened: closing any descriptor of a file releases the process's lock.
            if _identity(file) in _held:
                return False
            # O_NONBLOCK: a FIFO in its place would have to be waited for.
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._lock = os.open(file, flags, 0o666)
            # Kept: on NFS a file that another host has removed cannot be asked any more (ESTALE).
            self._locked = _identity(self._lock)
            try:
                # Not flock: loader processes inherit its lock, and keep it after the run is killed.
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._close_lock()
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                raise InputError(
                    f"cannot lock the run directory {self.path}: {error.strerror}; choose a "
                    "--run-dir on a file system with locks"
                ) from None
            if self._locked != _identity(file):  # another process has replaced it since
                self._close_lock()
                return False
            _held.add(self._locked)
            return True

    def check(self) -> None:
        """Raise InputError if the directory was removed or moved since it was locked. Everything
        that is written there is checked before, so that nothing is lost in silence, nor written to
        the directory of another run.
        """
        try:
            found = _identity(self.path / ".lock")
        except OSError:  # a network file system may fail for a moment: nothing is known
            return
        # Not the process: a forked one has the same directory.
        if self._lock >= 0 and self._locked[1:] != found[1:]:
            raise InputError(
                f"the run directory {self.path} was removed or moved while the run goes on: its "
                ".lock is no longer the one that this run holds; leave it in place, and continue "
                "from a checkpoint with --resume"
            )

    def start(self, about: dict[str, Any], is_restart: bool = False) -> None:
        """Write run.json, with the earlier attempts of a resumed run. `is_restart`: the launcher
        has started the run before.
        """
        before: dict[str, Any] = {}
        with contextlib.suppress(InputError):
            before = read(self.path)
        self._config_before, outcome = before.get("config"), before.get("outcome")
        last = {key: before[key] for key in before if key in _OF_AN_ATTEMPT}
        # This process holds the lock: that of a run which is still "running" has died.
        last["outcome"] = "killed" if outcome == "running" else outcome
        self.run = {
            "format": FORMAT,
            "outcome": "running",
            "start": now(),
            "process": {"pid": os.getpid(), "host": os.uname().nodename},
            **about,
            "restarts": before.get("restarts", 0) + (is_restart and bool(before)),
            "attempts": [*before.get("attempts", []), last] if before else [],
        }
        self.update()

    def open_metrics(self, last_step: int, with_evaluation: bool = True) -> None:
        """Open metrics.jsonl, without the lines after `last_step`: those steps are taken again.
        Without `with_evaluation`, that of `last_step` is done again, too.
        """

        def is_kept(line: str) -> bool:
            try:
                record = json.loads(line)
                step = int(record["step"])
            except (ArithmeticError, ValueError, LookupError, TypeError):
                return False  # the incomplete last line of a killed run
            return step < last_step or (
                step == last_step
                and (with_evaluation or not any(name.startswith("eval_") for name in record))
            )

        file = self.path / "metrics.jsonl"
        with _writing(self.path):
            if self._metrics is not None:
                self._metrics.close()
            lines = files.read(file).decode(errors="replace").splitlines() if file.exists() else []
            files.write_atomically(file, "".join(f"{line}\n" for line in lines if is_kept(line)))
            self._metrics = file.open("a", buffering=1)

    def log(self, record: dict[str, Any]) -> None:
        """Append one object to metrics.jsonl, with the time in seconds since 1970."""
        if self._metrics is not None:
            self.check()
            with _writing(self.path):
                self._metrics.write(_dump({**record, "time": round(time.time(), 3)}) + "\n")

    def update(self, sync: bool = True, /, **more: Any) -> None:
        """Add entries to run.json, and replace it atomically. Without `sync` a power failure may
        lose the new content.
        """
        self.run.update(more)
        self.check()
        with _writing(self.path):
            files.write_atomically(self.path / "run.json", _dump(self.run, indent=1) + "\n", sync)

    def finish(self, outcome: str, **more: Any) -> None:
        """Record how the run ended: `finished`, `failed`, `interrupted`, `terminated` or
        `preempted`.
        """
        # Write once without waiting for the disk: mpirun kills the ranks a second after SIGTERM.
        self.update(False, outcome=outcome, end=now(), **more)
        self.update()

    def fail(self, error: BaseException, step: int) -> None:
        """Record the exception that ended the run, after `step` steps."""
        if self._metrics is None and self._config_before is not None:
            self.run["config"] = self._config_before  # nothing was trained with those of this start
        outcome, error = "failed", cause_of(error)
        if isinstance(error, KeyboardInterrupt):
            outcome = "interrupted"
        elif isinstance(error, SystemExit):
            outcome = "preempted" if isinstance(error, Preempted) else "terminated"
        text = "; ".join([f"{type(error).__name__}: {error}", *notes_of(error)])
        # The launcher stops this rank once another has ended, and a full disk must not hide the
        # error itself.
        with signals.deferred(*signals.STOP), contextlib.suppress(HvdtrainError):
            self.finish(outcome, error=text, last_step=step)

    def close(self) -> None:
        """Close metrics.jsonl and release the lock. Safe to call twice."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # the disk is full: a buffered line fails again
                self._metrics.close()
        with _held_mutex:
            self._close_lock()

    def _close_lock(self) -> None:
        if self._lock >= 0:
            _held.discard(self._locked)
            with contextlib.suppress(OSError):
                os.close(self._lock)
        self._lock = -1


def _identity(file: Path | int) -> _Identity:
    """Return what tells a file from others, for this process: a forked one holds no lock. Zeros if
    there is no file. Raises OSError if that cannot be found out.
    """
    try:
        found = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0, 0
    return os.getpid(), found.st_dev, found.st_ino


def make_default(task: str, backend: str) -> Path:
    """Make `runs/<time>-<task>-<backend>`, with a number appended if that exists."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(task.rpartition(':')[2]).stem}-{backend}".lower()
    runs = Path("runs")
    with _writing(runs):
        runs.mkdir(exist_ok=True)
    with _writing(runs / name):
        return files.make_folder(runs / name)


def locate(path: Path) -> Path:
    """Return the run directory that a path means: also that of its run.json itself."""
    return path.parent if path.name == "run.json" and not path.is_dir() else path


def checkpoints_of(path: str) -> Path | None:
    """Return the folder of the checkpoints of a run directory, or of its run.json; else None."""
    folder = locate(Path(path))
    return folder / "checkpoints" if (folder / "run.json").exists() else None


@contextlib.contextmanager
def checked(file: Path) -> Iterator[None]:
    """Raise InputError for values in a file of a run directory that are of another kind than those
    that hvdtrain writes: the block uses what `read` has returned.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """Return what `run.json` in the run directory `path` holds; see `outcome_of` for its outcome.

    Use the values in a block of `checked`. Not collective. Raises InputError if there is no run,
    or its file is damaged.
    """
    file = path / "run.json"
    try:
        found: dict[str, Any] = json.loads(files.read(file))
    except OSError as error:
        raise InputError(
            f"no run in {path}: {error.strerror} ({file}); `hvdtrain runs DIR` lists runs in DIR"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is damaged: {error}") from None
    written = found.get("format") if isinstance(found, dict) else None
    if written != FORMAT:
        raise InputError(f"{file} has format {written!r}; this version reads {FORMAT}")
    return found


def outcome_of(run: dict[str, Any]) -> str:
    """Return the outcome in a run.json; `killed` if it says `running`, and its process on this
    host has ended.
    """
    outcome, process = str(run.get("outcome")), run.get("process") or {}
    if outcome != "running" or process.get("host") != os.uname().nodename:
        return outcome
    try:
        started = psutil.Process(int(process["pid"])).create_time()
        # A process that is younger than the run, by more than the clocks' ticks, has its id by
        # chance.
        is_alive = started <= datetime.fromisoformat(run["start"]).timestamp() + 1
    except (psutil.Error, LookupError, TypeError, ValueError):
        is_alive = False
    return "running" if is_alive else "killed"


def now() -> str:
    """Return the time in UTC, to the millisecond, in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _dump(value: object, indent: int | None = None) -> str:
    return json.dumps(files.finite(value), indent=indent, default=str, allow_nan=False)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert an OSError about a path of the run directory into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write the run directory {path}: {error.strerror}") from None
