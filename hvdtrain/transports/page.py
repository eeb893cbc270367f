"""The barrier of one host's ranks in C: loads the library that was compiled from `page.c`.

Where there was no compiler, or `HVDTRAIN_PURE_PYTHON` is set, `shm_sync` uses semaphores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_uint32, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("page.c")
LIBRARY = SOURCE.with_name("libpage.so")
_CHECKOUT = SOURCE.parents[2]
_INSTALL = shlex.join([sys.executable, *"-m pip install --no-deps".split()]) + (
    f" --editable {shlex.quote(str(_CHECKOUT))}"
    if (_CHECKOUT / "hatch_build.py").exists()
    else " --no-cache-dir --force-reinstall --no-binary hvdtrain hvdtrain"
)
PURE = "HVDTRAIN_PURE_PYTHON"
PAGE_BYTES = 128
MATCHED, _, LATE, LAST = range(4)  # the outcomes in page.c
DTYPES = {torch.float32: 1, torch.float64: 2, torch.int32: 3, torch.int64: 4}
"""What `Page.reduce` can add up: the numbers in page.c."""


def _load() -> tuple[Any, str]:
    """Return the library, or None, and the digest of its source, or why there is none."""
    if not LIBRARY.exists():
        return None, f"it was not compiled at installation, which takes a C compiler; {_INSTALL}"
    try:
        library: Any = ctypes.CDLL(str(LIBRARY))
        digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    except OSError as error:  # of another processor or C library, or without its source
        return None, f"{error}; {_INSTALL}"
    library.page_source.restype = c_char_p
    if library.page_source().decode() != digest:
        return None, f"page.c has changed since it was compiled; {_INSTALL}"
    for name in ("enter", "wait", "release"):
        getattr(library, f"page_{name}").argtypes = [c_void_p]
    library.page_reduce.argtypes = [c_void_p, c_uint32, c_void_p, c_void_p]
    return library, digest


_library, _digest = _load()


def unavailable() -> str | None:
    """Return why this process cannot use the barrier in C, and what to type; None if it can."""
    if os.environ.get(PURE, "0") != "0":
        return f"{PURE} is set; unset {PURE}"
    return _digest if _library is None else None


def version() -> str:
    """Return a digest of page.c, which ranks must share to use it; empty without the library."""
    return "" if unavailable() else _digest


class _Group(ctypes.Structure):
    """`struct group` of page.c, which sets the last two fields."""

    _fields_ = [
        *((name, c_void_p) for name in ("page", "matched", "entered", "slots", "staging")),
        *((name, c_uint32) for name in ("num_ranks", "local_rank", "generation")),
        ("meetings", c_uint64),
    ]


class Reduction(ctypes.Structure):
    """`struct call` of page.c: the arguments of `Page.reduce` beside the tensor."""

    _fields_ = [
        *(("text", c_char_p), ("text_bytes", c_uint64), ("num_bytes", c_uint64)),
        *(("dtype", c_uint32), ("divisor", c_uint32)),
    ]


class Page:
    """One rank's side of the barrier of a host's ranks.

    `page`, `matched`, `entered`: addresses of the page, the result of the comparison, and this
    rank's count of barriers. `slots` and `staging`: addresses of all ranks' calls and tensors, for
    even barriers and then for odd ones.
    """

    def __init__(
        self,
        page: int,
        matched: int,
        entered: int,
        slots: Sequence[int],
        staging: Sequence[int],
        local_rank: int,
    ) -> None:
        self._slots = (c_void_p * len(slots))(*slots)
        self._staging = (c_void_p * len(staging))(*staging)
        arrays = map(ctypes.addressof, (self._slots, self._staging))
        self._group = _Group(page, matched, entered, *arrays, len(slots) // 2, local_rank)
        group = ctypes.addressof(self._group)
        self.enter: Callable[[], int] = partial(_library.page_enter, group)
        """Enter a barrier; return its outcome."""
        self.reduce: Callable[..., int] = partial(_library.page_reduce, group)
        """Enter a barrier with its number, and the addresses of a `Reduction` and of a tensor. The
        first rank's staging area has then the sum over all ranks. Return its outcome; if it is
        LAST, nothing has been added up, because the calls differ."""
        self.wait: Callable[[], int] = partial(_library.page_wait, group)
        """Wait again when the outcome is LATE; return it."""
        self.release: Callable[[], None] = partial(_library.page_release, group)
        """End a barrier whose outcome is LAST."""
