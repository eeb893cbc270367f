"""The coordinator, rank 0's state machine: which ranks have submitted what, and what may run.

The control thread of rank 0 uses it. It has no sockets, threads or clocks: messages go in, messages
come out. All ranks receive the answers in one order, so they run the same batches in that order.

To rank 0:  op (key, meta; data)   hit (cache id; data)   anew (cache id, key, meta; data)   join
            step (lane, set, number)   drop (lane, set)   idle   bye (steps)   drained
            broken (reason): a connection   failed (reason): a thread of the sender
From it:    run (batches)   done (key, cache id, extra; result)   error (key, text)   again (id)
            joined (last rank)   shadow (lane, number)   dropped (lane)
            down (reason, by, steps)   close

An operation:     op from every rank -> done with the result of small data, or run
A repeated one:   hit -> done or run;  if rank 0's cache has dropped the id: again -> anew
Shutdown:         bye, broken, failed or a lost rank -> down -> drained from every rank -> close
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.hvd.engine import inline
from hvdtrain.hvd.engine.checks import mismatch
from hvdtrain.hvd.engine.plan import merge_plans
from hvdtrain.hvd.engine.request import GLOBAL_SET, Key, Meta
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.exceptions import SHUT_DOWN

Send = Callable[[list[int], list[Any], bytes], None]

_BETTER_REASON_S = 1.0  # how long to wait for the exit of a rank after a broken connection
# Operations that need messages only, whatever their size.
_CONTROL_KINDS = ("barrier", "add_set", "remove_set")
_SET_IS_GONE = "The process set of this operation has been removed."


@dataclass
class Waiting:
    """An operation that some ranks have submitted."""

    since: float
    asked: dict[int, Meta] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    warned: bool = False


@dataclass
class Ready:
    """An operation that all ranks have submitted, and that moves data."""

    key: Key
    cache_id: int
    meta: Meta
    extra: Any


class Coordinator:
    """The state machine of rank 0. Not thread safe: only the control thread calls it."""

    def __init__(
        self, size: int, cache_capacity: int, fusion_bytes: int, send: Send, timeline: Timeline
    ) -> None:
        self.size = size
        self.sets: dict[int, list[int]] = {GLOBAL_SET: list(range(size))}
        self.waiting: dict[Key, Waiting] = {}
        self.joined: dict[int, None] = {}  # in the order in which they joined
        self.lanes: dict[str, LaneSteps] = {}
        self.lane_tensors: dict[str, list[str]] = {}
        self._dropped: dict[str, set[int]] = {}
        self._next_set = 1
        self._cache: OrderedDict[int, tuple[Key, dict[int, Meta]]] = OrderedDict()
        self._cache_ids: dict[Key, int] = {}
        self._next_cache_id = 1
        self._cache_capacity = cache_capacity
        self._asked_again: dict[int, set[int]] = {rank: set() for rank in range(size)}
        self._held: dict[int, list[tuple[list[Any], bytes]]] = {rank: [] for rank in range(size)}
        self._fusion_bytes = fusion_bytes
        self._send = send
        self.timeline = timeline
        self._ready: list[Ready] = []
        self._busy = False
        self._down = False
        self._broken: tuple[float, str] | None = None
        self._drained: set[int] = set()

    def receive(self, rank: int, header: list[Any], payload: bytes, now: float) -> None:
        """Process one message, and send what follows from it."""
        what, *rest = header
        if self._down and what not in ("drained", "idle"):
            return  # "down" has been sent to its sender
        if self._is_early(rank, header):
            self._held[rank].append((header, payload))
        elif what == "op":
            self._arrive(rank, Key(*rest[0]), Meta.from_wire(rest[1]), payload, now)
        elif what == "hit":
            if rest[0] in self._cache:
                self._cache.move_to_end(rest[0])  # the least recently used entry is dropped first
                key, metas = self._cache[rest[0]]
                self._arrive(rank, key, metas[rank], payload, now)
            else:
                self._asked_again[rank].add(rest[0])
                self._send([rank], ["again", rest[0]], b"")
        elif what == "anew":
            self._asked_again[rank].discard(rest[0])
            self._arrive(rank, Key(*rest[1]), Meta.from_wire(rest[2]), payload, now)
            if not self._asked_again[rank]:  # the last resent operation: process what queued behind
                held, self._held[rank] = self._held[rank], []
                for early in held:
                    self.receive(rank, *early, now)
        elif what == "step":
            lane, set_id, number = rest
            self._step(rank, lane, set_id, number, now)
        elif what == "join":
            self._join(rank)
        elif what == "drop":
            self._drop(rank, *rest)
        elif what == "idle":
            self._busy = False
            self._pump()
        elif what == "bye":
            self.go_down(SHUT_DOWN, rank, rest[0])
        elif what == "broken":
            self._broken = self._broken or (now, rest[0])
        elif what == "failed":
            self.go_down(rest[0], -1, {})
        elif what == "drained":
            self._drain(rank)

    def tick(self, now: float) -> None:
        """Shut down if a connection between ranks broke some time ago. Called twice a second.

        Not at once: the exit of a rank is a better reason, because it names the rank, and the
        control plane usually reports it a moment later.
        """
        if self._broken is not None and now - self._broken[0] > _BETTER_REASON_S:
            self.go_down(self._broken[1], -1, {})

    def lose(self, rank: int, person: str, why: str) -> None:
        """Shut down because the connection to a rank was lost. `why`: e.g. "has ended"."""
        reason = f"{SHUT_DOWN} Rank {rank} ({person}) {why}."
        if self._down and rank not in self._drained:
            # During a graceful shutdown peers still wait for the operations that it had begun.
            self._send(self.sets[GLOBAL_SET], ["down", reason, -1, {}], b"")
        self.go_down(reason, -1, {})
        self._drain(rank)

    def go_down(self, reason: str, by: int, steps: dict[str, int]) -> None:
        """Shut down: no further operation begins.

        `by`: the rank that left after these `steps`: running operations complete; -1 on a failure.
        """
        if self._down:
            return
        self._down = True
        self.waiting.clear()
        self._ready.clear()
        self._send(self.sets[GLOBAL_SET], ["down", reason, by, steps], b"")

    # Operations

    def _arrive(self, rank: int, key: Key, meta: Meta, payload: bytes, now: float) -> None:
        if key.set_id not in self.sets:
            self._send([rank], ["error", *key, _SET_IS_GONE], b"")
            return
        waiting = self.waiting.get(key)
        if waiting is None:
            waiting = self.waiting[key] = Waiting(now)
            self.timeline.negotiate_start(key.name, meta.kind)
        waiting.asked[rank] = meta
        if payload:
            waiting.data[rank] = payload
        self.timeline.negotiate_rank_ready(key.name, rank)
        self._finish_if_complete(key, waiting)

    def missing(self, key: Key, waiting: Waiting) -> list[int]:
        """Return the ranks that have not submitted an operation yet."""
        members = self.sets.get(key.set_id, [])
        absent = self.joined if key.set_id == GLOBAL_SET else {}
        return [r for r in members if r not in waiting.asked and r not in absent]

    def _finish_if_complete(self, key: Key, waiting: Waiting) -> None:
        if self.missing(key, waiting):
            return
        del self.waiting[key]
        self.timeline.negotiate_end(key.name)
        asked = waiting.asked
        # A rank that joined after it had submitted this operation still contributes its data.
        absent = [r for r in self.joined if r not in asked] if key.set_id == GLOBAL_SET else []
        problem = mismatch(asked, bool(absent))
        meta = asked[min(asked)]
        if problem is not None:
            self._forget(key)
            self._send(sorted(asked), ["error", *key, problem], b"")
            return
        cache_id = self._remember(key, asked) if not absent else 0
        members = self.sets[key.set_id]
        if meta.kind == "plan":
            plan, problem = merge_plans([waiting.data[r] for r in sorted(asked)])
            if plan is not None:
                lane = key.name.split(".", 2)[2].rpartition("/")[0]
                self.lane_tensors[lane] = plan[0]
            answer = ["done", *key, 0, plan] if problem is None else ["error", *key, problem]
            self._send(members, answer, b"")
        elif meta.kind in _CONTROL_KINDS:
            self._send(members, ["done", *key, 0, self._carry_out(meta)], b"")
        elif inline.fits(meta, len(members)):
            self.timeline.cycle()
            self.timeline.start(key.name, meta.kind)
            data = [waiting.data.get(r, b"") for r in sorted(asked)]
            result = inline.combine(meta, data + [b""] * len(absent), len(members))
            extra = _extra(meta, asked)
            # Before the answer: a rank that has received it may start another timeline at once.
            self.timeline.end(key.name)
            self._send(sorted(asked), ["done", *key, cache_id, extra], result)
        else:
            self._ready.append(Ready(key, cache_id, meta, _extra(meta, asked)))
            self._pump()

    def _carry_out(self, meta: Meta) -> Any:
        """Run an operation that needs messages only; return the id of a new process set."""
        if meta.kind == "add_set":
            set_id, self._next_set = self._next_set, self._next_set + 1
            self.sets[set_id] = list(meta.data)
            return set_id
        if meta.kind == "remove_set":
            self._finish_set(meta.data)
            self.sets.pop(meta.data, None)
            for lane in [lane for lane, s in self.lanes.items() if s.set_id == meta.data]:
                del self.lanes[lane]
                self.lane_tensors.pop(lane, None)
                self._dropped.pop(lane, None)
        return None

    def _finish_set(self, set_id: int) -> None:
        """Send what is ready, and fail operations of a set that some members have not submitted."""
        busy, self._busy = self._busy, False  # send now, although a batch may be running
        self._pump()
        self._busy = self._busy or busy
        for key in [key for key in self.waiting if key.set_id == set_id]:
            asked = self.waiting.pop(key).asked
            self._send(sorted(asked), ["error", *key, _SET_IS_GONE], b"")

    def _pump(self) -> None:
        """Send what is ready, unless a batch is running: what arrives meanwhile is then fused."""
        if self._busy or not self._ready:
            return
        ready, self._ready = self._ready, []
        self.timeline.cycle()
        for members, batch in self._fuse(ready):
            head = batch[0]
            entries = [[r.key.name, r.cache_id, r.extra] for r in batch]
            metas = [r.meta for r in batch] if self.joined else None
            self._send(members, ["run", head.key.set_id, head.meta.kind, entries, metas], b"")
            # Rank 0's own executor sends "idle" when it has nothing to do.
            self._busy = self._busy or 0 in members

    def _fuse(self, ready: list[Ready]) -> list[tuple[list[int], list[Ready]]]:
        """Return batches of alike operations, up to the fusion threshold, with their members."""
        batches: list[tuple[Any, list[Ready], int]] = []
        open_batch: dict[Any, int] = {}
        for item in ready:
            meta, num_bytes = item.meta, item.meta.num_bytes
            # Requests are alike if only their shapes, dtypes and data differ.
            alike = (item.key.set_id, *meta._replace(shapes=(), dtypes=(), data=None))
            at = open_batch.get(alike) if meta.kind in ("allreduce", "broadcast") else None
            if at is not None and batches[at][2] + num_bytes <= self._fusion_bytes:
                _, items, total = batches[at]
                items.append(item)
                batches[at] = (alike, items, total + num_bytes)
            else:
                open_batch[alike] = len(batches)
                batches.append((alike, [item], num_bytes))
        return [(self.sets[items[0].key.set_id], items) for _, items, _ in batches]

    # The cache: a repeated request is sent as one number

    def _remember(self, key: Key, asked: dict[int, Meta]) -> int:
        if ".noname." in key.name or self._cache_capacity <= 0:
            return 0  # an automatic name is never repeated
        known = self._cache_ids.get(key)
        if known is not None and self._cache[known][1] == asked:
            return known
        self._forget(key)
        cache_id, self._next_cache_id = self._next_cache_id, self._next_cache_id + 1
        self._cache[cache_id] = (key, asked)
        self._cache_ids[key] = cache_id
        if len(self._cache) > self._cache_capacity:
            _, (old, _) = self._cache.popitem(last=False)
            del self._cache_ids[old]
        return cache_id

    def _forget(self, key: Key) -> None:
        cache_id = self._cache_ids.pop(key, None)
        if cache_id is not None:
            del self._cache[cache_id]

    def _is_early(self, rank: int, header: list[Any]) -> bool:
        """Return whether a message overtook an operation that its rank must resend.

        It must then queue behind that operation, which a cache miss delays. Data operations may
        overtake it. But a rank that joins, removes a process set or leaves has submitted it before.
        """
        if self._down or not self._asked_again[rank] or header[0] == "anew":
            return False
        moves_data = header[0] == "hit" or (
            header[0] == "op" and Meta.from_wire(header[2]).kind not in _CONTROL_KINDS
        )
        return not moves_data or bool(self._held[rank])

    # Ranks that have joined, and the steps of optimizers

    def _join(self, rank: int) -> None:
        self.joined[rank] = None
        is_last = len(self.joined) == self.size
        if not is_last:
            for lane, steps in self.lanes.items():
                self._shadow(rank, lane, steps)
        for key, waiting in list(self.waiting.items()):
            if key.set_id == GLOBAL_SET:
                self._finish_if_complete(key, waiting)
        if is_last:
            # First the operations to which some ranks only contribute zeros: these have not
            # submitted them, and may reuse the same names as soon as they receive "joined".
            self._busy = False
            self._pump()
            self.joined = {}
            self._send(self.sets[GLOBAL_SET], ["joined", rank], b"")

    def _step(self, rank: int, lane: str, set_id: int, number: int, now: float) -> None:
        steps = self.lanes.setdefault(lane, LaneSteps(set_id))
        steps.by_rank[rank] = number
        steps.changed, steps.warned = now, False
        for joined in self.joined:
            self._shadow(joined, lane, steps)

    def _drop(self, rank: int, lane: str, set_id: int) -> None:
        """Remove a lane once its optimizer is gone on all ranks."""
        members = self.sets.get(set_id)
        if members is None:
            return  # the lane was removed with its process set
        dropped = self._dropped.setdefault(lane, set())
        dropped.add(rank)
        if not dropped.issuperset(members):
            return
        del self._dropped[lane]
        self.lanes.pop(lane, None)
        self.lane_tensors.pop(lane, None)
        for key in [k for k in self.waiting if k.name.startswith(f"plan.{set_id}.{lane}/")]:
            del self.waiting[key]  # some ranks had asked for a plan that is not needed any more
        self._send(members, ["dropped", lane], b"")

    def late(self, steps: LaneSteps) -> list[int]:
        """Return the ranks that have not begun the latest step of a lane."""
        last = max(steps.by_rank.values())
        absent = self.joined if steps.set_id == GLOBAL_SET else {}
        return [
            rank
            for rank in self.sets.get(steps.set_id, [])
            if steps.by_rank.get(rank, 0) < last and rank not in absent
        ]

    def _shadow(self, rank: int, lane: str, steps: LaneSteps) -> None:
        """Make a joined rank take part, with zeros, in the steps that others have begun."""
        if steps.set_id != GLOBAL_SET:
            return
        begun = max(steps.by_rank.values())
        for number in range(steps.by_rank.get(rank, 0) + 1, begun + 1):
            self._send([rank], ["shadow", lane, number], b"")
        steps.by_rank[rank] = begun

    # Shutdown

    def _drain(self, rank: int) -> None:
        """Record that a rank's executor has drained; once all have, close the connections."""
        if rank in self._drained:
            return
        self._drained.add(rank)
        if self._down and len(self._drained) == self.size:
            self._send(self.sets[GLOBAL_SET], ["close"], b"")


@dataclass
class LaneSteps:
    """The latest step that each rank has begun in a lane."""

    set_id: int
    by_rank: dict[int, int] = field(default_factory=dict)
    changed: float = 0.0
    warned: bool = False


def _extra(meta: Meta, asked: dict[int, Meta]) -> Any:
    """Return what members need from each other's requests: rows to gather, or to exchange."""
    ranks = sorted(asked)
    if meta.kind == "allgather":
        return [[asked[r].shapes[i][0] for r in ranks] for i in range(len(meta.shapes))]
    if meta.kind == "alltoall":
        return [list(asked[r].splits) for r in ranks]
    return None
