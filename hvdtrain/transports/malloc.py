"""Memory settings: make glibc keep or return freed memory.

Used by the transports, the Trainer, `compat`'s optimizer and `sharded_optimizer`.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors of up to 32 MiB for the next ones.

    By default it returns large blocks to the kernel, and the end of its heap once 128 KiB of it are
    free, and every backward pass pays for new, zeroed pages: more than an all-reduce in shared
    memory costs. Up to 1 GiB of the end is kept (mallopt(3)). The setting holds for the process;
    repeating it changes nothing, and with another malloc nothing happens. Not collective.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc allows
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def return_freed_memory() -> None:
    """Make glibc return the memory that is free now to the kernel. Not collective.

    Nothing happens with another malloc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
