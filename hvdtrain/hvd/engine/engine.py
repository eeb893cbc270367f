"""One rank's side of the engine: the operations that it has submitted, and how they end.

`hvd.basics` holds one. Each rank sends requests to the coordinator on rank 0, and its control
thread handles the answers; `_ANSWERS` lists them.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain import transports
from hvdtrain.failure import print_stderr
from hvdtrain.hvd.engine import collectives, inline, stall
from hvdtrain.hvd.engine.control import Control
from hvdtrain.hvd.engine.coordinator import Coordinator
from hvdtrain.hvd.engine.executor import Executor
from hvdtrain.hvd.engine.groups import Groups
from hvdtrain.hvd.engine.lanes import Lane
from hvdtrain.hvd.engine.request import GLOBAL_SET, Key, Meta
from hvdtrain.hvd.engine.scaling import scale_
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.engine.work import Work
from hvdtrain.hvd.exceptions import SHUT_DOWN, HorovodInternalError
from hvdtrain.world import World

_FUSION_BYTES = 128 << 20
_LEAVE_S = 10.0

DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another "
    "tensor that is currently being processed.  If you want to request another tensor, use a "
    "different tensor name."
)


class Engine:
    """The engine of one rank, from `hvd.init` to `hvd.shutdown`.

    Three threads use it: the caller's submits and waits, the control thread receives answers, the
    executor runs operations. `_lock` guards the submitted operations and the end of the job:
    `failure` is why no operation begins any more, `broken` why running ones cannot complete either.
    """

    def __init__(self, world: World, store: Store, settings: Settings, hello: dict[str, Any]):
        """Connect. Collective. Raises WorldError naming the ranks that did not come."""
        self.world = world
        self.settings = settings
        self.sets: dict[int, list[int]] = {GLOBAL_SET: list(range(world.size))}
        self.lanes: dict[str, Lane] = {}
        self.lane_numbers: dict[tuple[str, int], int] = {}  # lanes made so far, by parameters
        self.zeros_on = 0  # the GPU that the executor uses, also for the zeros of a joined rank
        self.joins = 0  # completed joins, which are part of automatic names
        self.failure: str | None = None
        self.broken: str | None = None
        self._left_by: tuple[int, dict[str, int]] | None = None
        self._pending: dict[Key, Work] = {}
        self._dropped: deque[tuple[str, int]] = deque()
        self._lock = threading.Lock()
        self._cache: OrderedDict[Key, tuple[Meta, int]] = OrderedDict()
        self._join_work: Work | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()
        self.control = Control(world, store, hello, settings.gloo_timeout_s, settings.peer_limit_s)
        self.people = self.control.members
        self.groups = Groups(
            self.control.store,
            world.rank,
            self._choose_transport(),
            settings.gloo_timeout_s,
            lambda: self.broken,
            settings.peer_limit_s,
        )
        # Opened before any rank can submit an operation, so that it contains the first one.
        recorded = settings.timeline if world.rank == 0 and settings.timeline != "DYNAMIC" else None
        self.timeline = Timeline(recorded, settings.timeline_mark_cycles)
        self._coordinator: Coordinator | None = None
        if world.rank == 0:
            fusion = settings.fusion_threshold
            self._coordinator = Coordinator(
                world.size,
                settings.cache_capacity,
                _FUSION_BYTES if fusion is None else fusion,
                self.control.send_all,
                self.timeline,
            )
            self._stall = stall.Inspector(self._coordinator, settings, self._person)
        self.executor = Executor(self)
        self.control.start(self._deliver, self._lost, self._tick, self.pin, self.thread_failed)
        _engines.add(self)

    def _choose_transport(self) -> str:
        """Return the transport of CPU tensors: rank 0's setting, or the best that all ranks have.

        It is computed from the same exchanged data on all ranks, so that all agree.
        """
        asked = str(self.people[0]["transport"])
        if asked != "auto":
            return asked
        no_shm, no_mpi = (
            next((person[lacks] for person in self.people if person[lacks]), None)
            for lacks in ("no_shm", "no_mpi")
        )
        one_host = len({person["place"] for person in self.people}) == 1
        return transports.best_on_cpu(self.world, one_host, no_shm, no_mpi)[0]

    # The caller's thread

    def submit(self, work: Work) -> Work:
        """Submit an operation. Never blocks.

        Raises ValueError if the name is already pending, HorovodInternalError once the job is over.
        """
        meta = work.meta
        if inline.fits(meta, len(self.sets[work.key.set_id])):
            work.payload = self._pack(work)  # eager: small data travels with the request
        with self._lock:
            if self.failure is not None:
                raise HorovodInternalError(self.failure)
            if work.key in self._pending:
                raise ValueError(DUPLICATE_NAME)
            self._pending[work.key] = work
            known = self._cache.get(work.key)
            if known is not None and known[0] == meta:
                work.cache_id = known[1]
        if work.cache_id:
            self.control.send(0, ["hit", work.cache_id], work.payload)
        else:
            self.control.send(0, ["op", work.key, meta], work.payload)
        return work

    def ask(
        self, name: str, kind: str, data: Any = None, payload: bytes = b"", set_id: int = GLOBAL_SET
    ) -> Work:
        """Submit a request without tensors."""
        work = Work(Key(set_id, name), Meta(kind, data=data))
        work.payload = payload
        return self.submit(work)

    def join(self) -> Work:
        """Submit that this rank has no more data. The result is the last rank that joined."""
        with self._lock:
            if self.failure is not None:
                raise HorovodInternalError(self.failure)
            work = self._join_work = Work(Key(GLOBAL_SET, "join"), Meta("join"))
        self.control.send(0, ["join"])
        return work

    def lane(self, name: str, set_id: int) -> Lane:
        """Return the lane of this name; the first call makes it."""
        with self._lock:
            if name not in self.lanes:
                self.lanes[name] = Lane(self, name, set_id)
            return self.lanes[name]

    def all_lanes(self) -> list[Lane]:
        """Return the current lanes."""
        with self._lock:
            return list(self.lanes.values())

    def drop_lane(self, name: str, set_id: int) -> None:
        """Report that the optimizer of a lane is gone on this rank.

        The lane is removed once it is gone on all ranks: closing connections earlier would fail a
        peer that is still connecting. The garbage collector calls this, in any thread and under any
        lock, so it takes no lock: the control thread sends the report.
        """
        self._dropped.append((name, set_id))

    def shutdown(self) -> None:
        """Leave, which ends the operations of all ranks. Twice is safe."""
        if os.getpid() != self._pid:
            return  # a forked child: the engine belongs to its parent
        steps = {lane.name: lane.launched for lane in self.all_lanes()}
        self.control.send(0, ["bye", steps])
        if not self._closed.wait(_LEAVE_S):  # no "close" came: a peer hangs, or rank 0 is lost
            self._end(SHUT_DOWN)
        self.executor.close(_LEAVE_S)
        self.control.close()
        self.disconnect()
        self.timeline.close()
        _engines.discard(self)

    def disconnect(self) -> None:
        """Close the process groups' connections. Those of the control plane stay open."""
        for lane in self.all_lanes():
            lane.disconnect()
        self.groups.close()

    def set_timeline(self, timeline: Timeline) -> None:
        """Switch to another timeline, and close the one before."""
        before, self.timeline = self.timeline, timeline
        if self._coordinator is not None:
            self._coordinator.timeline = timeline
        before.close()

    def waits_in_vain(self, lane: str, step: int) -> bool:
        """Return whether a rank left before it had sent all buckets of this step of a lane."""
        return self._left_by is not None and self._left_by[1].get(lane, 0) < step

    def break_down(self, reason: str) -> None:
        """Report a failed connection to rank 0, which shuts all ranks down a moment later."""
        self.control.send(0, ["broken", f"{SHUT_DOWN} Rank {self.world.rank} said: {reason}"])

    def news(self, seconds: float) -> str | None:
        """Wait up to `seconds` for the reason why the job is over; return it, or None."""
        deadline = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.failure

    def _pack(self, work: Work) -> bytes:
        tensors = work.inputs
        if work.meta.prescale != 1.0:
            tensors = [scale_(t.detach().clone(), work.meta.prescale) for t in tensors]
        return inline.pack(tensors)

    def pin(self) -> None:
        """Bind the calling thread, one of the engine's, to this rank's HOROVOD_THREAD_AFFINITY."""
        cores, local_rank = self.settings.thread_affinity, self.world.local_rank
        if local_rank >= len(cores) or not hasattr(os, "sched_setaffinity"):
            return
        try:
            os.sched_setaffinity(0, {cores[local_rank]})  # 0 is this thread, not the process
        except (OSError, OverflowError, ValueError) as error:
            print_stderr(
                f"hvd: rank {self.world.rank}: HOROVOD_THREAD_AFFINITY: core {cores[local_rank]} "
                f"cannot be used ({error}); thread {threading.current_thread().name} is not bound"
            )

    def thread_failed(self, error: BaseException) -> None:
        """End the job because the current thread, one of the engine's, has failed.

        Nothing here may raise, because nothing else would release this process's waiting threads.
        """
        thread = threading.current_thread().name
        reason = f"{SHUT_DOWN} Rank {self.world.rank}'s thread {thread} failed: {error!r}"
        print_stderr("".join(traceback.format_exception(error)).rstrip())
        in_control = self.control.is_current_thread()
        with suppress(Exception):  # before a thread that `_end` releases can send "shutdown"
            if in_control and self._coordinator is not None:
                self._coordinator.go_down(reason, -1, {})
            else:
                self.control.send(0, ["failed", reason])
        self._end(reason)
        if in_control:  # no thread receives the answers that `shutdown` and the executor wait for
            self._closed.set()
            self.executor.put(lambda: self.executor.drain(False))

    # The control thread

    def _deliver(self, sender: int, header: list[Any], payload: bytes) -> None:
        what, *rest = header
        if what in _ANSWERS:
            _ANSWERS[what](self, rest, payload)
        elif self._coordinator is not None:
            self._coordinator.receive(sender, header, payload, time.monotonic())

    def _on_done(self, rest: list[Any], payload: bytes) -> None:
        key, cache_id, extra = Key(rest[0], rest[1]), rest[2], rest[3]
        work = self._take(key, cache_id)
        if key.name.startswith("plan."):  # also without a work: a joined rank adopts plans, too
            self._adopt_plan(key.name, extra)
        if work is None:
            return
        if work.meta.kind == "add_set":
            self.sets[extra] = list(work.meta.data)
        elif work.meta.kind == "remove_set":
            self.sets.pop(work.meta.data, None)
            for lane in self.all_lanes():
                if lane.set_id == work.meta.data:
                    self._let_go(lane.name)
        if payload or work.inputs:
            self._finish_inline(work, payload)
        else:
            work.finish(extra)

    def _finish_inline(self, work: Work, payload: bytes) -> None:
        try:
            work.finish(collectives.deliver(work, inline.unpack(payload, work.meta)))
        except RuntimeError as error:
            work.fail(HorovodInternalError(str(error)))

    def _on_run(self, rest: list[Any], payload: bytes) -> None:
        set_id, kind, entries, metas = rest
        works = [self._take(Key(set_id, name), cache_id) for name, cache_id, _ in entries]
        known = [w.meta if w is not None else None for w in works]
        if metas is not None:  # sent if ranks have joined, which have no requests of their own
            known = [Meta.from_wire(fields) for fields in metas]
        extras = [extra for _, _, extra in entries]
        members = self.sets[set_id]  # now: the set may be removed before the executor runs this
        self.executor.put(
            lambda: self.executor.run_batch(set_id, members, kind, works, known, extras)
        )

    def _on_error(self, rest: list[Any], payload: bytes) -> None:
        work = self._take(Key(rest[0], rest[1]), 0)
        if work is not None:
            work.fail(HorovodInternalError(rest[2]))

    def _on_again(self, rest: list[Any], payload: bytes) -> None:
        (cache_id,) = rest  # rank 0's cache has dropped it: send the full request
        with self._lock:
            works = [work for work in self._pending.values() if work.cache_id == cache_id]
            for key in [key for key, (_, known) in self._cache.items() if known == cache_id]:
                del self._cache[key]
        for work in works:
            self.control.send(0, ["anew", cache_id, work.key, work.meta], work.payload)

    def _on_joined(self, rest: list[Any], payload: bytes) -> None:
        with self._lock:
            work, self._join_work = self._join_work, None
            self.joins += 1
        if work is not None:
            work.finish(rest[0])

    def _on_shadow(self, rest: list[Any], payload: bytes) -> None:
        name, step = rest
        shadow = self.lane(name, GLOBAL_SET).shadow(step)
        self.executor.put(shadow)

    def _on_dropped(self, rest: list[Any], payload: bytes) -> None:
        self._let_go(rest[0])

    def _let_go(self, name: str) -> None:
        with self._lock:
            lane = self.lanes.pop(name, None)

        def drop() -> None:
            if lane is not None:
                lane.disconnect()
            self.groups.drop(f"lane/{name}")

        self.executor.put(drop)

    def _on_down(self, rest: list[Any], payload: bytes) -> None:
        reason, by, steps = rest
        if by >= 0:
            self._left_by = (by, steps)
            self._end(reason, graceful=True)
        else:
            self._end(reason)
        self.executor.put(lambda: self.executor.drain(by >= 0))

    def _on_close(self, rest: list[Any], payload: bytes) -> None:
        self._closed.set()

    def _take(self, key: Key, cache_id: int) -> Work | None:
        with self._lock:
            work = self._pending.pop(key, None)
            if work is not None and cache_id:
                self._cache[key] = (work.meta, cache_id)
                self._cache.move_to_end(key)
                if len(self._cache) > self.settings.cache_capacity:
                    self._cache.popitem(last=False)
        return work

    def _adopt_plan(self, name: str, fields: list[Any]) -> None:
        _, set_id, lane_name = name.split(".", 2)
        lane = self.lane(lane_name.rpartition("/")[0], int(set_id))
        lane.adopt(fields)
        self.executor.put(lane.connect)

    def _person(self, rank: int) -> str:
        person = self.people[rank]
        return f"process {person['pid']} on {person['host']}"

    def _lost(self, rank: int, why: str) -> None:
        who = self._person(rank)
        if self._coordinator is not None:
            self._coordinator.lose(rank, who, why)
        elif not self._closed.is_set():
            if self._left_by is None:  # else the loss of rank 0 is part of a graceful shutdown
                self._end(f"{SHUT_DOWN} Rank 0 ({who}) {why}.")
            self._closed.set()

    def _tick(self) -> None:
        while self._dropped:
            self.control.send(0, ["drop", *self._dropped.popleft()])
        if self._coordinator is not None:
            self._coordinator.tick(time.monotonic())
            self._stall.look(time.monotonic())

    def _end(self, reason: str, graceful: bool = False) -> None:
        """Fail all operations that have not begun; running ones may complete if `graceful`."""
        with self._lock:
            if self.failure is None:
                self.failure = reason
            if not graceful:
                self.broken = reason
            pending, self._pending = list(self._pending.values()), {}
            if self._join_work is not None:
                pending.append(self._join_work)
                self._join_work = None
        for work in pending:
            work.fail(HorovodInternalError(reason))


_ANSWERS: dict[str, Callable[[Engine, list[Any], bytes], None]] = {
    "done": Engine._on_done,
    "run": Engine._on_run,
    "error": Engine._on_error,
    "again": Engine._on_again,
    "joined": Engine._on_joined,
    "shadow": Engine._on_shadow,
    "dropped": Engine._on_dropped,
    "down": Engine._on_down,
    "close": Engine._on_close,
}


# A forked child, e.g. a DataLoader worker, closes its copies of the connections. It cannot use
# them, and would hold them open after its parent has died.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _in_child() -> None:
    for engine in list(_engines):
        engine.control.close_in_child()


os.register_at_fork(after_in_child=_in_child)
