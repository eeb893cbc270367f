"""The storage behind a tensor: its identity, whether it still exists, its file in shared memory.

Used by the transport `shm`, and by the copies of `--checkpoint-async`.

Relies on `UntypedStorage._cdata`, the address of the C++ object, else the address of the data;
on `UntypedStorage._share_fd_cpu_`, as torch.multiprocessing does; and on `StorageWeakRef` of
torch.multiprocessing.reductions. Without one of the last two no storage is moved: tensors are then
copied through a staging area, which is slower.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from torch.multiprocessing.reductions import StorageWeakRef
except ImportError:
    StorageWeakRef = None  # type: ignore[assignment, misc]


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has."""
    key = getattr(storage, "_cdata", None)
    return storage.data_ptr() if key is None else int(key)


class StorageReference:
    """A weak reference to a storage: true as long as the storage exists."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        known = StorageWeakRef is not None
        self._ref: Any = StorageWeakRef(storage) if known else None  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        return self._ref is not None and not self._ref.expired()


def move_to_shared_memory(storage: torch.UntypedStorage) -> int:
    """Move a storage, and so all its views, into shared memory; return the file descriptor.

    The storage owns the descriptor. Raises RuntimeError if there is no room, or if torch has no
    function for it.
    """
    share = getattr(storage, "_share_fd_cpu_", None)
    if share is None:
        raise RuntimeError(f"torch {torch.__version__} cannot move a storage to shared memory")
    return int(share()[0])
