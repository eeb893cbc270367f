"""What moves the bytes of one group of ranks: the contract of a transport of hvdtrain's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What c10d's reduce operations are to a carrier. AVG is a sum whose factor is 1 / size.
SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR = "sum product min max band bor bxor".split()
REDUCE_OPS = {
    dist.ReduceOp.SUM: SUM,
    dist.ReduceOp.PRODUCT: PRODUCT,
    dist.ReduceOp.MIN: MIN,
    dist.ReduceOp.MAX: MAX,
    dist.ReduceOp.BAND: BAND,
    dist.ReduceOp.BOR: BOR,
    dist.ReduceOp.BXOR: BXOR,
}


class TransportError(RuntimeError):
    """A collective of one of hvdtrain's transports failed. Torch's own are RuntimeErrors, too."""


class Mismatch(TransportError):
    """The ranks called different collectives. All of them are told; the group stays usable."""


class PeerLost(TransportError):
    """A rank has ended, or did not come in time. The group is of no use any more."""


class Carrier(ABC):
    """Carries out collectives on CPU tensors, one at a time, in one order on all ranks.

    Every method is collective and blocks; tensors are contiguous and one-dimensional. `what` says
    in words what this rank calls: where it is not the same everywhere all ranks raise Mismatch.
    Raises PeerLost where a rank has ended, or did not come within the group's timeout.
    """

    name: str
    rank: int
    size: int
    timeout_s: float  # how long an operation waits for a rank; may be set at any time

    @abstractmethod
    def barrier(self, what: str) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def all_reduce(self, what: str, t: Tensor, op: str, divisor: int = 1) -> None:
        """Combine `t` over all ranks in rank order, in place; then divide it.

        Halves are added up in float32. Whole numbers are divided only by 1.
        """

    @abstractmethod
    def reduce_scatter(self, what: str, out: Tensor, t: Tensor, op: str, divisor: int = 1) -> None:
        """Combine `t`, `size` times as long as `out`, and keep this rank's part of it in `out`."""

    @abstractmethod
    def broadcast(self, what: str, data: Tensor, root: int) -> None:
        """Overwrite bytes with the root's, in place."""

    @abstractmethod
    def all_gather(self, what: str, out: Tensor, data: Tensor) -> None:
        """Concatenate equally many bytes of every rank, in rank order, in `out`."""

    @abstractmethod
    def all_to_all(
        self, what: str, out: Tensor, data: Tensor, received: list[int], sent: list[int]
    ) -> None:
        """Send `sent[r]` bytes to rank r, and receive `received[r]` from it, in rank order."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Release everything. Not collective; twice is safe."""

    def consider(self, t: Tensor) -> None:
        """Prepare for a tensor that is about to be combined. Not collective; in the caller's
        thread, while nothing else uses its storage.
        """
        return

    def wait_for(self, what: str, work: Any) -> None:
        """Wait for an operation of the Gloo group beside this. Raises PeerLost where it fails."""
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"{what}, by Gloo: {first_line(error)}") from None

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Return bytes that this carrier moves without a copy; None where it makes no difference.

        Not collective. They are released with the tensor.
        """
        return None


def differ(calls: Mapping[int, str]) -> Mismatch:
    """Return the error that says which rank has called what."""
    ranks: dict[str, list[str]] = {}
    for rank, call in sorted(calls.items()):
        ranks.setdefault(call, []).append(str(rank))
    told = "; ".join(f"rank {', '.join(who)}: {call}" for call, who in ranks.items())
    return Mismatch(f"the ranks called different collectives: {told}")


def check_plans(what: str, plans: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise Mismatch where ranks do not send each other as many bytes as the other expects.

    A rank's plan is how many it sends to each, and how many it receives from each.
    """
    wrong = [
        f"rank {a} sends {sent} bytes to rank {b}, which expects {plans[b][1][a]}"
        for a, (row, _) in enumerate(plans)
        for b, sent in enumerate(row)
        if sent != plans[b][1][a]
    ]
    if wrong:
        raise Mismatch(f"{what}: {'; '.join(wrong)}")


def ends_within(work: Any, seconds: float) -> bool:
    """Wait up to `seconds` for an operation of c10d, and return whether it has ended. Raises its
    error. A timeout is recognised by the operation's state, not by the text of an error.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has failed, or ended at the same moment
    return True


def first_line(error: BaseException) -> str:
    """Return what an error of torch's says, without what it appends."""
    return str(error).strip().split("\n")[0]


def share(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return where a part of `count` elements begins and ends; borders are at cache lines."""
    each = -(-count // parts)
    each = -(-each // 64) * 64
    return min(part * each, count), min((part + 1) * each, count)


def as_bytes(t: Tensor) -> Tensor:
    """Return a view of a contiguous tensor's bytes."""
    return t.view(torch.uint8)


def supports(op: str, dtype: torch.dtype) -> bool:
    """Whether elements of this type can be combined so; Gloo's table, and int16."""
    if dtype in _FLOATS:
        return op in (SUM, PRODUCT, MIN, MAX)
    if dtype.is_complex:
        return op == SUM
    return dtype in _WHOLE


HALVES = (torch.float16, torch.bfloat16)
_BLOCK_BYTES = 256 << 10  # what stays in a core's cache
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Combiner:
    """Combines tensors a cache-sized block at a time, in memory that is kept: fresh memory costs
    more than what it is for.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}

    def combine(self, buffers: Sequence[Tensor], op: str, divisor: int, into: list[Tensor]) -> None:
        """Combine buffers, in their order, and divide; into others, or into some of them."""
        dtype = torch.float32 if buffers[0].dtype in HALVES else buffers[0].dtype
        for begin in range(0, buffers[0].numel(), _BLOCK_BYTES // dtype.itemsize):
            end = begin + _BLOCK_BYTES // dtype.itemsize
            first, *rest = (b[begin:end] for b in buffers)
            targets = [target[begin:end] for target in into]
            # Two addends may be read where the only sum is written; more would be overwritten.
            add = op == SUM and bool(rest) and dtype == first.dtype != torch.bool
            straight = add and len(rest) == len(targets) == 1
            total = targets[0] if straight else self._room(dtype)[: first.numel()]
            if add:
                torch.add(first, rest.pop(0), out=total)
            else:
                total.copy_(first)
            for other in rest:
                _combine_(total, other, op)
            if divisor > 1:
                total.div_(divisor)
            for target in [] if straight else targets:
                target.copy_(total)

    def _room(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._scratch:
            with torch.inference_mode(False):  # what is made in that mode is of use in no other
                room = torch.empty(_BLOCK_BYTES // dtype.itemsize, dtype=dtype)
            self._scratch[dtype] = room
        return self._scratch[dtype]


def _combine_(into: Tensor, other: Tensor, op: str) -> Tensor:
    """Combine `other` into `into`, in place, as c10d defines `op`; bools are logical."""
    if into.dtype == torch.bool:
        return _BOOL[op](into, other)
    return _COMBINE[op](into, other)


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
    SUM: torch.Tensor.logical_or_,
    PRODUCT: torch.Tensor.logical_and_,
    MIN: torch.Tensor.logical_and_,
    MAX: torch.Tensor.logical_or_,
    BAND: torch.Tensor.logical_and_,
    BOR: torch.Tensor.logical_or_,
    BXOR: torch.Tensor.logical_xor_,
}
