"""alltoall: every rank sends rows to every other.

Collective over the process set; ranks match calls by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set

Splits = Tensor | Sequence[int] | None


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to send `splits[i]` rows to rank i, or equally many without splits; return a handle.

    `synchronize` then returns the received rows, and their number from each rank.
    """
    counts = _counts(tensor, splits, process_set)
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def select(result: Any) -> tuple[Tensor, Tensor]:
        return result[0], result[1].to(device)

    return handles.submit(
        "alltoall", [tensor], name, process_set, select=select, splits=tuple(counts)
    )


def _counts(tensor: Tensor, splits: Splits, process_set: ProcessSet) -> list[int]:
    """Return the number of rows for each rank. Raises ValueError for splits that do not fit."""
    # `submit` raises for a set that is not registered, so its size does not matter here.
    size = handles.set_size(process_set) or 1
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the "
                "number of workers."
            )
        return [rows // size] * size
    if isinstance(splits, Tensor):
        if splits.dim() != 1:
            raise ValueError("alltoall expects a 1D splits tensor")
        if splits.dtype != torch.int32:
            raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
        splits = splits.tolist()
    counts = [int(n) for n in splits]
    if len(counts) != size:
        raise ValueError("Number of entries in splits does not equal number of workers.")
    if any(n < 0 for n in counts):
        raise ValueError(f"splits={counts} must not be negative.")
    if sum(counts) > rows:
        raise ValueError("Sum of splits entries is greater than the first dimension of tensor.")
    return counts
