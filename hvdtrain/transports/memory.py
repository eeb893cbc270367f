"""How glibc is told to keep the memory of gradients between steps."""

from __future__ import annotations

import torch


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed gradients for the next ones, up to 31 MiB each.

    By default it gives large blocks back to the kernel, and every backward pass pays for new,
    zeroed pages: more than an all-reduce in shared memory costs. It stops to do so for blocks
    smaller than one that it has seen freed, of at most 32 MiB (mallopt(3), M_MMAP_THRESHOLD); this
    one is never touched. It is the process that is told; to tell it again changes nothing. Where
    there is another malloc, nothing happens. Not collective.
    """
    torch.empty(31 << 20, dtype=torch.uint8)
