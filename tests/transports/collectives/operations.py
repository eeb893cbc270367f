"""The operations of torch.distributed, each with what it must give, however it is called.

An operation is a generator: it calls torch.distributed, yields the work, and checks the result when
it is resumed. So a test can call it in any group, with any tensors, and several at once:

    complete(all_reduce(Call(dist, 20_000)), broadcast(Call(dist, 5, is_async=True)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.transports.collectives.table import Dist, close, computed, same, values

Work = Any
Layout = Callable[[int, torch.dtype], Tensor]


def contiguous(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), -1, device="cpu").to(dtype)


def every_second(count: int, dtype: torch.dtype) -> Tensor:
    """A view of every second element of its memory."""
    return contiguous(2 * count, dtype)[::2]


def transposed(count: int, dtype: torch.dtype) -> Tensor:
    return contiguous(count, dtype).view(4, count // 4).t()


def channels_last(count: int, dtype: torch.dtype) -> Tensor:
    return contiguous(count, dtype).view(count // 24, 2, 3, 4).to(memory_format=torch.channels_last)


def negative_view(count: int, dtype: torch.dtype) -> Tensor:
    """A view whose memory holds its elements with the other sign, and others between them."""
    return torch.full((count,), -1j, dtype=torch.complex64, device="cpu").conj().imag


LAYOUTS: Sequence[Layout] = (every_second, transposed, channels_last, negative_view)


@dataclass
class Call:
    """How every rank of a group calls an operation."""

    dist: Dist
    count: int = 5
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    root: int = 0
    """In the group."""
    group: Any = None
    turns: int = 1
    """How often, with the same tensors: a transport may move those that it has seen before."""
    is_async: bool = False
    layout: Layout = contiguous
    made: list[Tensor] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return int(self.dist.get_rank(self.group))

    @property
    def n(self) -> int:
        return int(self.dist.get_world_size(self.group))

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def reduce_op(self) -> Any:
        return getattr(self.dist.ReduceOp, self.op)

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.is_async}

    def place_of(self, rank: int) -> int:
        """Return the rank in the job of a rank of the group."""
        return int(self.dist.get_global_rank(self.group or self.dist.group.WORLD, rank))

    def tensor(self, parts: int = 1) -> Tensor:
        """Return a new tensor with the elements of so many ranks."""
        t = self.layout(parts * self.count, self.dtype)
        self.made.append(t)
        return t

    def several(self) -> list[Tensor]:
        return [self.tensor() for _ in range(self.n)]

    def values(self, rank: int, parts: int = 1) -> Tensor:
        return values(rank, parts * self.count, self.dtype)

    def fill(self, t: Tensor, rank: int) -> None:
        """Give a tensor the values of a rank."""
        t.copy_(values(rank, t.numel(), self.dtype).view(t.shape))

    def total(self, turn: int, parts: int = 1) -> Tensor:
        """Return what the operation makes of the values of all ranks."""
        return computed(self.n, self.op, parts * self.count, self.dtype, turn)

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's part of what has a part for every rank."""
        return whole[self.rank * self.count :][: self.count]

    def check(self, t: Tensor, expected: Tensor) -> None:
        """Compare a result."""
        compare = close if self.op == "AVG" and self.dtype.is_floating_point else same
        compare(t.reshape(-1), expected)

    def check_memory(self) -> None:
        """Check that nothing was written between the elements of strided tensors."""
        for t in self.made:
            if self.layout is every_second and t._base is not None:
                assert t._base[1::2].eq(-1).all()


Operation = Callable[[Call], Iterator[Work]]


# Operations that move values


def broadcast(call: Call) -> Iterator[Work]:
    t = call.tensor()
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        yield call.dist.broadcast(t, call.place_of(call.root), **call.how)
        call.check(t, call.values(call.root + turn))


def all_gather(call: Call) -> Iterator[Work]:
    parts, t = call.several(), call.tensor()
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        yield call.dist.all_gather(parts, t, **call.how)
        for r, part in enumerate(parts):
            call.check(part, call.values(r + turn))


def all_gather_into_tensor(call: Call) -> Iterator[Work]:
    out, t = call.tensor(call.n), call.tensor()
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        yield call.dist.all_gather_into_tensor(out, t, **call.how)
        call.check(out, torch.cat([call.values(r + turn) for r in range(call.n)]))


def all_to_all_single(call: Call) -> Iterator[Work]:
    out, t = call.tensor(call.n), call.tensor(call.n)
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        yield call.dist.all_to_all_single(out, t, **call.how)
        received = [call.mine(call.values(r + turn, call.n)) for r in range(call.n)]
        call.check(out, torch.cat(received))


def _num_parts(sender: int, receiver: int, n: int) -> int:
    """How much a rank sends to another: rank 0 nothing to itself."""
    return (2 * sender + receiver) % (n + 1)


def all_to_all_uneven(call: Call) -> Iterator[Work]:
    """By splits, which are rows."""
    sent = [_num_parts(call.rank, r, call.n) for r in range(call.n)]
    received = [_num_parts(r, call.rank, call.n) for r in range(call.n)]
    t, out = call.tensor(sum(sent)), call.tensor(sum(received))
    rows = call.layout(call.count, call.dtype).shape[0]
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        yield call.dist.all_to_all_single(
            out, t, [m * rows for m in received], [m * rows for m in sent], **call.how
        )
        parts = []
        for r in range(call.n):
            to_each = [_num_parts(r, k, call.n) * call.count for k in range(call.n)]
            whole = values(r + turn, sum(to_each), call.dtype)
            parts.append(torch.split(whole, to_each)[call.rank])
        call.check(out, torch.cat(parts))


