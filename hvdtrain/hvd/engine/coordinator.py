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

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdtrain.hvd.engine.batch import combine, from_bytes, to_bytes
from hvdtrain.hvd.engine.operation import GLOBAL_SET, Key, Request, dtype_of
from hvdtrain.hvd.engine.slots import SentTable, alike
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.engine.validation import mismatch
from hvdtrain.hvd.exceptions import SHUT_DOWN

Send = Callable[[list[int], list[Any], bytes], None]

_NAMES_KEPT = 1 << 16  # the last ones to complete; of these, repeated ones get a slot
_SLOTS_WAIT_S = 0.5  # after which what ranks have sent by number is negotiated by name
_ROOT_CAUSE_WAIT_S = 1.0  # how long to wait for the exit of a rank after a broken connection
# Operations that need messages only, whatever their size.
CONTROL_KINDS = ("barrier", "add_set", "remove_set")
_SET_REMOVED = "The process set of this operation has been removed."
_UNLIKE_ORDER = (
    "Mismatched optimizers: the ranks are in the first steps of different optimizers ({}) and "
    "would wait for each other forever: step them in the same order on all ranks."
)


class Submission(NamedTuple):
    """One rank's part in a negotiation: what it has submitted, and when."""

    request: Request
    data: bytes
    time: float


@dataclass
class Negotiation:
    """An operation that some ranks have submitted, in the end all."""

    key: Key
    parts: dict[int, Submission] = field(default_factory=dict)
    warned: bool = False

    @property
    def ranks(self) -> list[int]:
        """The ranks that have submitted it."""
        return sorted(self.parts)

    @property
    def request(self) -> Request:
        """That of the first rank."""
        return self.parts[min(self.parts)].request

    @property
    def since(self) -> float:
        """When the first rank has submitted it."""
        return next(iter(self.parts.values())).time


