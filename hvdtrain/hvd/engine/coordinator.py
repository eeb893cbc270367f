"""The coordinator, rank 0's state machine: which ranks have submitted what, and what may run.

The control thread of rank 0 uses it. It has no sockets, threads or clocks: messages go in, messages
come out. All ranks receive the answers in one order, so they run the same batches in that order.

To rank 0:  ops (entries of set, request, size of data, names; data)   slots (see `slots`)
            step (channel, set, number)   drop (channel, set)   idle   leave (steps)
            broken (reason): a connection   failed (reason): a thread of the sender   drained
From it:    run (batches)   reduced (set, names, slots; results)   sums (see `slots`)
            done (set, name, extra)   exchanged (set, name, texts)   error (key, text)
            joined (last rank)   send_zeros (channel, number)   dropped (channel)
            down (reason, steps or null)   close

An operation:     in ops from every rank -> reduced (small data), run (tensors), exchanged, done;
                  a rank's join is one, and answered by joined
Shutdown:         leave, broken, failed or a lost rank -> down -> drained from every rank -> close
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.hvd.engine.batch import combine, from_bytes, to_bytes
from hvdtrain.hvd.engine.operation import GLOBAL_SET, Key, Request, dtype_of
from hvdtrain.hvd.engine.slots import SlotTable, alike, mask_of
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.engine.validation import mismatch
from hvdtrain.hvd.exceptions import SHUT_DOWN

Send = Callable[[list[int], list[Any], bytes], None]

_STEPS_KEPT = 8  # of which the timeline knows when each rank has begun them
_NAMES_KEPT = 1 << 16  # the last ones to complete; of these, repeated ones get a slot
_SLOTS_WAIT_S = 0.5  # after which what ranks have sent by number is negotiated by name
_ROOT_CAUSE_WAIT_S = 1.0  # how long to wait for the exit of a rank after a broken connection
# Operations that need messages only, whatever their size.
CONTROL_KINDS = ("barrier", "add_set", "remove_set")
_SET_REMOVED = "The process set of this operation has been removed."
_UNLIKE_ORDER = (
    "Mismatched optimizers: each rank waits for the others in the first step of another one ({}), "
    "so none would ever go on: step them in the same order on all ranks."
)


@dataclass
class Negotiation:
    """An operation that some ranks have submitted, in the end all: their requests and data."""

    key: Key
    started_at: float
    requests: dict[int, Request] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    warned: bool = False
    num_absent: int = 0
    """How many ranks have no data for it, since they have joined."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that have submitted it."""
        return sorted(self.requests)

    @property
    def request(self) -> Request:
        """That of the first rank."""
        return self.requests[min(self.requests)]


