"""Tensors in shared memory: this rank's own, and the mappings of its peers'.

`shm` uses it to reduce large tensors without a copy. A storage that is reduced a second time is
moved into shared memory under all its views, e.g. DDP's buckets, which live as long as the run. Its
descriptor is sent with the operation. Peers map it once, and unmap it when its owner reports that
it has been freed.
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain._torch.storage import StorageReference, move_to_shared_memory, storage_key
from hvdtrain.errors import first_line
from hvdtrain.transports import shm_sync

_SHM_DIR = "/dev/shm"
MOVE_BYTES = 1 << 20  # smaller tensors are copied: a copy costs less than a system call
_SWEEP = 256  # entries in `_seen` from which on dead ones are removed


@dataclass
class SharedBuffer:
    """One storage in shared memory. Its owner never reuses its `number`."""

    number: int
    fd: int
    num_bytes: int
    storage: StorageReference


# One lock for all groups: each counts and closes the others' descriptors. A thread that holds it
# waits for nothing.
_lock = threading.RLock()


def _has_descriptors() -> bool:
    """Return whether this process may open descriptors for one more buffer.

    A buffer takes two. All groups together may use a quarter of the process's limit.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
    with _lock:
        groups = list(_all_buffers)
        for buffers in groups:
            buffers._sweep()  # an idle group keeps the descriptors of tensors that are gone
        return sum(len(buffers._own) for buffers in groups) < most


class SharedBuffers:
    """The buffers of one rank, which its peers may read and write, and its mappings of theirs.

    Call `prepare` and `allocate` in the caller's thread, `find` in any, and the rest in the thread
    that runs the collective.
    """

    def __init__(self) -> None:
        self._own: dict[int, SharedBuffer] = {}
        self._seen: dict[int, StorageReference] = {}
        self._mappings: dict[tuple[int, int], Tensor] = {}
        self._freed: list[int] = []
        self._next = 0
        self._may_move = True
        _all_buffers.add(self)

    def find(self, t: Tensor) -> SharedBuffer | None:
        """Return the buffer that contains a tensor; None if it is not in shared memory."""
        buffer = self._own.get(storage_key(t.untyped_storage()))
        return buffer if buffer is not None and buffer.storage else None

    def prepare(self, t: Tensor) -> None:
        """Move a tensor's storage into shared memory if it is large and this is the second call.

        Storages that other libraries may point into, e.g. NumPy, are not resizable and stay where
        they are. The caller makes sure that no operation is using the storage.
        """
        storage = t.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes < MOVE_BYTES or not self._may_move or not storage.resizable():
            return
        key = storage_key(storage)
        with _lock:
            if self.find(t) is not None:
                return
            if not self._seen.get(key):
                if len(self._seen) > _SWEEP:
                    self._seen = {k: w for k, w in self._seen.items() if w}
                self._seen[key] = StorageReference(storage)
                return
            del self._seen[key]
            if not _has_descriptors() or not self._fits(num_bytes):
                return
            try:
                # The storage owns the descriptor that this returns.
                mine = os.dup(move_to_shared_memory(storage))
            except (RuntimeError, OSError) as error:  # memory or descriptors ran out meanwhile
                self._stop_moving(first_line(error))
                return
            self._add(storage, mine, num_bytes)

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Return zeroed bytes in shared memory, which are freed with their last view.

        Return None if this process has too many descriptors open, or the file cannot be created.
        """
        total = max(num_bytes, 1)
        if not _has_descriptors():
            return None
        try:
            fd = shm_sync.create_memfd(total)
        except OSError:
            return None
        try:
            t = shm_sync.SharedMapping(fd, total).bytes
        except OSError:  # no address space left, e.g. by `ulimit -v`
            os.close(fd)
            return None
        with _lock:
            self._add(t.untyped_storage(), fd, total)
        return t[:num_bytes]

    def _add(self, storage: torch.UntypedStorage, fd: int, num_bytes: int) -> None:
        self._sweep()
        self._next += 1
        buffer = SharedBuffer(self._next, fd, num_bytes, StorageReference(storage))
        self._own[storage_key(storage)] = buffer

    def _sweep(self) -> None:
        for key in [k for k, buffer in self._own.items() if not buffer.storage]:
            buffer = self._own.pop(key)
            os.close(buffer.fd)
            self._freed.append(buffer.number)

    def _fits(self, num_bytes: int) -> bool:
        """Return whether /dev/shm, where torch shares storages, has room; warn once if not.

        There must be enough for all ranks of the host, which look at the same time, for torch below
        2.10 ends by SIGBUS those that find too little; and as much again must be left for other
        programs, e.g. the workers of a DataLoader.
        """
        try:
            stat = os.statvfs(_SHM_DIR)
            free = stat.f_bavail * stat.f_frsize
        except OSError:
            free = 0
        wanted = (len(shm_sync.watched) + 2) * num_bytes  # of the peers, of this rank, and again
        if free >= wanted:
            return True
        share = f"a shared tensor of {num_bytes >> 20} MiB needs {wanted >> 20} MiB"
        self._stop_moving(f"{_SHM_DIR} has {free >> 20} MiB free, but {share}")
        return False

    def _stop_moving(self, why: str) -> None:
        """Stop moving storages, and print why."""
        self._may_move = False
        shm_sync.say_slower(why, "tensors are copied instead of shared")

    # Called in the thread that runs the collective

    def has_freed(self) -> bool:
        """Return whether `take_freed` returns any."""
        if self._own and not self._freed:
            with _lock:
                self._sweep()
        return bool(self._freed)

    def take_freed(self, most: int) -> list[int]:
        """Return up to `most` numbers of freed buffers to report to the peers; each number once."""
        if not self._own and not self._freed:
            return []
        with _lock:
            self._sweep()
            numbers, self._freed = self._freed[:most], self._freed[most:]
        return numbers

    def map_peer(self, owner: int, pid: int, number: int, fd: int, num_bytes: int) -> Tensor:
        """Return the bytes of a peer's buffer. Raises RuntimeError."""
        mapping = self._mappings.get((owner, number))
        if mapping is None:
            # Unlike Python's mmap this keeps no descriptor open, and their number is limited.
            # A mapping made in inference mode could not be written outside that mode.
            with torch.inference_mode(False):
                mapping = torch.from_file(
                    f"/proc/{pid}/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8
                )
            self._mappings[owner, number] = mapping
        return mapping

    def unmap(self, owner: int, numbers: Iterable[int]) -> None:
        """Drop the mappings of buffers that a peer has freed."""
        for number in numbers:
            self._mappings.pop((owner, number), None)

    def close(self) -> None:
        """Close the descriptors. The memory is freed with the tensors."""
        with _lock:
            own, self._own = self._own, {}
            self._mappings.clear()
        for buffer in own.values():
            os.close(buffer.fd)


# Those of all groups of this process, which share its limit on descriptors.
_all_buffers: weakref.WeakSet[SharedBuffers] = weakref.WeakSet()
