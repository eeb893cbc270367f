"""What `shm` and `process_group` share: errors, calls in words, flat tensors, and their sums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR = "sum product min max band bor bxor".split()


class TransportError(RuntimeError):
    """A collective of one of hvdtrain's transports failed. Torch's own raise RuntimeError, too."""


class Mismatch(TransportError):
    """The ranks called different collectives. Raised on all of them; the group stays usable."""


def mismatch(calls: Mapping[int, str]) -> Mismatch:
    """Return the error that lists which rank called what."""
    ranks: dict[str, list[str]] = {}
    for rank, call in sorted(calls.items()):
        ranks.setdefault(call, []).append(str(rank))
    text = "; ".join(f"rank {', '.join(who)}: {call}" for call, who in ranks.items())
    return Mismatch(f"the ranks called different collectives: {text}")


def call_text(signature: str, limit: int) -> bytes:
    """Return a call in at most `limit` bytes; a longer one ends in a digest of the whole call.

    So ranks whose calls differ in the part that is cut off have different texts.
    """
    text = signature.encode()
    if len(text) <= limit:
        return text
    end = f"...#{hashlib.sha256(text).hexdigest()[:16]}".encode()
    return text[: limit - len(end)] + end


def ends_within(work: Any, seconds: float) -> bool:
    """Wait up to `seconds` for a c10d operation; return whether it has completed. Raises its error.

    A timeout is recognised by the operation's state, not by the text of an error.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it failed: raise its error; or it completed just after the timeout
    return True


def share_bounds(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return the bounds of part number `part` of `count` elements.

    They are multiples of 64 elements, so that no two parts share a cache line.
    """
    each = -(-count // (64 * parts)) * 64
    return min(part * each, count), min((part + 1) * each, count)


def flatten(t: Tensor) -> Tensor:
    """Return the elements in one dimension: a view if they are `t`'s memory, else a copy."""
    if t.is_neg() or t.is_conj():
        t = t.resolve_conj().resolve_neg()
    flat = t.detach().contiguous().view(-1)
    # A single element may have any stride, but can be viewed as bytes with stride 1 only.
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy what `flat` holds, one after another, to `tensors`; nothing if it is a view of one."""
    t = tensors[0] if len(tensors) == 1 else None
    if t is not None and t.is_contiguous() and not (t.is_neg() or t.is_conj()):
        return
    pieces = torch.split(as_bytes(flat), [t.nbytes for t in tensors])
    for t, piece in zip(tensors, pieces, strict=True):
        t.copy_(piece.view(t.dtype).view(t.shape))


def as_bytes(flat: Tensor) -> Tensor:
    """Return a tensor of `flatten` viewed as bytes."""
    return flat.view(torch.uint8)


def supports(op: str, dtype: torch.dtype) -> bool:
    """Return whether `op` can combine elements of this dtype: Gloo's table, and int16."""
    if dtype in _FLOATS:
        return op in (SUM, PRODUCT, MIN, MAX)
    return op == SUM if dtype.is_complex else dtype in _WHOLE and op in _COMBINE


HALVES = (torch.float16, torch.bfloat16)
SUMMED_WITHOUT_CAST = {torch.float32, torch.float64, torch.int32, torch.int64}
"""Dtypes that are added up in the dtype itself, by plain addition."""
_BLOCK_BYTES = 256 << 10  # small enough to stay in a core's cache
_FLOATS = (*HALVES, torch.float32, torch.float64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Combiner:
    """Combines tensors one cache-sized block at a time.

    It keeps its scratch memory: allocating new memory costs more than the arithmetic done in it.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}

    def combine(
        self, buffers: Sequence[Tensor], op: str, divisor: float, into: list[Tensor]
    ) -> None:
        """Combine `buffers` in their order, divide, and write the result to every tensor of `into`.

        `into` may contain some of `buffers`.
        """
        dtype = torch.float32 if buffers[0].dtype in HALVES else buffers[0].dtype
        is_one_block = buffers[0].numel() * dtype.itemsize <= _BLOCK_BYTES
        is_sum = op == SUM and divisor == 1 and buffers[0].dtype in SUMMED_WITHOUT_CAST
        if is_one_block and is_sum and len(buffers) == 2 and len(into) == 1:
            torch.add(buffers[0], buffers[1], out=into[0])  # the same as below, without slices
            return
        count = _BLOCK_BYTES // dtype.itemsize
        for begin in range(0, buffers[0].numel(), count):
            end = begin + count
            first, *rest = (b[begin:end] for b in buffers)
            targets = [target[begin:end] for target in into]
            # A torch.add may write over its own inputs. A third input must not be overwritten
            # before it is read, so more than two are summed in the first, or in scratch memory.
            add = op == SUM and rest and dtype == first.dtype != torch.bool
            in_place = add and (len(rest) == 1 or into[0] is buffers[0])
            total = targets.pop(0) if in_place else self._scratch_for(dtype)[: first.numel()]
            if add:
                torch.add(first, rest.pop(0), out=total)
            else:
                total.copy_(first)
            for other in rest:
                # As c10d defines `op`: logically for bools.
                (_BOOL if dtype == torch.bool else _COMBINE)[op](total, other)
            if divisor > 1:
                total.div_(divisor)
            for target in targets:
                target.copy_(total)

    def _scratch_for(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._scratch:
            # A tensor made in inference mode could not be written outside that mode.
            with torch.inference_mode(False):
                count = _BLOCK_BYTES // dtype.itemsize
                self._scratch[dtype] = torch.empty(count, dtype=dtype, device="cpu")
        return self._scratch[dtype]


_COMBINE = {
    SUM: torch.Tensor.add_,
    PRODUCT: torch.Tensor.mul_,
    MIN: lambda a, b: torch.minimum(a, b, out=a),
    MAX: lambda a, b: torch.maximum(a, b, out=a),
    BAND: torch.Tensor.bitwise_and_,
    BOR: torch.Tensor.bitwise_or_,
    BXOR: torch.Tensor.bitwise_xor_,
}
_BOOL = {
    **dict.fromkeys((SUM, MAX, BOR), torch.Tensor.logical_or_),
    **dict.fromkeys((PRODUCT, MIN, BAND), torch.Tensor.logical_and_),
    BXOR: torch.Tensor.logical_xor_,
}
# c10d's reduce operations, and their names here. AVG is a sum with the group's size as divisor.
REDUCE_OPS = {getattr(dist.ReduceOp, name.upper()): name for name in _COMBINE}
