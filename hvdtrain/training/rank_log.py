"""`--rank-logs`: a callback that keeps what each rank prints, in `logs/` of the run directory.

From the start of the run to its end, or to that of the process:

    sys.stdout, sys.stderr ------> the rank's output, as before, and its log
    file descriptors 1 and 2 ----> a pipe ----> output_copier ----> the output, and the log

Libraries in C, child processes and the messages of a crash take the second way. Python's own output
takes the first, which leaves nothing behind in a pipe when a launcher ends the rank.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from hvdtrain.errors import InputError
from hvdtrain.training import output_copier
from hvdtrain.training.callback import Callback
from hvdtrain.training.console import BarConsole, describe

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer

FOLDER = "logs"
_START_S = 60.0  # for the copier to start
_END_S = 5.0  # for the copier to exit; a child process of the task may keep its pipe open


class RankLog(Callback):
    """Copies what this rank prints into its file, each line after `[rank 3/8]`.

    A rank that prints no records writes them to its file; the times in them are its own.
    """

    def __init__(self) -> None:
        self._lines: _PrefixedLines | None = None
        self._streams: list[_Redirected] = []
        self._copier: subprocess.Popen[bytes] | None = None
        self._has_records = False
        self._reports_crashes = False

    def on_start(self, trainer: Trainer) -> None:
        """Open the file. Collective. Raises InputError, on every rank, if one cannot."""
        backend, world = trainer.backend, trainer.world
        mine = None if trainer.run_dir is None else str(trainer.run_dir.resolve())
        folder = backend.broadcast_object(mine)  # rank 0 alone has a run directory
        if folder is None:
            return
        path = Path(folder) / FOLDER / f"rank{world.rank}.log"
        # A progress bar would fill the file.
        names = ["stderr"] if isinstance(trainer.console, BarConsole) else ["stdout", "stderr"]
        self._has_records = world.rank == 0 and "stdout" in names
        with backend.share_errors():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._lines = _PrefixedLines(path.open("a", buffering=1), f"[{world}] ")
                self._redirect(names, path, f"[{world}] ")
            except OSError as error:
                raise InputError(f"--rank-logs cannot write {path}: {error.strerror}") from None
        self._lines.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        if not faulthandler.is_enabled():  # the Python frames of a crash, on stderr
            faulthandler.enable(2)
            self._reports_crashes = True

    def _redirect(self, names: list[str], path: Path, prefix: str) -> None:
        """Start the copier, and lead the streams to the log."""
        assert self._lines is not None
        for name in names:
            with contextlib.suppress(OSError):  # a closed one
                self._streams.append(_Redirected(name, self._lines))
        pairs = [f"{stream.pipe[0]}:{stream.before}" for stream in self._streams]
        self._copier = subprocess.Popen(
            [sys.executable, "-IS", output_copier.__file__, str(path), prefix, *pairs],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[fd for stream in self._streams for fd in (stream.pipe[0], stream.before)],
            start_new_session=True,  # Ctrl-C and the launcher end the rank; that ends the copier
        )
        assert self._copier.stdout is not None
        with self._copier.stdout as ready:
            poll = select.poll()  # select() takes no descriptor above 1023
            poll.register(ready, select.POLLIN)
            if not (poll.poll(_START_S * 1000) and ready.read(1)):
                raise OSError(errno.ECHILD, f"output_copier did not start in {_START_S:g} s")
        for stream in self._streams:
            stream.begin()

    def on_log(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Write a record, unless this rank prints it."""
        if self._lines is not None and not self._has_records:
            self._lines.write(f"step {record['step']}  {describe(dict(record))}\n")

    def on_end(self, trainer: Trainer) -> None:
        """Close the file. A run that fails leaves it open for the error's traceback."""
        if self._lines is None:
            return
        if self._reports_crashes:
            faulthandler.disable()
        for stream in self._streams:
            stream.end()
        if self._copier is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._copier.wait(_END_S)
        self._lines.write(f"the run has ended after step {trainer.progress.step}\n")
        self._lines.close()


class _PrefixedLines:
    """A file whose lines begin with a prefix."""

    def __init__(self, file: TextIO, prefix: str) -> None:
        self._file, self._prefix = file, prefix
        self._in_line = False

    def write(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            self._file.write(line if self._in_line else self._prefix + line)
            self._in_line = not line.endswith("\n")

    def close(self) -> None:
        self._file.close()


class _Redirected:
    """One of Python's standard streams, and its file descriptor, while both lead to the log."""

    def __init__(self, name: str, lines: _PrefixedLines) -> None:
        """Raises OSError if the file descriptor is closed."""
        self._name, self._lines = name, lines
        self._fd = {"stdout": 1, "stderr": 2}[name]
        self._stream: TextIO = getattr(sys, name)
        self.before = os.dup(self._fd)
        """Where the file descriptor leads without the log."""
        self.pipe = os.pipe()

    def begin(self) -> None:
        """Lead both to the log. Closes this process's end of the pipe that the copier reads."""
        self._stream.flush()
        read, write = self.pipe
        os.close(read)
        os.dup2(write, self._fd)
        os.close(write)
        setattr(sys, self._name, cast("TextIO", _Tee(self._direct(), self._lines)))

    def _direct(self) -> TextIO:
        """Return a stream that does not take the way through the pipe."""
        try:
            is_real = self._stream.fileno() == self._fd
        except OSError:
            is_real = False
        if not is_real:  # another object in its place, such as a notebook's
            return self._stream
        encoding, errors = self._stream.encoding, self._stream.errors
        return open(self.before, "w", 1, encoding, errors, closefd=False)

    def end(self) -> None:
        """Lead both to where they were led before."""
        getattr(sys, self._name).flush()
        setattr(sys, self._name, self._stream)
        self._stream.flush()
        os.dup2(self.before, self._fd)
        os.close(self.before)


class _Tee:
    """A stream that also writes to a log; otherwise the stream itself."""

    def __init__(self, stream: TextIO, lines: _PrefixedLines) -> None:
        self._stream, self._lines = stream, lines

    def write(self, text: str) -> int:
        self._lines.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
