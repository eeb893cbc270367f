"""The setting that makes glibc keep the memory of gradients between steps, and its opposite, once.

Used by the transports, the Trainer and `compat`'s optimizer; the latter by `sharded_optimizer`.
"""

from __future__ import annotations

import ctypes

import torch


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed gradients for the next ones, up to 31 MiB each.

    By default it returns large blocks to the kernel, and every backward pass pays for new, zeroed
    pages: more than an all-reduce in shared memory costs. Once a large block of at most 32 MiB has
    been freed, glibc keeps blocks smaller than that one (mallopt(3), M_MMAP_THRESHOLD). The block
    freed here is never touched. The setting holds for the process; repeating it changes nothing,
    and with another malloc nothing happens. Not collective.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def return_freed_memory() -> None:
    """Make glibc return the memory that is free now to the kernel. Not collective.

    Nothing happens with another malloc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
