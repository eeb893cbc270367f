"""What the launchers print: the lines of the ranks, marked with their rank, and their own.

Used by `launcher` and `elastic`. All share one terminal: a rank's line may be unfinished when
another line follows, which begins on a new line then. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

_PIECE = 1 << 16  # of a pipe, in bytes


class LineReader:
    """Splits what pipes hold into lines."""

    def __init__(self) -> None:
        self._unfinished: dict[int, bytes] = {}

    def read(self, fd: int) -> tuple[list[bytes], bool]:
        """Read a piece; return the lines that it completes, and whether the pipe is open.

        At the end of the pipe an unfinished line is returned, too. An empty pipe that does not
        block counts as ended.
        """
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, _PIECE)
        *lines, rest = (self._unfinished.pop(fd, b"") + data).split(b"\n")
        if data:
            self._unfinished[fd] = rest
        elif rest:
            lines.append(rest)
        return lines, bool(data)


class RankOutput:
    """Prints the ranks' output, and writes it to the files below `folder`, if there is one.

    `streams` replaces sys.stdout and sys.stderr, by their names, but for None.
    """

    def __init__(
        self,
        folder: Path | None,
        mode: Literal["ab", "wb"] = "ab",
        streams: Mapping[str, TextIO | None] = {},
    ) -> None:
        self._folder, self._mode, self._streams = folder, mode, streams
        self._files: dict[Path, BinaryIO] = {}
        self._unfinished = "", b""
        """The stream and the mark of the printed line without a newline. The mark is empty if a
        carriage return ends it, so that what follows replaces it (a progress bar).
        """

    def print(self, who: object, stream: str, text: bytes, folder: str) -> None:
        """Print a line of a rank, or a piece of one, and append it to the file `folder`/`stream`.

        A piece that continues the last one has no mark of its own.
        """
        mark = f"[{who}]<{stream}>:".encode()
        is_continued = self._unfinished[1] == mark
        if self._unfinished[1] and not is_continued:
            self.end_line()
        self._write(stream, text if is_continued else mark + text)
        is_whole, is_replaced = text.endswith(b"\n"), text.endswith(b"\r")
        self._unfinished = "" if is_whole else stream, b"" if is_whole or is_replaced else mark
        if self._folder is not None:
            path = self._folder / folder / stream
            if path not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path] = path.open(self._mode, buffering=0)
            self._files[path].write(text)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own to stderr."""
        self.end_line()
        self._write("stderr", f"{text}\n".encode())

    def end_line(self) -> None:
        """End the unfinished line, if there is one."""
        stream, self._unfinished = self._unfinished[0], ("", b"")
        if stream:
            self._write(stream, b"\n")

    def close(self) -> None:
        """End the unfinished line, and close the files."""
        with contextlib.suppress(OSError, SystemExit):  # the reader has ended
            self.end_line()
        for file in self._files.values():
            file.close()

    def _write(self, stream: str, data: bytes) -> None:
        out = self._streams.get(stream) or getattr(sys, stream)
        if not hasattr(out, "buffer"):  # in a notebook, where `hvdtrain.run` is called
            out.write(data.decode(errors="replace"))
            out.flush()
            return
        try:
            out.buffer.write(data)
            out.buffer.flush()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
            out.buffer.flush()
            if error.errno == errno.EPIPE:  # `hvdrun ... | head`
                raise SystemExit(128 + signal.SIGPIPE) from None
            # The terminal has closed: the ranks, which may be saving, go on without it.
