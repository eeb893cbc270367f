"""A copy in memory of what a checkpoint holds: `Snapshot`, for `--checkpoint-async`.

The Checkpointer takes one at a step boundary, and a thread writes it. The memory is kept for the
next one: new pages from the kernel cost five times as much as the copy itself.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor

from hvdtrain._torch.storage import storage_key
from hvdtrain.errors import CheckpointError, one_line
from hvdtrain.system.trees import map_tree


class Snapshot:
    """Copies nested structures of tensors and values. One copy at a time is valid."""

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.UntypedStorage]] = {}
        """The memory of the last copy, by size in bytes."""

    def take(self, tree: Any) -> Any:
        """Return a copy of `tree` that nothing changes until the next call. Not collective.

        The tensors of a CPU model are its own, and the next step changes them in place. Tensors
        that share memory share it in the copy, too: torch.save then writes the same bytes. Raises
        CheckpointError if there is too little memory, or a value cannot be copied.
        """
        free, self._kept = self._kept, {}
        storages: dict[int, torch.UntypedStorage] = {}
        memo: dict[int, Any] = {}  # what deepcopy has copied already, by id

        def copy_tensor(t: Tensor) -> None:
            if _is_plain(t):
                source = t.untyped_storage()
                key = storage_key(source)
                if key not in storages:
                    storages[key] = self._copy(source, free)
                view = torch.empty(0, dtype=t.dtype)
                memo[id(t)] = view.set_(storages[key], t.storage_offset(), t.size(), t.stride())

        try:
            map_tree(copy_tensor, Tensor, tree)
            return copy.deepcopy(tree, memo)
        except Exception as error:  # copying a callback's state can raise nearly anything
            raise CheckpointError(
                f"cannot copy the state for a checkpoint: {one_line(error)}; leave "
                "--checkpoint-async out"
            ) from error

    def _copy(
        self, source: torch.UntypedStorage, free: dict[int, list[torch.UntypedStorage]]
    ) -> torch.UntypedStorage:
        size = source.nbytes()
        spare = free.get(size)
        target: Any = spare.pop() if spare else torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        self._kept.setdefault(size, []).append(target)
        target.copy_(source)
        return cast("torch.UntypedStorage", target)


def _is_plain(t: Tensor) -> bool:
    """Return whether a tensor is a view of memory and nothing else; deepcopy takes the others."""
    return (
        type(t) is Tensor
        and t.layout is torch.strided
        and t.device.type == "cpu"
        and not (t.is_quantized or t.is_conj() or t.is_neg() or t.requires_grad or vars(t))
    )
