"""Memory settings: make glibc keep or return freed memory; move large tensors into huge pages.

Used by the transports, the Trainer, `compat`'s optimizer and `sharded_optimizer`.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # madvise(2)
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


def use_huge_pages(t: Tensor) -> None:
    """Move the memory of a contiguous tensor, and its neighbours in these pages, into huge pages.

    When a rank reads another's memory, as MPI does on one host, the kernel looks up every page:
    with pages of 4 KiB a copy takes 1.5 times as long. Costs one copy of the tensor, whose address
    and bytes stay the same; so do those of other data in these pages. Not collective. Nothing
    changes before Linux 6.1, or if the kernel has no huge page.
    """
    begin = t.data_ptr() // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    num_bytes = t.data_ptr() + t.nbytes + -(t.data_ptr() + t.nbytes) % _HUGE_PAGE_BYTES - begin
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice)
