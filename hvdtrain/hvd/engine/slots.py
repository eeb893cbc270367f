"""Slots: names that all ranks have agreed on are numbers, and many of them are one message.

The engine of each rank and rank 0's coordinator use them, for small allreduces. The first time that
ranks submit a name, they negotiate it by name. Once the same request has completed twice, rank 0's
answer adds a slot: a number in the table of operations of one process set that are reduced alike
(`alike`). From then on a rank sends runs of numbers and one buffer:

    each rank                                        rank 0
    ops: name, request, data           ------------>  by name, until it has completed twice
                          <------------  done: names, table, numbers
    slots: table, [[0, 1000]], data    ------------>  adds up what all ranks have sent
                          <------------  sums: table, [[0, 1000]], data

A request that has changed is sent by name again, and takes the numbers that other ranks have sent
for this name along (`SlotTable.withdraw`). So do ranks that have joined, an open timeline, and
what waits for half a second: only `Coordinator` knows about those, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.engine.batch import from_bytes, to_bytes
from hvdtrain.hvd.engine.operation import Key, Operation, Request, dtype_of

_TABLE_BYTES = 8 << 20
"""Of one table: rank 0 keeps as much for each rank. Names beyond it stay names."""

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


class Name:
    """A name on a rank, and the operation that has it."""

    def __init__(self) -> None:  # not of the class: Python reads these twice as fast
        self.slot: Slot | None = None
        self.operation: Operation | None = None  # pending, or until its caller has waited for it


_UNKNOWN = Name()
_look_of = attrgetter("shape", "dtype", "layout", "is_cpu")


class Slot:
    """What all ranks mean by a name: a number in a table, and the request that it stands for."""

    def __init__(self, table: int, number: int, key: Key, request: Request, name: Name) -> None:
        self.table = table
        self.number = number
        self.key = key
        self.request = request
        self.name = name
        self.dtype = dtype_of(request.dtypes[0])
        self._looks = [(torch.Size(s), self.dtype, torch.strided, True) for s in request.shapes]
        self._fields = {name: getattr(request, name) for name in ("op", "prescale", "postscale")}

    def fits(self, tensors: Sequence[Tensor], fields: dict[str, Any]) -> bool:
        """Return whether these tensors make the same request."""
        try:
            return fields == self._fields and list(map(_look_of, tensors)) == self._looks
        except AttributeError:  # one is no tensor
            return False


class Names:
    """The names that operations of one rank have, and their slots. Guarded by the engine's lock."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Name] = {}
        self._slots: dict[int, dict[int, Slot]] = {}  # by table and number
        self._results: dict[int, SlotResults] = {}  # by table

    def find(self, key: tuple[int | None, str]) -> Name:
        """Return what this rank knows about the name of a `Key`."""
        return self._by_key.get(key, _UNKNOWN)  # type: ignore[call-overload,no-any-return]

    def hold(self, operation: Operation) -> Operation | None:
        """Give an operation its name, unless another one has it: return that."""
        name = self._by_key.get(operation.key)
        if name is None:
            name = self._by_key[operation.key] = Name()
        if operation.slot is not name.slot:
            operation.slot = None  # the slot was forgotten in the meantime: send it by name
        earlier = name.operation
        if earlier is None:
            name.operation = operation
        return earlier

    def free(self, operation: Operation) -> None:
        """Release the name of an operation, unless a later operation has it by now."""
        name = self.find(operation.key)
        if name.operation is operation:
            name.operation = None
            if name.slot is None:
                del self._by_key[operation.key]

    def learn(self, operations: Sequence[Operation], agreed: Sequence[Any] | None) -> None:
        """Note the slots of operations that have completed by name: `agreed` is the table and each
        one's number, None for an operation without a slot.
        """
        table, numbers = agreed or (0, [None] * len(operations))
        self._results.pop(table, None)
        for op, number in zip(operations, numbers, strict=True):
            name = self._by_key[op.key]
            name.slot = None
            if number is not None:
                name.slot = Slot(table, number, op.key, op.request, name)
                self._slots.setdefault(table, {})[number] = name.slot

    def results(self, table: int) -> SlotResults:
        """Return the memory for results of a table: the same until it has other slots."""
        if table not in self._results:
            slots = self._slots[table]
            self._results[table] = SlotResults([slots[number] for number in range(len(slots))])
        return self._results[table]

    def forget(self, set_id: int) -> None:
        """Forget the slots of a process set."""
        for key, name in list(self._by_key.items()):
            if key.set_id == set_id:
                name.slot = None
                if name.operation is None:
                    del self._by_key[key]
        kept = self._results.items()
        self._results = {t: r for t, r in kept if r.slots[0].key.set_id != set_id}


