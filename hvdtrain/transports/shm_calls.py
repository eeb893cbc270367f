"""The calls of one host's ranks in shared memory, and their comparison.

`shm` uses it at the beginning of every operation. Each rank writes its call to a slot of its own
memory before a barrier, and reads the others' after it. Two slots alternate, so that no second
barrier is needed: a slot is written again only after a barrier that every reader has entered.

The last rank to arrive compares the slots. If they are alike, and carry nothing but the text of the
call, the others need not read them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hvdtrain.transports import page
from hvdtrain.transports.shm_buffers import SharedBuffers
from hvdtrain.transports.shm_sync import SLOT_BYTES, RankMemory
from hvdtrain.transports.transport import SUM, SUMMED_WITHOUT_CAST, call_text

# A call: number of the tensor's shared buffer (0: none), its descriptor and size, the tensor's
# offset in it; lengths of the two fields that follow: freed buffers, text of the call.
_SLOT = struct.Struct("<QiQQHH")
_MAX_FREED = 16  # freed buffers that one operation can report
TEXT_BYTES = SLOT_BYTES - _SLOT.size - 8 * _MAX_FREED
_MOST_PACKED = 1000  # calls that are kept as the bytes of a slot


class Call(NamedTuple):
    """The content of a rank's slot: its call, and the shared buffer that contains its tensor."""

    signature: bytes
    buffer: int
    fd: int
    buffer_bytes: int
    offset: int


@lru_cache(_MOST_PACKED)
def _pack(
    signature: str, number: int = 0, fd: int = -1, num_bytes: int = 0, offset: int = 0, *freed: int
) -> bytes:
    """Return the content of a slot."""
    text = call_text(signature, TEXT_BYTES)
    header = _SLOT.pack(number, fd, num_bytes, offset, len(freed), len(text))
    return header + struct.pack(f"<{len(freed)}Q", *freed) + text


class SmallCall:
    """A small all-reduce: the size and dtype of its tensor, `op` and `divisor`."""

    def __init__(
        self, signature: str, dtype: torch.dtype, num_bytes: int, op: str, divisor: int
    ) -> None:
        self.signature, self.op, self.divisor, self.num_bytes = signature, op, divisor, num_bytes
        self.adds_plainly = op == SUM and divisor == 1 and dtype in SUMMED_WITHOUT_CAST
        self.reduction: int | None = None
        """The address of the call in C, if `page.Page.reduce` can do it."""
        if op == SUM and dtype in page.DTYPES:
            text = _pack(signature)
            arguments = text, len(text), num_bytes, page.DTYPES[dtype], divisor
            self._kept = page.Reduction(*arguments)
            self.reduction = ctypes.addressof(self._kept)


small_call = lru_cache(_MOST_PACKED)(SmallCall)


class CallSlots:
    """The slots of one host's ranks, by local rank."""

    def __init__(self, memories: list[RankMemory], local_rank: int, buffers: SharedBuffers) -> None:
        self._local_rank = local_rank
        self._buffers = buffers
        self._slots = [[memory.slot(number) for memory in memories] for number in range(2)]
        self.comparison_flag = memories[0].flag
        """Where the last rank to arrive stores the result of `compare`."""
        self._own_text = b""  # what this rank has written, if it carries nothing but its text

    def write(self, sequence: int, signature: str, t: Tensor | None) -> None:
        """Write this rank's call to its slot, with its tensor's buffer and the freed buffers."""
        buffer = self._buffers.find(t) if t is not None else None
        freed = self._buffers.take_freed(_MAX_FREED)
        if buffer is not None and t is not None:
            offset = int(t.storage_offset()) * t.element_size()
            call = _pack(signature, buffer.number, buffer.fd, buffer.num_bytes, offset, *freed)
        elif freed:
            call = _pack(signature, 0, -1, 0, 0, *freed)
        else:
            call = _pack(signature)
        self._own_text = b"" if buffer is not None or freed else call
        self._slots[sequence % 2][self._local_rank][: len(call)] = call

    def read_all(self, sequence: int) -> list[Call]:
        """Return the slots of all local ranks, and unmap the buffers that they report as freed."""
        calls = []
        for i, slot in enumerate(self._slots[sequence % 2]):
            *buffer, num_freed, length = _SLOT.unpack_from(slot)
            at = _SLOT.size + 8 * num_freed
            self._buffers.unmap(i, struct.unpack_from(f"<{num_freed}Q", slot, _SLOT.size))
            calls.append(Call(bytes(slot[at : at + length]), *buffer))
        return calls

    def compare(self, sequence: int) -> bool:
        """Return whether all ranks have written the same text and nothing else."""
        plain, end = self._own_text, len(self._own_text)
        return bool(plain) and all(slot[:end] == plain for slot in self._slots[sequence % 2])

    def publish(self, sequence: int, is_match: bool, on_match: Callable[[], object] | None) -> None:
        """Store the result of `compare` in `comparison_flag`.

        Called by the last rank to arrive, while the others wait. If the ranks made the same call,
        `on_match` is called.
        """
        if on_match is not None and (
            is_match or len({call.signature for call in self.read_all(sequence)}) == 1
        ):
            on_match()
        self.comparison_flag[0] = is_match
