"""Atomic replacement of files, reading of those that others may have made, unique folders, and
values that every JSON parser accepts.

Used for run directories and reports. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def read(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError, also for a FIFO or a device: a folder
    that somebody else has made may have one, and reading it can wait, or go on, for ever.
    """
    _check_regular(os.stat(path).st_mode)  # before it is opened: that can change a device
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        _check_regular(os.fstat(descriptor).st_mode)
        return file.read()


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def write_atomically(path: Path, content: str | bytes, sync: bool = True) -> None:
    """Write a whole file, or leave the old one: a kill at any moment leaves no half-written file.

    Without `sync` a power failure may lose the new content. Raises OSError.
    """
    with replacing(path, sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces `path` at the end of the block; see `write_atomically`.

    If the block raises, `path` stays as it was. Raises OSError.
    """
    fresh = path.with_name(f".{path.name}.new")  # fixed: killed runs leave one such file at most
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    fresh.replace(path)


def make_folder(path: Path) -> Path:
    """Make a folder, with a number appended if the name is taken, and return its path.

    Two programs that call at once get different folders. The parent must exist. Raises OSError.
    """
    for number in itertools.count(1):
        numbered = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            numbered.mkdir()
            return numbered
    raise AssertionError("count() never ends")


def finite(value: Any) -> Any:
    """Copy `value` with inf and nan as text, which float() reads back: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
