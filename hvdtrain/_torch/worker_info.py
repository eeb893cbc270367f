"""What `torch.utils.data.get_worker_info` returns in a loader process. Used by
`training.data`.

Relies on `torch.utils.data._utils.worker._worker_info`, which that function returns. Without it, a
stream that divides itself between loader processes, as torch's manual advises, would be divided
twice, and lose most of its items. The object itself is frozen: only object.__setattr__ changes it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils import worker


def take_worker_info() -> tuple[int, int]:
    """Return the number of this loader process and how many there are; 0 and 1 outside of one.

    Afterwards `get_worker_info` returns None: the caller divides the items.
    """
    info = get_worker_info()
    worker._worker_info = None
    return (info.id, info.num_workers) if info else (0, 1)


def set_worker_dataset(dataset: Dataset[Any]) -> None:
    """Let `get_worker_info` return `dataset`, not the wrapper that the loader was made with."""
    if info := get_worker_info():
        object.__setattr__(info, "dataset", dataset)
