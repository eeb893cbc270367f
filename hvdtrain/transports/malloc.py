"""Memory settings: make glibc keep or return freed memory.

Used by the transports, the Trainer, `compat`'s optimizer and `sharded_optimizer`.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from hvdtrain.errors import LaunchError
from hvdtrain.job.world import detect
from hvdtrain.system.machine import memory_limit_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors of up to 32 MiB for the next ones.

    By default it returns large blocks to the kernel, and the end of its heap once 128 KiB of it are
    free, so every backward pass pays for new, zeroed pages: more than an all-reduce in shared
    memory costs. `kept_bytes` of the end are kept (mallopt(3)). The setting holds for the process;
    repeating it changes nothing, and with another malloc nothing happens. Not collective.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc allows
        mallopt(_M_TRIM_THRESHOLD, kept_bytes())


def kept_bytes() -> int:
    """Return how much freed memory this rank keeps: 1 GiB, and with the host's other ranks at most
    a quarter of the memory that they may use.
    """
    ranks = 1
    with suppress(LaunchError):  # what has called this says so, or does without a launcher
        ranks = detect().local_size or 1
    usable = memory_limit_bytes() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(1 << 30, usable // (4 * ranks))


def return_freed_memory() -> None:
    """Make glibc return the memory that is free now to the kernel. Not collective.

    Nothing happens with another malloc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