@dataclass
class ChannelState:
    """A bucket channel: the latest step that each rank has begun."""

    set_id: int
    steps: dict[int, int] = field(default_factory=dict)
    dropped_by: set[int] = field(default_factory=set)
    begun_s: dict[int, float] = field(default_factory=dict)
    """When each rank has begun it."""
    warned: bool = False

    @property
    def since(self) -> float:
        """When a rank has begun a step last."""
        return max(self.begun_s.values(), default=0.0)

    @property
    def latest(self) -> int:
        """The latest step that any rank has begun; 0 before the first."""
        return max(self.steps.values(), default=0)

    def begun(self, step: int) -> set[int]:
        """Return the ranks that have begun a step. They may have begun the next one, too: a fast
        rank's message about that can arrive before a slow rank's about this one.
        """
        return {rank for rank, latest in self.steps.items() if latest >= step}


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
        self._tables: list[SentTable] = []
        # The latest requests of small names, in the order of completion; and their slots.
        self._latest: dict[Key, tuple[Request, tuple[SentTable, int] | None]] = {}
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
            case ["slots", number, runs]:
                self._add_slots(rank, self._tables[number], runs, payload, now)
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
            if table.waits and now - table.since > _SLOTS_WAIT_S:
                self._withdraw(table)
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

    def _add_request(self, rank: int, key: Key, *part: Any) -> None:
        if key.set_id not in self.sets:
            self._send([rank], ["error", *key, _SET_REMOVED], b"")
            return
        if (latest := self._latest.get(key)) is not None and latest[1] is not None:
            self._withdraw(latest[1][0])
        negotiation = self.negotiations.setdefault(key, Negotiation(key))
        negotiation.parts[rank] = Submission(*part)
        self._complete(negotiation)
        if part[0].kind == "exchange":
            self._refuse_unlike_order(key)

    def waiting(self) -> Iterator[tuple[Negotiation | ChannelState, str, list[int]]]:
        """Yield what waits for ranks, with its name and the missing ranks: operations that some
        have submitted, and channels of which some have begun the latest step.
        """
        for key, negotiation in self.negotiations.items():
            yield negotiation, key.name, self._without(negotiation.parts, key.set_id)
        for name, state in self.channels.items():
            begun = state.begun(state.latest)
            yield state, name, self._without(begun, state.set_id) if begun else []

    def _without(self, ranks: Container[int], set_id: int) -> list[int]:
        """Return the members of a process set that are not in `ranks`, and have not joined."""
        absent = self.joined if set_id == GLOBAL_SET else {}
        return [r for r in self.sets.get(set_id, ()) if r not in ranks and r not in absent]

    def _complete(self, negotiation: Negotiation) -> None:
        key, parts = negotiation.key, negotiation.parts
        members = self.sets[key.set_id]
        if len(parts) + len(self.joined) < len(members) or self._without(parts, key.set_id):
            return
        del self.negotiations[key]
        ranks, request = negotiation.ranks, negotiation.request
        ready_us = _micros({rank: part.time for rank, part in parts.items()})
        self.timeline.negotiated(key.name, request.kind, ready_us)
        # A rank that joined after it had submitted this operation still contributes its data.
        requests = {rank: parts[rank].request for rank in ranks}
        problem = mismatch(requests, joined=len(ranks) < len(members))
        if problem is not None:
            self._send(ranks, ["error", *key, problem], b"")
        elif request.kind == "exchange":
            texts = [parts[rank].data.decode() for rank in ranks]
            self._send(members, ["exchanged", *key, texts], b"")
        elif request.kind in CONTROL_KINDS:
            self._send(members, ["done", *key, self._run_control_operation(request)], b"")
        else:
            complete = self._small if request.is_eager(len(members)) else self._ready
            complete.append(negotiation)

    def _refuse_unlike_order(self, key: Key) -> None:
        """Fail the exchanges of a set if each rank waits in one, and none can complete."""
        waiting = {
            k: n
            for k, n in self.negotiations.items()
            if k.set_id == key.set_id and n.request.kind == "exchange"
        }
        busy = {rank for n in waiting.values() for rank in n.parts}
        if key not in waiting or self._without(busy, key.set_id):
            return
        names = ", ".join(f"rank {min(n.parts)}: {k.name}" for k, n in waiting.items())
        for k in waiting:
            self._refuse(k, _UNLIKE_ORDER.format(names))

    def _refuse(self, key: Key, why: str) -> None:
        """Fail an operation that only some ranks have submitted."""
        self._send(self.negotiations.pop(key).ranks, ["error", *key, why], b"")

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
        for group in together.values():
            one, begin_us = group[0], self.timeline.now_us()
            dtype, num_ranks = dtype_of(one.request.dtypes[0]), len(self.sets[one.key.set_id])
            flats = (b"".join(n.parts[rank].data for n in group) for rank in one.ranks)
            absent = [None] * (num_ranks - len(one.parts))  # of ranks that have joined
            data = [*(from_bytes(flat, dtype) for flat in flats), *absent]
            result = combine(one.request, data, num_ranks)
            names = [each.key.name for each in group]
            # Before the answer: a rank that has received it may start another timeline at once.
            for name in names:
                self.timeline.ran(name, (one.request.kind.upper(),), begin_us)
            agreed = None if absent else self._agree(group)
            header = ["reduced", one.key.set_id, names, agreed]
            self._send(one.ranks, header, to_bytes(result))

    def _agree(self, group: list[Negotiation]) -> list[Any] | None:
        """Return the table of alike operations that have completed by name, and the number of each:
        that which it has, a new one if its request is that of the time before, else None.
        """
        set_id, kind = group[0].key.set_id, alike(group[0].request)
        tables = (t for t in self._tables if (t.set_id, t.alike) == (set_id, kind))
        table = next(tables, None)
        numbers: list[int | None] = []
        for key, request in ((each.key, each.request) for each in group):
            before, slot = self._latest.pop(key, (None, None))
            if before != request:
                slot = None
            elif slot is None:
                if table is None:
                    table = SentTable(len(self._tables), set_id, kind)
                    self._tables.append(table)
                number = table.add((key, request), request)
                slot = None if number is None else (table, number)
            self._latest[key] = request, slot
            if len(self._latest) > _NAMES_KEPT:
                del self._latest[next(iter(self._latest))]
            numbers.append(slot and slot[1])
        return [table.number, numbers] if table is not None else None

    def _add_slots(
        self, rank: int, table: SentTable, runs: list[list[int]], data: bytes, now: float
    ) -> None:
        """Add what a rank has sent by number; send the sums of what all have sent."""
        members = self.sets.get(table.set_id, [])
        table.receive(rank, runs, data, now)
        has_joined = self.joined and table.set_id == GLOBAL_SET
        names = self.negotiations and (key for key, _ in table.slots_of(runs))
        is_negotiated = any(key in self.negotiations for key in names)
        if has_joined or is_negotiated or not members or self.timeline.is_open:
            self._withdraw(table)
        elif complete := table.complete(members):
            flats = [table.take(member, complete) for member in members]
            total = to_bytes(combine(table.alike, flats, len(members)))
            self._send(members, ["sums", table.number, complete], total)

    def _withdraw(self, table: SentTable) -> None:
        """Negotiate by name what ranks have sent by number."""
        if table.waits:
            for rank, key, request, data in list(table.withdraw()):
                self._add_request(rank, key, request, data, table.since)
            self._send_results()

    def _withdraw_all(self, set_id: int) -> None:
        for table in self._tables:
            if table.set_id == set_id:
                self._withdraw(table)

    def _run_control_operation(self, request: Request) -> Any:
        """Run an operation that needs messages only; return the id of a new process set."""
        if request.kind == "add_set":
            set_id, self._next_set = self._next_set, self._next_set + 1
            self.sets[set_id] = list(request.data)
            return set_id
        if request.kind == "remove_set":
            self._end_set(request.data)
            self.sets.pop(request.data, None)
            self.channels = {n: c for n, c in self.channels.items() if c.set_id != request.data}
            self._forget_slots(request.data)
        return None

    def _end_set(self, set_id: int) -> None:
        """Send what is ready; fail the set's operations that only some members have submitted."""
        self._withdraw_all(set_id)
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
            gpus = (item.parts[rank].request.gpu for rank in item.ranks)
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
        self._withdraw_all(GLOBAL_SET)
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
        for table in self._tables:
            if table.set_id == set_id:
                table.release()
        self._latest = {key: known for key, known in self._latest.items() if key.set_id != set_id}

    def _step(self, rank: int, name: str, set_id: int, step: int, now: float) -> None:
        state = self.channels.setdefault(name, ChannelState(set_id))
        state.steps[rank], state.begun_s[rank], state.warned = step, now, False
        if self.timeline.is_open and not self._without(state.begun(step), set_id):
            self.timeline.negotiated(f"step of {name}", "step", _micros(state.begun_s))
        for joined in self.joined:
            self._request_zeros(joined, name, state)

    def _drop(self, rank: int, name: str, set_id: int) -> None:
        """Record that a rank's optimizer was collected; remove the channel once all ranks' were."""
        members = self.sets.get(set_id)
        if members is None:
            return  # the channel was removed with its process set
        dropped_by = self.channels.setdefault(name, ChannelState(set_id)).dropped_by
        dropped_by.add(rank)
        if dropped_by.issuperset(members):
            del self.channels[name]
            self.negotiations.pop(Key(set_id, name), None)  # a plan that is not needed any more
            self._send(members, ["dropped", name], b"")

    def _request_zeros(self, rank: int, name: str, state: ChannelState) -> None:
        """Make a joined rank contribute zeros to the steps that others have begun."""
        if state.set_id == GLOBAL_SET:
            for step in range(state.steps.get(rank, 0) + 1, state.latest + 1):
                self._send([rank], ["send_zeros", name, step], b"")
            state.steps[rank] = state.latest

    # Shutdown

    def _record_drained(self, rank: int) -> None:
        """Record that a rank's executor has drained; once all have, close the connections."""
        if rank in self._drained:
            return
        self._drained.add(rank)
        if self._is_down and len(self._drained) == self.size:
            self._send(self.sets[GLOBAL_SET], ["close"], b"")


def _row_counts(ready: Negotiation) -> Any:
    """Return what members need from each other's requests: rows to gather, or to exchange."""
    requests = [ready.parts[rank].request for rank in ready.ranks]
    if ready.request.kind == "allgather":
        of_tensors = zip(*(r.shapes for r in requests), strict=True)
        return [[shape[0] for shape in shapes] for shapes in of_tensors]
    if ready.request.kind == "alltoall":
        return [r.splits for r in requests]
    return None


def _micros(times: dict[int, float]) -> dict[int, int]:
    return {rank: int(time * 1e6) for rank, time in times.items()}
