"""`--rank-logs`: a callback that keeps what each rank prints, in `logs/` of the run directory.

From the start of the run to its end, or to the traceback that ends the process. Only what Python
prints is seen; launchers (`torchrun --log-dir`, `mpirun --output-filename`) keep all of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from hvdtrain.errors import InputError
from hvdtrain.training.callback import Callback
from hvdtrain.training.console import describe

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer

FOLDER = "logs"


class RankLog(Callback):
    """Copies what this rank prints into its file, each line after `[rank 3/8]`.

    A rank that prints no records writes those that it has: their times are its own.
    """

    def __init__(self) -> None:
        self._lines: _PrefixedLines | None = None
        self._before: list[tuple[str, TextIO]] = []
        self._has_records = False

    def on_start(self, trainer: Trainer) -> None:
        """Open the file. Collective. Raises InputError, on every rank, if one cannot."""
        backend, world = trainer.backend, trainer.world
        mine = None if trainer.run_dir is None else str(trainer.run_dir.resolve())
        folder = backend.broadcast_object(mine)  # rank 0 alone has a run directory
        if folder is None:
            return
        path = Path(folder) / FOLDER / f"rank{world.rank}.log"
        with backend.share_errors():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("a", buffering=1)
            except OSError as error:
                raise InputError(f"--rank-logs cannot write {path}: {error.strerror}") from None
        self._lines = _PrefixedLines(file, f"[rank {world.rank}/{world.size}] ")
        self._lines.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        # Not a terminal's stdout: a progress bar would fill the file.
        self._has_records = world.rank == 0 and not sys.stdout.isatty()
        for name in ("stderr",) if sys.stdout.isatty() else ("stdout", "stderr"):
            stream = getattr(sys, name)
            self._before.append((name, stream))
            setattr(sys, name, cast("TextIO", _Tee(stream, self._lines)))

    def on_log(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Write a record, unless this rank prints it."""
        if self._lines is not None and not self._has_records:
            self._lines.write(f"step {record['step']}  {describe(dict(record))}\n")

    def on_end(self, trainer: Trainer) -> None:
        """Close the file. A run that fails leaves it open for the error's traceback."""
        if self._lines is None:
            return
        for name, stream in self._before:
            setattr(sys, name, stream)
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


class _Tee:
    """A stream that also writes to a log; otherwise the stream itself."""

    def __init__(self, stream: TextIO, lines: _PrefixedLines) -> None:
        self._stream, self._lines = stream, lines

    def write(self, text: str) -> int:
        self._lines.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
