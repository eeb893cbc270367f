"""Slots: names that all ranks have agreed on are numbers, and many of them are one message.

The engine of each rank and rank 0's coordinator use them, for small allreduces. The first time that
ranks submit a name, they negotiate it by name. Once the same request has completed twice, rank 0's
answer adds a slot: a number in the table of operations of one process set that are reduced alike
(`alike`). From then on a rank sends runs of numbers and one buffer:

    each rank                                        rank 0
    ops: name, request, data           ------------>  by name, until it has completed twice
                          <------------  reduced: names, table, numbers
    slots: table, [[0, 1000]], data    ------------>  adds up what all ranks have sent
                          <------------  sums: table, [[0, 1000]], data

A request that has changed is sent by name again; what other ranks have sent by number is then
negotiated by name, too (`SentTable.withdraw`). So is everything while ranks have joined or a
timeline is open, and what waits for half a second: only `Coordinator` knows about those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.engine.batch import from_bytes, to_bytes
from hvdtrain.hvd.engine.operation import Key, Operation, Request, dtype_of

_TABLE_BYTES = 8 << 20
"""Of one table: rank 0 has as much for each rank. Names beyond it stay names."""

Runs = Sequence[Sequence[int]]  # numbers as [first, end) pairs, ascending


def alike(request: Request) -> Request:
    """Return what small requests that are reduced together have in common."""
    return request._replace(shapes=(), dtypes=request.dtypes[:1])


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers as runs."""
    runs: list[list[int]] = []
    end = -1
    for number in numbers:
        if number == end:
            runs[-1][1] = end = end + 1
        else:
            end = number + 1
            runs.append([number, end])
    return runs


def mask_of(runs: Runs) -> int:
    """Return runs as the bits of an integer."""
    mask = 0
    for first, end in runs:
        mask |= ((1 << (end - first)) - 1) << first
    return mask


def runs_of_mask(mask: int) -> list[list[int]]:
    """Return the bits of an integer as runs."""
    runs, at = [], 0
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        length = (~mask & (mask + 1)).bit_length() - 1
        mask >>= length
        runs.append([at + skipped, at + skipped + length])
        at += skipped + length
    return runs


