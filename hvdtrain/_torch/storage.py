"""The storage behind a tensor: its identity, who refers to it, its file in shared memory.

Used by the transport `shm`, and by the gradient buckets of `hvd`.

Relies on `UntypedStorage._cdata`, the address of the C++ object, else the address of the data;
on `UntypedStorage._share_fd_cpu_`, as torch.multiprocessing does; and on `StorageWeakRef` of
torch.multiprocessing.reductions. Without one of the last two no storage is moved: tensors are then
copied through a staging area, which is slower.

Relies on `Tensor._use_count` and `torch._C._storage_Use_Count`, the references of C++. Without them
no gradient counts as private, so gradients are copied out of their buckets, which is slower.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

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


def part_of_storage(flat: Tensor, view: Tensor) -> Tensor:
    """Return a tensor like `view`, in the same memory, with a storage of its own.

    `view` is a view of `flat` without gaps. The new storage keeps that of `flat` alive, has no
    bytes but those of the view, and lives as long as something refers to them.
    """
    begin = view.storage_offset() * view.itemsize
    storage = flat.untyped_storage()[begin : begin + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(
        storage, 0, view.shape, view.stride()
    )


def has_private_gradient(p: Tensor) -> bool:
    """Return whether only the parameter `p` can see its dense gradient.

    Then no variable, view or array, no graph of autograd and no other process refers to it or to
    its memory. A private gradient may be taken for one that is not, never the reverse.
    """
    if _PRIVATE is None or any(map(int.__gt__, _count_references(p), _PRIVATE)):
        return False
    grad: Any = p.grad
    storage = grad.untyped_storage()
    # Memory that another library has made, or looks at, is not resizable.
    own = storage.resizable() and not storage.is_shared()
    return own and type(grad) is Tensor and not vars(grad)


def _count_references(p: Tensor) -> tuple[int, ...]:
    """Return the references to `p.grad` and to its storage, from Python and from C++.

    No variable is for either: a debugger that holds this function's variables would count.
    """
    of_storage = torch._C._storage_Use_Count
    return (
        sys.getrefcount(p.grad),
        p.grad._use_count(),  # type: ignore[union-attr]
        sys.getrefcount(p.grad.untyped_storage()),  # type: ignore[union-attr]
        of_storage(p.grad.untyped_storage()._cdata),  # type: ignore[union-attr]
    )


def _counts_of_private() -> tuple[int, ...] | None:
    """Return the references to a gradient that only its parameter refers to; None if unknown.

    Each counts two at most, the owner and the call that counts. More are those of a profiler that
    keeps the arguments of calls: with these, a gradient that is held would count as private.
    """
    p = torch.zeros(1, requires_grad=True, device="cpu")
    p.grad = torch.zeros(1, device="cpu")
    try:
        counts = _count_references(p)
    except AttributeError:
        return None
    return counts if max(counts) <= 2 else None


_PRIVATE = _counts_of_private()


def move_to_shared_memory(storage: torch.UntypedStorage) -> int:
    """Move a storage, and so all its views, into shared memory; return the file descriptor.

    The storage owns the descriptor. Raises RuntimeError if there is no room, or if torch has no
    function for it.
    """
    share = getattr(storage, "_share_fd_cpu_", None)
    if share is None:
        raise RuntimeError(f"torch {torch.__version__} cannot move a storage to shared memory")
    return int(share()[0])
