"""Tensors in shared memory: this rank's own, and the mappings of its peers'.

`shm` uses it to reduce large tensors without a copy. A storage that is reduced a second time is
moved into shared memory under all its views, e.g. DDP's buckets, which live as long as the run. Its
descriptor is sent with the operation. Peers map it once, and unmap it when its owner reports that
it has been freed.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain._torch.storage import StorageReference, move_to_shared_memory, storage_key
from hvdtrain.errors import first_line
from hvdtrain.transports import window

MOVE_BYTES = 1 << 20  # smaller tensors are copied: a copy costs less than a system call
_SWEEP = 256  # entries in `_seen` from which on dead ones are removed


@dataclass
class Region:
    """One storage in shared memory. Its owner never reuses its `number`."""

    number: int
    fd: int
    num_bytes: int
    alive: StorageReference


# Of all groups, since each counts, and closes, the others' descriptors. Nothing under it waits.
_lock = threading.RLock()


def _has_descriptors() -> bool:
    """Return whether this process may open descriptors for one more region.

    A region takes two. All groups together may use a quarter of the process's limit.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
    with _lock:
        for regions in list(_all_regions):
            regions._sweep()  # an idle group keeps the descriptors of tensors that are gone
        return sum(len(regions._own) for regions in list(_all_regions)) < most


class Regions:
    """The regions of one rank, which its peers may read and write, and its mappings of theirs.

    Call `consider` and `allocate` in the caller's thread, `find` in any, and the rest in the thread
    that runs the collective.
    """

    def __init__(self, shm_dir: str = "/dev/shm") -> None:
        self._own: dict[int, Region] = {}
        self._seen: dict[int, StorageReference] = {}
        self._theirs: dict[tuple[int, int], Tensor] = {}
        self._retired: list[int] = []
        self._next = 0
        self._dir = shm_dir
        self._may_move = True
        _all_regions.add(self)

    def find(self, t: Tensor) -> Region | None:
        """Return the region that contains a tensor; None if it is not in shared memory."""
        region = self._own.get(storage_key(t.untyped_storage()))
        return region if region is not None and region.alive else None

    def consider(self, t: Tensor) -> None:
        """Move a tensor's storage into shared memory if it is large and was considered before.

        Storages that other libraries may point into, e.g. NumPy, are not resizable and stay where
        they are. The caller makes sure that no operation is using the storage.
        """
        storage = t.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes < MOVE_BYTES or not self._may_move or not storage.resizable():
            return
        key = storage_key(storage)
        with _lock:
            if key in self._own and self._own[key].alive:
                return
            before = self._seen.get(key)
            if not before:
                if len(self._seen) > _SWEEP:
                    self._seen = {k: w for k, w in self._seen.items() if w}
                self._seen[key] = StorageReference(storage)
                return
            del self._seen[key]
            self._sweep()
            if not _has_descriptors() or not self._fits(num_bytes):
                return
            try:
                fd = move_to_shared_memory(storage)  # the storage owns this descriptor
                mine = os.dup(fd)
            except (RuntimeError, OSError) as error:  # memory or descriptors ran out meanwhile
                self._stay(first_line(error))
                return
            self._add(storage, mine, num_bytes)

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Return zeroed bytes in shared memory, which are freed with their last view.

        Return None if this process has too many descriptors open, or the file cannot be created.
        """
        if not _has_descriptors():
            return None
        try:
            fd = window.create(max(num_bytes, 1))
        except OSError:
            return None
        t = window.Mapping(fd, max(num_bytes, 1)).bytes
        with _lock:
            self._add(t.untyped_storage(), fd, max(num_bytes, 1))
        return t[:num_bytes]

    def _add(self, storage: torch.UntypedStorage, fd: int, num_bytes: int) -> None:
        self._sweep()
        self._next += 1
        region = Region(self._next, fd, num_bytes, StorageReference(storage))
        self._own[storage_key(storage)] = region

    def _sweep(self) -> None:
        for key in [k for k, region in self._own.items() if not region.alive]:
            region = self._own.pop(key)
            os.close(region.fd)
            self._retired.append(region.number)

    def _fits(self, num_bytes: int) -> bool:
        """Return whether /dev/shm, where torch shares storages, has room; warn once if not."""
        try:
            stat = os.statvfs(self._dir)
            free = stat.f_bavail * stat.f_frsize
        except OSError:
            free = 0
        if free >= 2 * num_bytes:
            return True
        size = f"a tensor to reduce has {num_bytes >> 20} MiB"
        self._stay(f"{self._dir} has {free >> 20} MiB free, and {size}")
        return False

    def _stay(self, why: str) -> None:
        """Stop moving storages, and print why."""
        self._may_move = False
        what = "tensors are copied instead of shared, which is slower"
        print(f"hvdtrain: {why}: {what}", file=sys.stderr, flush=True)

    # Called in the thread that runs the collective

    def retired(self, most: int) -> list[int]:
        """Return up to `most` numbers of freed regions to report to the peers; each number once."""
        with _lock:
            self._sweep()
            told, self._retired = self._retired[:most], self._retired[most:]
        return told

    def map(self, owner: int, pid: int, number: int, fd: int, num_bytes: int) -> Tensor:
        """Return the bytes of a peer's region. Raises OSError."""
        mapping = self._theirs.get((owner, number))
        if mapping is None:
            # Unlike Python's mmap this keeps no descriptor open, and their number is limited.
            try:
                # A mapping made in inference mode could not be written outside that mode.
                with torch.inference_mode(False):
                    mapping = torch.from_file(
                        f"/proc/{pid}/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8
                    )
            except RuntimeError as error:
                raise OSError(str(error)) from None
            self._theirs[owner, number] = mapping
        return mapping

    def forget(self, owner: int, numbers: Iterable[int]) -> None:
        """Drop the mappings of regions that a peer has freed."""
        for number in numbers:
            self._theirs.pop((owner, number), None)

    def close(self) -> None:
        """Close the descriptors. The memory is freed with the tensors."""
        with _lock:
            own, self._own = self._own, {}
            self._theirs.clear()
        for region in own.values():
            os.close(region.fd)


# Those of all groups of this process, which share its limit on descriptors.
_all_regions: weakref.WeakSet[Regions] = weakref.WeakSet()