class SlotResults:
    """The memory for the results of a table, and views of it in the shapes of the tensors."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self._begins = [0, *accumulate(slot.request.numel for slot in slots)]
        # An element more than needed, so that no view is all of it: see `batch`.
        self._flat = torch.empty(self._begins[-1] + 1, dtype=slots[0].dtype, device="cpu")
        shapes = [shape for slot in slots for shape in slot.request.shapes]
        pieces = torch.split(self._flat[:-1], [prod(shape) for shape in shapes])
        views = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        self._views = [[next(views) for _ in slot.request.shapes] for slot in slots]

    def slots_of(self, runs: Runs) -> list[Slot]:
        """Return the slots of these numbers."""
        return [slot for first, end in runs for slot in self.slots[first:end]]

    def load(self, runs: Runs, data: bytes) -> list[Tensor]:
        """Return the results that these bytes are, valid until the next call."""
        sizes = [self._begins[end] - self._begins[first] for first, end in runs]
        pieces = torch.split(from_bytes(data, self._flat.dtype), sizes)
        for (first, end), piece in zip(runs, pieces, strict=True):
            self._flat[self._begins[first] : self._begins[end]] = piece
        found = (views for first, end in runs for views in self._views[first:end])
        return [view for views in found for view in views]


@dataclass
class SlotTable:
    """The slots of operations that are reduced alike, on rank 0, with what ranks have sent."""

    number: int
    set_id: int
    alike: Request
    keys: list[Key] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)
    """The numbers that each rank has sent, and not received yet, as a mask."""
    by_name: int = 0
    """The numbers whose names are being negotiated, as a mask."""
    since: float = 0.0
    """When the first of `sent` arrived."""

    def __post_init__(self) -> None:
        self.dtype = dtype_of(self.alike.dtypes[0])
        self._begins = [0]  # of each number in the buffers, in elements; one more than numbers
        self._free: dict[int, list[int]] = {}  # numbers without a name, by their size
        self._buffers: dict[int, Tensor] = {}  # by rank

    def add(self, key: Key, request: Request) -> int | None:
        """Return the number of a new slot; None if the table is full."""
        if free := self._free.get(request.numel):
            number = free.pop()
            self.keys[number], self.requests[number] = key, request
            return number
        end = self._begins[-1] + request.numel
        if end * self.dtype.itemsize > _TABLE_BYTES:
            return None
        self._begins.append(end)
        self.keys.append(key)
        self.requests.append(request)
        return len(self.keys) - 1

    def remove(self, number: int) -> None:
        """Make a number free. No rank has sent it: all have just completed its name."""
        self._free.setdefault(self.requests[number].numel, []).append(number)

    def store(self, rank: int, runs: Runs, flat: Tensor, now: float) -> None:
        """Keep what a rank has sent."""
        if not any(self.sent.values()):
            self.since = now
        buffer = self._buffers.get(rank)
        if buffer is None or buffer.numel() < self._begins[-1]:
            grown = torch.zeros(self._begins[-1], dtype=self.dtype, device="cpu")
            if buffer is not None:
                grown[: buffer.numel()] = buffer
            buffer = self._buffers[rank] = grown
        at = 0
        for begin, end in self._elements(runs):
            buffer[begin:end] = flat[at : at + end - begin]
            at += end - begin
        self.sent[rank] = self.sent.get(rank, 0) | mask_of(runs)

    def complete(self, members: Sequence[int]) -> list[list[int]]:
        """Return the numbers that all members have sent."""
        found = -1
        for rank in members:
            found &= self.sent.get(rank, 0)
            if not found:
                return []
        return runs_of_mask(found)

    def take(self, rank: int, runs: Runs) -> Tensor:
        """Return what a rank has sent for these numbers."""
        self.sent[rank] &= ~mask_of(runs)
        buffer = self._buffers[rank]
        pieces = [buffer[begin:end] for begin, end in self._elements(runs)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def release(self) -> None:
        """Free the buffers: no rank sends these numbers any more."""
        self._buffers.clear()

    def withdraw(self, wanted: int = -1) -> Iterator[tuple[int, int, bytes]]:
        """Yield each rank, number and data that was sent, if `wanted` has the number's bit. It
        counts as not sent any more.
        """
        for rank, mask in list(self.sent.items()):
            if runs := runs_of_mask(mask & wanted):
                for number, data in self.split(runs, to_bytes(self.take(rank, runs))):
                    yield rank, number, data

    def split(self, runs: Runs, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield each number with its part of the data of all of them."""
        at = 0
        for first, end in runs:
            for number in range(first, end):
                size = self.requests[number].num_bytes
                yield number, data[at : at + size]
                at += size

    def _elements(self, runs: Runs) -> Iterator[tuple[int, int]]:
        for first, end in runs:
            yield self._begins[first], self._begins[end]
