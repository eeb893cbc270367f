"""The coordinator, rank 0's state machine: which ranks have submitted what, and what may run.

The control thread of rank 0 uses it. It has no sockets, threads or clocks: messages go in, messages
come out. All ranks receive the answers in one order, so they run the same batches in that order.

To rank 0:  ops (entries of set, request, size of data, names; data)
            step (channel, set, number)   drop (channel, set)   join   idle   leave (steps)
            broken (reason): a connection   failed (reason): a thread of the sender   drained
From it:    run (batches)   done (set, names, extra; results)   error (key, text)
            joined (last rank)   send_zeros (channel, number)   dropped (channel)
            down (reason, steps or null)   close

An operation:     in ops from every rank -> done with the result of small data, or run
Shutdown:         leave, broken, failed or a lost rank -> down -> drained from every rank -> close
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.hvd.engine import eager
from hvdtrain.hvd.engine.bucket_plan import channel_of_plan, merge_plans
from hvdtrain.hvd.engine.request import GLOBAL_SET, Key, Request
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.engine.validation import mismatch
from hvdtrain.hvd.exceptions import SHUT_DOWN

Send = Callable[[list[int], list[Any], bytes], None]

_STEPS_KEPT = 8  # of which the timeline knows when each rank has begun them
_ROOT_CAUSE_WAIT_S = 1.0  # how long to wait for the exit of a rank after a broken connection
# Operations that need messages only, whatever their size.
CONTROL_KINDS = ("barrier", "add_set", "remove_set")
_SET_REMOVED = "The process set of this operation has been removed."


@dataclass
class Negotiation:
    """An operation that some ranks have submitted: their requests and small data, by rank."""

    started_at: float
    requests: dict[int, Request] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    warned: bool = False


@dataclass
class Ready:
    """An operation that all ranks have submitted, and that moves data."""

    key: Key
    request: Request
    extra: Any
    gpus: list[int]
    """The index of the GPU on each rank that has submitted it."""


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
        self._ready: list[Ready] = []
        self._eager: list[tuple[Key, list[int], eager.Eager]] = []  # with the ranks to answer
        self._executor_is_busy = False
        self._is_down = False
        self._broken: tuple[float, str] | None = None
        self._drained: set[int] = set()

    def receive(self, rank: int, header: list[Any], payload: bytes, now: float) -> None:
        """Process one message, and send what follows from it."""
        what, *rest = header
        if self._is_down and what not in ("drained", "idle"):
            return  # "down" has been sent to its sender
        if what == "ops":
            self._add_requests(rank, rest[0], payload, now)
        elif what == "step":
            name, set_id, step = rest
            self._step(rank, name, set_id, step, now)
        elif what == "join":
            self._join(rank)
        elif what == "drop":
            self._drop(rank, *rest)
        elif what == "idle":
            self._executor_is_busy = False
            self._send_ready()
        elif what == "leave":
            self.shut_down(SHUT_DOWN, rest[0])
        elif what == "broken":
            self._broken = self._broken or (now, rest[0])
        elif what == "failed":
            self.shut_down(rest[0])
        elif what == "drained":
            self._record_drained(rank)

    def tick(self, now: float) -> None:
        """Shut down if a connection between ranks broke some time ago. Called twice a second.

        Not at once: the exit of a rank is a better reason, because it names the rank, and the
        control plane usually reports it a moment later.
        """
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
        self._ready.clear()
        self._send(self.sets[GLOBAL_SET], ["down", reason, steps], b"")

    # Operations

    def _add_requests(self, rank: int, entries: list[Any], payload: bytes, now: float) -> None:
        at = 0
        for set_id, fields, size, names in entries:
            request = Request.from_wire(fields)
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
        negotiation = self.negotiations.get(key)
        if negotiation is None:
            negotiation = self.negotiations[key] = Negotiation(now)
            self.timeline.negotiate_start(key.name, request.kind)
        negotiation.requests[rank] = request
        if payload:
            negotiation.data[rank] = payload
        self.timeline.negotiate_rank_ready(key.name, rank)
        self._complete(key, negotiation)

    def missing(self, key: Key, negotiation: Negotiation) -> list[int]:
        """Return the ranks that have not submitted an operation yet."""
        members = self.sets.get(key.set_id, [])
        absent = self.joined if key.set_id == GLOBAL_SET else {}
        return [r for r in members if r not in negotiation.requests and r not in absent]

    def _complete(self, key: Key, negotiation: Negotiation) -> None:
        if len(negotiation.requests) + len(self.joined) < len(self.sets[key.set_id]):
            return  # without a look at each rank
        if self.missing(key, negotiation):
            return
        del self.negotiations[key]
        self.timeline.negotiate_end(key.name)
        requests = negotiation.requests
        # A rank that joined after it had submitted this operation still contributes its data.
        absent = [r for r in self.joined if r not in requests] if key.set_id == GLOBAL_SET else []
        problem = mismatch(requests, bool(absent))
        request = requests[min(requests)]
        if problem is not None:
            self._send(sorted(requests), ["error", *key, problem], b"")
            return
        members = self.sets[key.set_id]
        if request.kind == "plan":
            plan, problem = merge_plans([negotiation.data[r] for r in sorted(requests)])
            if plan is not None:
                plan_of = channel_of_plan(key.name)
                assert plan_of is not None
                self._channel(plan_of[1], key.set_id).tensors = plan[0]
            answer = _done(key, plan) if problem is None else ["error", *key, problem]
            self._send(members, answer, b"")
        elif request.kind in CONTROL_KINDS:
            self._send(members, _done(key, self._run_control_operation(request)), b"")
        elif eager.fits(request, len(members)):
            ranks = sorted(requests)
            data = [negotiation.data.get(r, b"") for r in ranks] + [b""] * len(absent)
            self._eager.append((key, ranks, eager.Eager(request, data, len(members))))
        else:
            gpus = [requests[r].gpu for r in sorted(requests)]
            self._ready.append(Ready(key, request, _row_counts(request, requests), gpus))

    def _send_results(self) -> None:
        """Combine the small data that is complete, and send the results: one message for all
        operations of the same ranks and process set.
        """
        if not self._eager:
            return
        found, self._eager = self._eager, []
        self.timeline.cycle()
        together: dict[Any, list[tuple[Key, eager.Eager]]] = {}
        for key, ranks, operation in found:
            together.setdefault((key.set_id, *ranks), []).append((key, operation))
            self.timeline.start(key.name, operation.request.kind)
        for (set_id, *ranks), operations in together.items():
            results = eager.combine([operation for _, operation in operations])
            names = [key.name for key, _ in operations]
            # Before the answer: a rank that has received it may start another timeline at once.
            for name in names:
                self.timeline.end(name)
            self._send(ranks, ["done", set_id, names, None], results)

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
        return None

    def _end_set(self, set_id: int) -> None:
        """Send what is ready; fail the set's operations that only some members have submitted."""
        self._send_results()
        busy, self._executor_is_busy = (
            self._executor_is_busy,
            False,
        )  # send now, although a batch may be running
        self._send_ready()
        self._executor_is_busy = self._executor_is_busy or busy
        for key in [key for key in self.negotiations if key.set_id == set_id]:
            requests = self.negotiations.pop(key).requests
            self._send(sorted(requests), ["error", *key, _SET_REMOVED], b"")

    def _send_ready(self) -> None:
        """Send what is ready, unless a batch is running: what arrives meanwhile is then fused."""
        if self._executor_is_busy or not self._ready:
            return
        ready, self._ready = self._ready, []
        self.timeline.cycle()
        for members, batch in self._fuse(ready):
            head = batch[0]
            entries = [[r.key.name, r.extra] for r in batch]
            requests = [r.request for r in batch] if self.joined else None
            self._send(members, ["run", head.key.set_id, head.request.kind, entries, requests], b"")
            # Rank 0's own executor sends "idle" when it has nothing to do.
            self._executor_is_busy = self._executor_is_busy or 0 in members

    def _fuse(self, ready: list[Ready]) -> list[tuple[list[int], list[Ready]]]:
        """Return batches of alike operations, up to the fusion threshold, with their members."""
        batches: list[list[Ready]] = []
        open_batches: dict[Any, tuple[list[Ready], int]] = {}
        for item in ready:
            request = item.request
            # Requests are alike if only their shapes, dtypes and data differ.
            plain = request._replace(shapes=(), dtypes=(), data=None)
            alike = (item.key.set_id, plain, *item.gpus)
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
        self.joined[rank] = None
        is_last = len(self.joined) == self.size
        if not is_last:
            for name, state in self.channels.items():
                self._request_zeros(rank, name, state)
        for key, negotiation in list(self.negotiations.items()):
            if key.set_id == GLOBAL_SET:
                self._complete(key, negotiation)
        self._send_results()
        self._send_ready()
        if is_last:
            # First the operations to which some ranks only contribute zeros: these have not
            # submitted them, and may reuse the same names as soon as they receive "joined".
            self._executor_is_busy = False
            self._send_ready()
            self.joined = {}
            self._send(self.sets[GLOBAL_SET], ["joined", rank], b"")

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
        for key in [k for k in self.negotiations if channel_of_plan(k.name) == (set_id, name)]:
            del self.negotiations[key]  # some ranks requested a plan that is not needed any more
        self._send(members, ["dropped", name], b"")

    def stragglers(self, state: ChannelState) -> list[int]:
        """Return the ranks that have not begun the latest step of a channel."""
        last = max(state.steps.values(), default=0)
        absent = self.joined if state.set_id == GLOBAL_SET else {}
        members = self.sets.get(state.set_id, [])
        return [r for r in members if state.steps.get(r, 0) < last and r not in absent]

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
    """A bucket channel: the latest step that each rank has begun, and its tensors' names."""

    set_id: int
    steps: dict[int, int] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    dropped_by: set[int] = field(default_factory=set)
    ready_us: dict[int, dict[int, int]] = field(default_factory=dict)
    """When each rank has begun the latest steps, for the timeline."""
    last_step_time: float = 0.0
    warned: bool = False


def _done(key: Key, extra: Any) -> list[Any]:
    return ["done", key.set_id, [key.name], extra]


def _row_counts(request: Request, requests: dict[int, Request]) -> Any:
    """Return what members need from each other's requests: rows to gather, or to exchange."""
    ranks = sorted(requests)
    if request.kind == "allgather":
        return [[requests[r].shapes[i][0] for r in ranks] for i in range(len(request.shapes))]
    if request.kind == "alltoall":
        return [list(requests[r].splits) for r in ranks]
    return None
