"""The operations of torch.distributed, each with what it must give, however it is called.

An operation is a generator: it calls torch.distributed, yields the work, and checks the result when
it is resumed. So a test can call it in any group, with any tensors, and several at once:

    complete(all_reduce(Call(dist, 20_000)), broadcast(Call(dist, 5, is_async=True)))
"""

from __future__ import annotations

import functools
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


def images(count: int, dtype: torch.dtype) -> Tensor:
    return contiguous(count, dtype).view(count // 24, 2, 3, 4)


def channels_last(count: int, dtype: torch.dtype) -> Tensor:
    return images(count, dtype).to(memory_format=torch.channels_last)


def negative_view(count: int, dtype: torch.dtype) -> Tensor:
    """A view whose memory holds its elements with the other sign, and others between them."""
    return torch.full((count,), -1j, dtype=torch.complex64, device="cpu").conj().imag


def given(*tensors: Tensor) -> Layout:
    """A layout of tensors that there are already, in the order in which an operation needs them."""
    left = iter(tensors)
    return lambda count, dtype: next(left)


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
    turn: int = 0
    """All values are those of the next rank in each."""
    made: list[Tensor] = field(default_factory=list)
    num_used: int = 0

    def __post_init__(self) -> None:
        self.rank: int = self.dist.get_rank(self.group)
        self.n: int = self.dist.get_world_size(self.group)
        self.is_root = self.rank == self.root
        self.reduce_op = getattr(self.dist.ReduceOp, self.op)
        self.how = {"group": self.group, "async_op": self.is_async}

    def tensor(self, parts: int = 1) -> Tensor:
        """Return a tensor with the elements of so many ranks, the same one in each turn."""
        if self.num_used == len(self.made):
            self.made.append(self.layout(parts * self.count, self.dtype))
        self.num_used += 1
        return self.made[self.num_used - 1]

    def several(self) -> list[Tensor]:
        return [self.tensor() for _ in range(self.n)]

    def filled(self, rank: int, parts: int = 1) -> Tensor:
        """Return a tensor with the values of a rank."""
        t = self.tensor(parts)
        return t.copy_(self.values(rank, parts).view(t.shape))

    def values(self, rank: int, parts: int = 1) -> Tensor:
        return values(rank + self.turn, parts * self.count, self.dtype)

    def total(self, parts: int = 1, first: int = 0) -> Tensor:
        """Return what the operation makes of the values of all ranks, from the first on."""
        return computed(self.n, parts * self.count, self.dtype, self.op, first + self.turn)

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


def every_turn(one_turn: Operation) -> Operation:
    """Make an operation of what it does in each turn."""

    @functools.wraps(one_turn)
    def operation(call: Call) -> Iterator[Work]:
        for turn in range(call.turns):
            call.turn, call.num_used = turn, 0
            yield from one_turn(call)

    return operation


# Operations that move values


@every_turn
def broadcast(call: Call) -> Iterator[Work]:
    t = call.filled(call.rank)
    yield call.dist.broadcast(t, group_src=call.root, **call.how)
    call.check(t, call.values(call.root))


@every_turn
def all_gather(call: Call) -> Iterator[Work]:
    parts, t = call.several(), call.filled(call.rank)
    yield call.dist.all_gather(parts, t, **call.how)
    for r, part in enumerate(parts):
        call.check(part, call.values(r))


@every_turn
def all_gather_into_tensor(call: Call) -> Iterator[Work]:
    out, t = call.tensor(call.n), call.filled(call.rank)
    yield call.dist.all_gather_into_tensor(out, t, **call.how)
    call.check(out, torch.cat([call.values(r) for r in range(call.n)]))


@every_turn
def all_to_all_single(call: Call) -> Iterator[Work]:
    out, t = call.tensor(call.n), call.filled(call.rank, call.n)
    yield call.dist.all_to_all_single(out, t, **call.how)
    call.check(out, torch.cat([call.mine(call.values(r, call.n)) for r in range(call.n)]))


def _uneven(call: Call) -> tuple[list[int], list[int]]:
    """How much this rank sends to each, and receives of each: rank 0 nothing to itself."""
    me, ranks, most = call.rank, range(call.n), call.n + 1
    return [(2 * me + r) % most for r in ranks], [(2 * r + me) % most for r in ranks]


@every_turn
def all_to_all_uneven(call: Call) -> Iterator[Work]:
    """By splits, which are rows."""
    me, (sent, received) = call.rank, _uneven(call)
    t, out = call.tensor(sum(sent)), call.tensor(sum(received))
    t.copy_(torch.cat([call.values(2 * me + r, m) for r, m in enumerate(sent)]).view(t.shape))
    rows = call.layout(call.count, call.dtype).shape[0]
    yield call.dist.all_to_all_single(
        out, t, [m * rows for m in received], [m * rows for m in sent], **call.how
    )
    call.check(out, torch.cat([call.values(2 * r + me, m) for r, m in enumerate(received)]))


@every_turn
def all_to_all(call: Call) -> Iterator[Work]:
    """By lists."""
    me, (sent, received) = call.rank, _uneven(call)
    parts = [call.filled(2 * me + r, m) for r, m in enumerate(sent)]
    got = [call.tensor(m) for m in received]
    yield call.dist.all_to_all(got, parts, **call.how)
    for r, t in enumerate(got):
        call.check(t, call.values(2 * r + me, received[r]))


@every_turn
def gather(call: Call) -> Iterator[Work]:
    parts, t = call.several(), call.filled(call.rank)
    given = parts if call.is_root else None
    yield call.dist.gather(t, given, group_dst=call.root, **call.how)
    for r, part in enumerate(given or []):
        call.check(part, call.values(r))


@every_turn
def scatter(call: Call) -> Iterator[Work]:
    parts, t = [call.filled(r + 1) for r in range(call.n)], call.tensor()
    given = parts if call.is_root else None
    yield call.dist.scatter(t, given, group_src=call.root, **call.how)
    call.check(t, call.values(call.rank + 1))


@every_turn
def send(call: Call) -> Iterator[Work]:
    """From the root to the next rank, which receives into memory without gaps."""
    receiver = (call.root + 1) % call.n
    if call.root == receiver or call.rank not in (call.root, receiver):
        return
    t = call.filled(call.rank)
    if call.rank == receiver and not (t.is_contiguous() and not t.is_neg()):
        t = t.clone(memory_format=torch.contiguous_format)
    if call.is_root:
        yield call.dist.isend(t, group=call.group, group_dst=receiver)
    else:
        yield call.dist.irecv(t, group=call.group, group_src=call.root)
    call.check(t, call.values(call.root))


# Operations that reduce


@every_turn
def all_reduce(call: Call) -> Iterator[Work]:
    t = call.filled(call.rank)
    yield call.dist.all_reduce(t, call.reduce_op, **call.how)
    call.check(t, call.total())


@every_turn
def reduce(call: Call) -> Iterator[Work]:
    """The other ranks keep their values, but on Gloo."""
    t = call.filled(call.rank)
    yield call.dist.reduce(t, op=call.reduce_op, group_dst=call.root, **call.how)
    if call.is_root:
        call.check(t, call.total())
    elif call.dist.get_backend() != "gloo":
        same(t.reshape(-1), call.values(call.rank))


@every_turn
def reduce_scatter_tensor(call: Call) -> Iterator[Work]:
    """The input keeps its values."""
    out, t = call.tensor(), call.filled(call.rank, call.n)
    yield call.dist.reduce_scatter_tensor(out, t, call.reduce_op, **call.how)
    call.check(out, call.mine(call.total(call.n)))
    same(t.reshape(-1), call.values(call.rank, call.n))


@every_turn
def reduce_scatter(call: Call) -> Iterator[Work]:
    """Of lists."""
    out, parts = call.tensor(), [call.filled(call.rank + r) for r in range(call.n)]
    yield call.dist.reduce_scatter(out, parts, call.reduce_op, **call.how)
    call.check(out, call.total(first=call.rank))


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
                text = f"{operation.__name__} of {call.count}, root {root}, {how}: {error}"
                raise AssertionError(text) from error