def all_to_all(call: Call) -> Iterator[Work]:
    """By lists."""
    sent = [call.tensor(_num_parts(call.rank, r, call.n)) for r in range(call.n)]
    got = [call.tensor(_num_parts(r, call.rank, call.n)) for r in range(call.n)]
    for turn in range(call.turns):
        for r, t in enumerate(sent):
            call.fill(t, 2 * call.rank + r + turn)
        yield call.dist.all_to_all(got, sent, **call.how)
        for r, t in enumerate(got):
            call.check(t, values(2 * r + call.rank + turn, t.numel(), call.dtype))


def gather(call: Call) -> Iterator[Work]:
    parts, t = call.several(), call.tensor()
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        given = parts if call.is_root else None
        yield call.dist.gather(t, given, call.place_of(call.root), **call.how)
        for r, part in enumerate(given or []):
            call.check(part, call.values(r + turn))


def scatter(call: Call) -> Iterator[Work]:
    parts, t = call.several(), call.tensor()
    for turn in range(call.turns):
        for r, part in enumerate(parts):
            call.fill(part, r + 1 + turn)
        given = parts if call.is_root else None
        yield call.dist.scatter(t, given, call.place_of(call.root), **call.how)
        call.check(t, call.values(call.rank + 1 + turn))


def send(call: Call) -> Iterator[Work]:
    """From the root to the next rank."""
    receiver = (call.root + 1) % call.n
    if call.root == receiver or call.rank not in (call.root, receiver):
        return
    t, dist = call.tensor(), call.dist
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        if call.is_root:
            move, other = dist.isend if call.is_async else dist.send, receiver
        else:
            move, other = dist.irecv if call.is_async else dist.recv, call.root
        moved = move(t, call.place_of(other), group=call.group)
        yield moved if call.is_async else None
        call.check(t, call.values(call.root + turn))


# Operations that reduce


def all_reduce(call: Call) -> Iterator[Work]:
    t = call.tensor()
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        yield call.dist.all_reduce(t, call.reduce_op, **call.how)
        call.check(t, call.total(turn))


def reduce(call: Call) -> Iterator[Work]:
    """The other ranks keep their values, but on Gloo."""
    t = call.tensor()
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        yield call.dist.reduce(t, call.place_of(call.root), call.reduce_op, **call.how)
        if call.is_root:
            call.check(t, call.total(turn))
        elif call.dist.get_backend() != "gloo":
            same(t.reshape(-1), call.values(call.rank + turn))


def reduce_scatter_tensor(call: Call) -> Iterator[Work]:
    """The input keeps its values."""
    out, t = call.tensor(), call.tensor(call.n)
    for turn in range(call.turns):
        call.fill(t, call.rank + turn)
        yield call.dist.reduce_scatter_tensor(out, t, call.reduce_op, **call.how)
        call.check(out, call.mine(call.total(turn, call.n)))
        same(t.reshape(-1), call.values(call.rank + turn, call.n))


def reduce_scatter(call: Call) -> Iterator[Work]:
    """Of lists."""
    out, parts = call.tensor(), call.several()
    for turn in range(call.turns):
        for r, part in enumerate(parts):
            call.fill(part, call.rank + r + turn)
        yield call.dist.reduce_scatter(out, parts, call.reduce_op, **call.how)
        call.check(out, call.total(call.rank + turn))


ROOTED = (broadcast, gather, scatter, send, reduce)
REDUCTIONS = (all_reduce, reduce, reduce_scatter_tensor, reduce_scatter)
MOVES = (
    broadcast,
    all_gather,
    all_gather_into_tensor,
    all_to_all_single,
    all_to_all_uneven,
    all_to_all,
    gather,
    scatter,
    send,
)


def operations(dist: Dist) -> tuple[Operation, ...]:
    """Return all, but for what Gloo has not."""
    every: tuple[Operation, ...] = (*MOVES, *REDUCTIONS)
    return tuple(o for o in every if o is not all_to_all or dist.get_backend() != "gloo")


def complete(*started: Iterator[Work]) -> None:
    """Run operations at once, to their ends."""
    # Resuming an operation checks its result and may call it again.
    works = [(one, next(one, StopIteration)) for one in started]
    while works := [(one, work) for one, work in works if work is not StopIteration]:
        for _, work in reversed(works):
            if work is not None:
                work.wait()
        works = [(one, next(one, StopIteration)) for one, _ in works]


def run_each(dist: Dist, which: Sequence[Operation] | None = None, **how: Any) -> None:
    """Run one operation after another, with each root; `how`: the fields of Call."""
    for operation in which or operations(dist):
        for root in range(dist.get_world_size(how.get("group")) if operation in ROOTED else 1):
            call = Call(dist, root=root, **how)
            try:
                complete(operation(call))
                call.check_memory()
            except (AssertionError, RuntimeError) as error:
                what = f"{operation.__name__} of {call.count} x {call.dtype}, {call.op}"
                what += f", root {root}, {call.layout.__name__}"
                raise AssertionError(f"{what}: {error}") from error