class SlotTable:
    """The slots of operations that are reduced alike, and for each rank a buffer of their data.

    `slots` holds what each number stands for.
    """

    def __init__(self, set_id: int, dtype: torch.dtype) -> None:
        self.set_id = set_id
        self.dtype = dtype
        self.slots: list[Any] = []
        self._begins = [0]  # of each number in the buffers, in elements; one more than numbers
        # Never larger later, so that views of it stay valid; the system maps only what is written.
        self._buffers: defaultdict[int, Tensor] = defaultdict(
            lambda: torch.empty(_TABLE_BYTES // dtype.itemsize, dtype=dtype, device="cpu")
        )

    def add(self, slot: Any, request: Request) -> int | None:
        """Return the number of a new slot; None if the table is full."""
        end = self._begins[-1] + request.numel
        if end * self.dtype.itemsize > _TABLE_BYTES:
            return None
        self._begins.append(end)
        self.slots.append(slot)
        return len(self.slots) - 1

    def slots_of(self, runs: Runs) -> Iterator[Any]:
        """Yield the slots of these numbers."""
        return chain.from_iterable(self.slots[first:end] for first, end in runs)

    def store(self, rank: int, runs: Runs, data: bytes) -> None:
        """Copy a rank's data for these numbers into its buffer."""
        pieces = self._pieces(rank, runs)
        sources = torch.split(from_bytes(data, self.dtype), [piece.numel() for piece in pieces])
        for piece, source in zip(pieces, sources, strict=True):
            piece.copy_(source)

    def _pieces(self, rank: int, runs: Runs) -> list[Tensor]:
        buffer, begins = self._buffers[rank], self._begins
        return [buffer[begins[first] : begins[end]] for first, end in runs]


class SentTable(SlotTable):
    """A table of rank 0: the keys and requests of its slots, and what ranks have sent."""

    def __init__(self, number: int, set_id: int, kind: Request) -> None:
        super().__init__(set_id, dtype_of(kind.dtypes[0]))
        self.number = number
        self.alike = kind
        self.sent: defaultdict[int, int] = defaultdict(int)
        """The numbers that each rank has sent and not received yet, as a mask."""
        self.since = 0.0
        """When the first of `sent` arrived."""

    @property
    def waits(self) -> bool:
        """Whether something was sent that is not complete."""
        return any(self.sent.values())

    def receive(self, rank: int, runs: Runs, data: bytes, now: float) -> None:
        """Keep what a rank has sent."""
        if not self.waits:
            self.since = now
        self.store(rank, runs, data)
        self.sent[rank] |= mask_of(runs)

    def complete(self, members: Sequence[int]) -> list[list[int]]:
        """Return the numbers that all members have sent."""
        found = -1
        for rank in members:
            found &= self.sent[rank]
        return runs_of_mask(found)

    def take(self, rank: int, runs: Runs) -> Tensor:
        """Return what a rank has sent for these numbers, which wait no more."""
        self.sent[rank] &= ~mask_of(runs)
        pieces = self._pieces(rank, runs)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def withdraw(self) -> Iterator[tuple[int, Key, Request, bytes]]:
        """Yield the rank, key, request and data of all that was sent, which waits no more."""
        for rank, mask in list(self.sent.items()):
            for first, end in runs_of_mask(mask):
                for number in range(first, end):
                    data = to_bytes(self.take(rank, [[number, number + 1]]))
                    yield rank, *self.slots[number], data

    def release(self) -> None:
        """Free the buffers, and negotiate by name what ranks still send."""
        self.set_id = -1
        self._buffers.clear()


class ResultTable(SlotTable):
    """A table of one rank: the `Name`s of its slots, and memory for their results."""

    def __init__(self, set_id: int, dtype: torch.dtype) -> None:
        super().__init__(set_id, dtype)
        self._views: list[list[Tensor]] = []  # of the results, in the shapes of the tensors

    def add(self, slot: Name, request: Request) -> int | None:
        """Return the number of a new slot, and make views for its results."""
        number = super().add(slot, request)
        if number is not None:
            (piece,) = self._pieces(0, [[number, number + 1]])
            parts = torch.split(piece, [prod(shape) for shape in request.shapes])
            pairs = zip(parts, request.shapes, strict=True)
            self._views.append([part.view(shape) for part, shape in pairs])
        return number

    def load(self, runs: Runs, data: bytes) -> list[Tensor]:
        """Return the results that these bytes are, valid until the next call."""
        self.store(0, runs, data)
        return [view for first, end in runs for view in chain(*self._views[first:end])]


_look_of = attrgetter("shape", "dtype", "layout", "is_cpu")


class Name:
    """A name on a rank, the operation that has it, and its slot once all ranks have agreed on one:
    `slot` is the table and the number, `request` what they stand for.
    """

    slot: tuple[int, int] | None = None
    request: Any = None
    operation: Operation | None = None  # pending, or until its caller has waited for it
    _looks: Any = None
    _fields: dict[str, Any] | None = None

    def __init__(self, key: Key) -> None:
        self.key = key

    def agree(self, table: int, number: int, request: Request) -> None:
        """Give the name a slot."""
        self.slot, self.request = (table, number), request
        dtype = dtype_of(request.dtypes[0])
        self._looks = [(torch.Size(s), dtype, torch.strided, True) for s in request.shapes]
        self._fields = {name: getattr(request, name) for name in ("op", "prescale", "postscale")}

    def forget_slot(self) -> None:
        """Send the name by name again."""
        self.slot = self.request = self._fields = None

    def fits(self, tensors: Sequence[Tensor], fields: dict[str, Any]) -> bool:
        """Return whether these tensors make the request that the slot stands for."""
        try:
            return fields == self._fields and list(map(_look_of, tensors)) == self._looks
        except AttributeError:  # one is no tensor
            return False


_UNKNOWN = Name(Key(0, ""))


class Names:
    """The names that operations of one rank have, and their slots. `lock` is the engine's."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._by_key: dict[Key, Name] = {}
        self.tables: dict[int, ResultTable] = {}

    def find(self, key: tuple[int | None, str]) -> Name:
        """Return what this rank knows about the name of a `Key`."""
        return self._by_key.get(key, _UNKNOWN)  # type: ignore[call-overload,no-any-return]

    def hold(self, operation: Operation) -> Operation | None:
        """Give an operation its name, unless another one has it: return that."""
        name = self._by_key.get(operation.key)
        if name is None:
            name = self._by_key[operation.key] = Name(operation.key)
        earlier = name.operation
        if earlier is None:
            name.operation = operation
            operation.name = name
        return earlier

    def free(self, operation: Operation) -> None:
        """Release the name of an operation, unless a later operation has it by now."""
        with self._lock:
            name = operation.name
            if name.operation is operation:
                name.operation = None
                if name.slot is None:
                    del self._by_key[operation.key]

    def learn(self, operations: Sequence[Operation], agreed: Sequence[Any] | None) -> None:
        """Note the slots of operations that have completed by name: `agreed` is the table and each
        one's number, None for an operation without a slot.
        """
        table, numbers = agreed or (0, [None] * len(operations))
        for op, number in zip(operations, numbers, strict=True):
            name = op.name
            if number is None:
                name.forget_slot()
            elif name.slot != (table, number):
                if table not in self.tables:
                    dtype = dtype_of(op.request.dtypes[0])
                    self.tables[table] = ResultTable(op.key.set_id, dtype)
                here = self.tables[table].add(name, op.request)
                assert here == number, f"slot {here} here is {number} on rank 0"
                name.agree(table, number, op.request)

    def forget(self, set_id: int) -> None:
        """Forget the slots of a process set."""
        for key, name in list(self._by_key.items()):
            if key.set_id == set_id:
                name.forget_slot()
                if name.operation is None:
                    del self._by_key[key]
        self.tables = {n: table for n, table in self.tables.items() if table.set_id != set_id}