class Coordinator:
    """The state machine of rank 0. Not thread safe: only the control thread calls it."""

    def __init__(self, size: int, fusion_bytes: int, send: Send, timeline: Timeline) -> None:
        self.size = size
        self.sets: dict[int, list[int]] = {GLOBAL_SET: list(range(size))}
        self.negotiations: dict[Key, Negotiation] = {}
        self.joined: dict[int, None] = {}  # in the order in which they joined
        self.channels: dict[str, ChannelState] = {}
        self._next_set = 1
        self._fusion_bytes = fusion_bytes
        self._send = send
        self.timeline = timeline
        self._ready: list[Negotiation] = []  # complete: tensors to move
        self._small: list[Negotiation] = []  # complete: data to combine
        self._tables: list[SlotTable] = []
        self._table_of: dict[tuple[int, Request], SlotTable] = {}  # of a set and alike requests
        self._slots: dict[Key, tuple[SlotTable, int]] = {}
        self._latest: dict[Key, Request] = {}  # of small names, in the order of completion
        self._executor_is_busy = False
        self._is_down = False
        self._broken: tuple[float, str] | None = None
        self._drained: set[int] = set()

    def receive(self, rank: int, header: list[Any], payload: bytes, now: float) -> None:
        """Process one message, and send what follows from it."""
        if self._is_down and header[0] not in ("drained", "idle"):
            return  # "down" has been sent to its sender
        match header:
            case ["ops", entries]:
                self._add_requests(rank, entries, payload, now)
            case ["slots", entries]:
                self._add_slots(rank, entries, payload, now)
            case ["step", name, set_id, step]:
                self._step(rank, name, set_id, step, now)
            case ["drop", name, set_id]:
                self._drop(rank, name, set_id)
            case ["idle"]:
                self._executor_is_busy = False
                self._send_ready()
            case ["leave", steps]:
                self.shut_down(SHUT_DOWN, steps)
            case ["broken", reason]:
                self._broken = self._broken or (now, reason)
            case ["failed", reason]:
                self.shut_down(reason)
            case ["drained"]:
                self._record_drained(rank)

    def tick(self, now: float) -> None:
        """Shut down if a connection between ranks broke some time ago. Called often.

        Not at once: the exit of a rank is a better reason, because it names the rank, and the
        control plane usually reports it a moment later. Negotiate by name what waits, so that the
        stall inspector sees it.
        """
        for table in self._tables:
            if any(table.sent.values()) and now - table.since > _SLOTS_WAIT_S:
                self._withdraw([table])
        if self._broken is not None and now - self._broken[0] > _ROOT_CAUSE_WAIT_S:
            self.shut_down(self._broken[1])

    def report_lost(self, rank: int, process: str, why: str) -> None:
        """Shut down because the connection to a rank was lost. `why`: e.g. "has ended"."""
        reason = f"{SHUT_DOWN} Rank {rank} ({process}) {why}."
        if self._is_down and rank not in self._drained:
            # During a graceful shutdown peers still wait for operations that this rank had begun.
            self._send(self.sets[GLOBAL_SET], ["down", reason, None], b"")
        self.shut_down(reason)
        self._record_drained(rank)

    def shut_down(self, reason: str, steps: dict[str, int] | None = None) -> None:
        """Shut down: no further operation begins.

        `steps`: for a graceful shutdown, the last step that the leaving rank sent, by channel: the
        ranks complete the operations up to it. None after a failure: nothing is completed. A second
        call does nothing.
        """
        if self._is_down:
            return
        self._is_down = True
        self.negotiations.clear()
        self._tables.clear()
        self._ready.clear()
        self._send(self.sets[GLOBAL_SET], ["down", reason, steps], b"")

    # Operations

    def _add_requests(self, rank: int, entries: list[Any], payload: bytes, now: float) -> None:
        at = 0
        for set_id, fields, size, names in entries:
            request = Request.from_wire(fields)
            if request.kind == "join":
                self._join(rank)
                continue
            for name in names:
                self._add_request(rank, Key(set_id, name), request, payload[at : at + size], now)
                at += size
        self._send_results()
        self._send_ready()

    def _add_request(
        self, rank: int, key: Key, request: Request, payload: bytes, now: float
    ) -> None:
        if key.set_id not in self.sets:
            self._send([rank], ["error", *key, _SET_REMOVED], b"")
            return
        if (slot := self._slots.get(key)) is not None:
            table, bit = slot[0], 1 << slot[1]
            if not table.by_name & bit:
                table.by_name |= bit
                self._withdraw([table], bit)
        negotiation = self.negotiations.get(key)
        if negotiation is None:
            negotiation = self.negotiations[key] = Negotiation(key, now)
            self.timeline.begin(key.name, f"NEGOTIATE_{request.kind.upper()}")
        negotiation.requests[rank] = request
        negotiation.data[rank] = payload
        self.timeline.negotiate_rank_ready(key.name, rank)
        self._complete(negotiation)
        if request.kind == "exchange":
            self._refuse_unlike_order(key)

    def missing(self, negotiation: Negotiation) -> list[int]:
        """Return the ranks that have not submitted an operation yet."""
        return self._without(negotiation.requests, negotiation.key.set_id)

    def _without(self, ranks: Container[int], set_id: int) -> list[int]:
        """Return the members of a process set that are not in `ranks`, and have not joined."""
        absent = self.joined if set_id == GLOBAL_SET else {}
        return [r for r in self.sets.get(set_id, []) if r not in ranks and r not in absent]

    def _complete(self, negotiation: Negotiation) -> None:
        key, members = negotiation.key, self.sets[negotiation.key.set_id]
        if len(negotiation.requests) + len(self.joined) < len(members):
            return  # without a look at each rank
        if self.missing(negotiation):
            return
        self._end_negotiation(key)
        self.timeline.negotiate_end(key.name)
        # A rank that joined after it had submitted this operation still contributes its data.
        negotiation.num_absent = len(members) - len(negotiation.requests)
        problem = mismatch(negotiation.requests, negotiation.num_absent > 0)
        ranks, request = negotiation.ranks, negotiation.request
        if problem is not None:
            self._send(ranks, ["error", *key, problem], b"")
        elif request.kind == "exchange":
            texts = [negotiation.data[r].decode() for r in ranks]
            self._send(members, ["exchanged", *key, texts], b"")
        elif request.kind in CONTROL_KINDS:
            extra = self._run_control_operation(request)
            self._send(members, ["done", *key, extra], b"")
        else:
            complete = self._small if request.is_eager(len(members)) else self._ready
            complete.append(negotiation)

    def _end_negotiation(self, key: Key) -> Negotiation:
        if (slot := self._slots.get(key)) is not None:
            slot[0].by_name &= ~(1 << slot[1])
        return self.negotiations.pop(key)

    def _refuse_unlike_order(self, key: Key) -> None:
        """Fail the exchanges of a set if each rank waits in one, and none can complete."""
        waiting = {
            k: n
            for k, n in self.negotiations.items()
            if k.set_id == key.set_id and n.request.kind == "exchange"
        }
        busy = {rank for n in waiting.values() for rank in n.requests}
        if key not in waiting or not busy.issuperset(self.missing(waiting[key])):
            return
        names = ", ".join(f"rank {min(n.requests)}: {k.name}" for k, n in waiting.items())
        for k in waiting:
            self._refuse(k, _UNLIKE_ORDER.format(names))

    def _refuse(self, key: Key, why: str) -> None:
        """Fail an operation that only some ranks have submitted."""
        self._send(self._end_negotiation(key).ranks, ["error", *key, why], b"")

    # Small data

    def _send_results(self) -> None:
        """Combine the small data that is complete, and send the results: one message for all
        operations of the same ranks that are reduced alike.
        """
        if not self._small:
            return
        found, self._small = self._small, []
        self.timeline.cycle()
        together: dict[Any, list[Negotiation]] = {}
        for each in found:
            key = each.key.set_id, alike(each.request), *each.ranks
            together.setdefault(key, []).append(each)
            self.timeline.begin(each.key.name, each.request.kind.upper())
        for group in together.values():
            one = group[0]
            dtype, num_ranks = dtype_of(one.request.dtypes[0]), len(self.sets[one.key.set_id])
            data = [from_bytes(b"".join(n.data[rank] for n in group), dtype) for rank in one.ranks]
            result = combine(one.request, [*data, *[None] * one.num_absent], num_ranks)
            names = [each.key.name for each in group]
            # Before the answer: a rank that has received it may start another timeline at once.
            for name in names:
                self.timeline.end(name)
            agreed = None if one.num_absent else self._agree(group)
            header = ["reduced", one.key.set_id, names, agreed]
            self._send(one.ranks, header, to_bytes(result))

    def _agree(self, group: list[Negotiation]) -> list[Any] | None:
        """Return the table of alike operations that have completed by name, and the number of each:
        that which it has, a new one if its request is that of the time before, else None.
        """
        set_id, kind = group[0].key.set_id, alike(group[0].request)
        table = self._table_of.get((set_id, kind))
        numbers: list[int | None] = []
        for each in group:
            own, number = self._slots.get(each.key), None
            if own is not None and own[0] is table and table.requests[own[1]] == each.request:
                number = own[1]
            else:
                if own is not None:
                    own[0].remove(own[1])
                    del self._slots[each.key]
                if self._latest.pop(each.key, None) == each.request:
                    if table is None:
                        table = SlotTable(len(self._tables), set_id, kind)
                        self._tables.append(table)
                        self._table_of[set_id, kind] = table
                    number = table.add(each.key, each.request)
                    if number is not None:
                        self._slots[each.key] = table, number
                self._latest[each.key] = each.request
                if len(self._latest) > _NAMES_KEPT:
                    del self._latest[next(iter(self._latest))]
            numbers.append(number)
        return [table.number, numbers] if table is not None else None

    def _add_slots(self, rank: int, entries: list[Any], payload: bytes, now: float) -> None:
        """Add what a rank has sent by number; send the sums of what all have sent."""
        for number, runs, size in entries:
            table = self._tables[number]
            data, payload = payload[:size], payload[size:]
            members = self.sets.get(table.set_id, [])
            has_joined = self.joined and table.set_id == GLOBAL_SET
            is_late = table.by_name & mask_of(runs) or not members
            if has_joined or is_late or self.timeline.is_open:
                pieces = ((rank, number, part) for number, part in table.split(runs, data))
                self._add_by_name(table, pieces, now)
                continue
            table.store(rank, runs, from_bytes(data, table.dtype), now)
            if complete := table.complete(members):
                flats = [table.take(member, complete) for member in members]
                total = to_bytes(combine(table.alike, flats, len(members)))
                self._send(members, ["sums", number, complete], total)

    def _add_by_name(
        self, table: SlotTable, sent: Iterable[tuple[int, int, bytes]], now: float
    ) -> None:
        """Negotiate by name what ranks have sent by number."""
        for rank, number, data in list(sent):
            self._add_request(rank, table.keys[number], table.requests[number], data, now)
        self._send_results()

    def _withdraw(self, tables: list[SlotTable], wanted: int = -1) -> None:
        """Negotiate by name what is wanted of the numbers that wait: see `SlotTable.withdraw`."""
        for table in tables:
            self._add_by_name(table, table.withdraw(wanted), table.since)

    def _tables_of(self, set_id: int) -> list[SlotTable]:
        return [table for table in self._tables if table.set_id == set_id]

    def _run_control_operation(self, request: Request) -> Any:
        """Run an operation that needs messages only; return the id of a new process set."""
        if request.kind == "add_set":
            set_id, self._next_set = self._next_set, self._next_set + 1
            self.sets[set_id] = list(request.data)
            return set_id
        if request.kind == "remove_set":
            self._end_set(request.data)
            self.sets.pop(request.data, None)
            for name in [n for n, state in self.channels.items() if state.set_id == request.data]:
                del self.channels[name]
            self._forget_slots(request.data)
        return None

    def _end_set(self, set_id: int) -> None:
        """Send what is ready; fail the set's operations that only some members have submitted."""
        self._withdraw(self._tables_of(set_id))
        self._send_results()
        self._send_ready(at_once=True)
        for key in [key for key in self.negotiations if key.set_id == set_id]:
            self._refuse(key, _SET_REMOVED)

    def _send_ready(self, at_once: bool = False) -> None:
        """Send what is ready, unless a batch is running: what arrives meanwhile is then fused."""
        if (self._executor_is_busy and not at_once) or not self._ready:
            return
        ready, self._ready = self._ready, []
        self.timeline.cycle()
        for members, batch in self._fuse(ready):
            requests = [r.request if self.joined else None for r in batch]
            pairs = zip(batch, requests, strict=True)
            entries = [[r.key.name, _row_counts(r), request] for r, request in pairs]
            self._send(members, ["run", batch[0].key.set_id, entries], b"")
            # Rank 0's own executor sends "idle" when it has nothing to do.
            self._executor_is_busy = self._executor_is_busy or 0 in members

    def _fuse(self, ready: list[Negotiation]) -> list[tuple[list[int], list[Negotiation]]]:
        """Return batches of alike operations, up to the fusion threshold, with their members."""
        batches: list[list[Negotiation]] = []
        open_batches: dict[Any, tuple[list[Negotiation], int]] = {}
        for item in ready:
            request = item.request
            gpus = (item.requests[rank].gpu for rank in item.ranks)
            # Requests are alike if only their shapes, dtypes and data differ.
            plain = request._replace(shapes=(), dtypes=(), data=None)
            alike = (item.key.set_id, plain, *gpus)
            batch, num_bytes = open_batches.get(alike, ([], 0))
            num_bytes += request.num_bytes
            fuses = request.kind in ("allreduce", "broadcast") and num_bytes <= self._fusion_bytes
            if not (batch and fuses):
                batch, num_bytes = [], request.num_bytes
                batches.append(batch)
            batch.append(item)
            open_batches[alike] = batch, num_bytes
        return [(self.sets[batch[0].key.set_id], batch) for batch in batches]

    # Ranks that have joined, and the steps of optimizers

    def _join(self, rank: int) -> None:
        self._withdraw(self._tables_of(GLOBAL_SET))
        self.joined[rank] = None
        is_last = len(self.joined) == self.size
        if not is_last:
            for name, state in self.channels.items():
                self._request_zeros(rank, name, state)
        for negotiation in list(self.negotiations.values()):
            if negotiation.key.set_id == GLOBAL_SET:
                self._complete(negotiation)
        self._send_results()
        self._send_ready()
        if is_last:
            # First the operations to which some ranks only contribute zeros: these have not
            # submitted them, and may reuse the same names as soon as they receive "joined".
            self._send_ready(at_once=True)
            self.joined = {}
            self._forget_slots(GLOBAL_SET)  # ranks that had joined did not see the last answers
            self._send(self.sets[GLOBAL_SET], ["joined", rank], b"")

    def _forget_slots(self, set_id: int) -> None:
        for table in self._tables_of(set_id):
            table.release()
        self._table_of = {of: table for of, table in self._table_of.items() if of[0] != set_id}
        self._slots = {key: slot for key, slot in self._slots.items() if key.set_id != set_id}

    def _channel(self, name: str, set_id: int) -> ChannelState:
        return self.channels.setdefault(name, ChannelState(set_id))

    def _step(self, rank: int, name: str, set_id: int, step: int, now: float) -> None:
        state = self._channel(name, set_id)
        state.steps[rank] = step
        state.last_step_time, state.warned = now, False
        self._record_ready(state, rank, step)
        for joined in self.joined:
            self._request_zeros(joined, name, state)

    def _drop(self, rank: int, name: str, set_id: int) -> None:
        """Record that a rank's optimizer was collected; remove the channel once all ranks' were."""
        members = self.sets.get(set_id)
        if members is None:
            return  # the channel was removed with its process set
        dropped_by = self._channel(name, set_id).dropped_by
        dropped_by.add(rank)
        if not dropped_by.issuperset(members):
            return
        del self.channels[name]
        self.negotiations.pop(Key(set_id, name), None)  # a plan that is not needed any more
        self._send(members, ["dropped", name], b"")

    def stragglers(self, state: ChannelState) -> list[int]:
        """Return the ranks that have not begun the latest step of a channel."""
        last = max(state.steps.values(), default=0)
        members = self.sets.get(state.set_id, [])
        return self._without([r for r in members if state.steps.get(r, 0) == last], state.set_id)

    def _request_zeros(self, rank: int, name: str, state: ChannelState) -> None:
        """Make a joined rank contribute zeros to the steps that others have begun."""
        if state.set_id != GLOBAL_SET:
            return
        last = max(state.steps.values(), default=0)
        for step in range(state.steps.get(rank, 0) + 1, last + 1):
            self._send([rank], ["send_zeros", name, step], b"")
            self._record_ready(state, rank, step)
        state.steps[rank] = last

    def _record_ready(self, state: ChannelState, rank: int, step: int) -> None:
        if self.timeline.is_open:
            state.ready_us.setdefault(step, {})[rank] = self.timeline.now_us()
            state.ready_us.pop(step - _STEPS_KEPT, None)

    # Shutdown

    def _record_drained(self, rank: int) -> None:
        """Record that a rank's executor has drained; once all have, close the connections."""
        if rank in self._drained:
            return
        self._drained.add(rank)
        if self._is_down and len(self._drained) == self.size:
            self._send(self.sets[GLOBAL_SET], ["close"], b"")


@dataclass
class ChannelState:
    """A bucket channel: the latest step that each rank has begun."""

    set_id: int
    steps: dict[int, int] = field(default_factory=dict)
    dropped_by: set[int] = field(default_factory=set)
    ready_us: dict[int, dict[int, int]] = field(default_factory=dict)
    """When each rank has begun the latest steps, for the timeline."""
    last_step_time: float = 0.0
    warned: bool = False


def _row_counts(ready: Negotiation) -> Any:
    """Return what members need from each other's requests: rows to gather, or to exchange."""
    requests = [ready.requests[rank] for rank in ready.ranks]
    if ready.request.kind == "allgather":
        of_tensors = zip(*(r.shapes for r in requests), strict=True)
        return [[shape[0] for shape in shapes] for shapes in of_tensors]
    if ready.request.kind == "alltoall":
        return [r.splits for r in requests]
    return None
