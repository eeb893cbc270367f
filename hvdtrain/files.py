"""Files that are whole at every moment, in folders of their own, and JSON that any reader takes.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from pathlib import Path
from typing import Any


def replace(path: Path, text: str, sync: bool = True) -> None:
    """Replace a file's content at once. Without `sync` a power cut may still lose it.

    Raises OSError.
    """
    fresh = path.with_name(f".{path.name}.new")  # one name, so that killed runs leave no heap
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    fresh.replace(path)


def make_folder(path: Path) -> Path:
    """Make a folder, with a number behind its name where that is taken; return what was made.

    Of two programs that ask at once, each gets its own. Its parent must exist. Raises OSError.
    """
    for number in itertools.count(1):
        numbered = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            numbered.mkdir()
            return numbered
    raise AssertionError("count() never ends")


def finite(value: Any) -> Any:
    """Copy `value` with "inf" and "nan" as text, which float() reads: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
