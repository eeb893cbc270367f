"""One rank's side of the engine: the operations that it has submitted, and how they end.

`hvd.basics` holds one. Each rank sends requests to the coordinator on rank 0, and its control
thread handles the answers: an answer "run" in `_on_run`, and so on.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain import transports
from hvdtrain.errors import PeerLost, WorldError
from hvdtrain.hvd.engine import collectives, eager, stall
from hvdtrain.hvd.engine.arithmetic import scale_
from hvdtrain.hvd.engine.bucket_channel import BucketChannel
from hvdtrain.hvd.engine.bucket_plan import UNLIKE_ORDER, channel_of_plan, orders_differ
from hvdtrain.hvd.engine.coordinator import CONTROL_KINDS, Coordinator
from hvdtrain.hvd.engine.executor import Executor
from hvdtrain.hvd.engine.operation import Operation
from hvdtrain.hvd.engine.process_groups import ProcessGroups
from hvdtrain.hvd.engine.request import GLOBAL_SET, Key, Request
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.exceptions import SHUT_DOWN, HorovodInternalError
from hvdtrain.job.addresses import listen_addresses
from hvdtrain.job.store_exchange import await_ranks, poll_until
from hvdtrain.job.world import World
from hvdtrain.liveness.failure import print_stderr
from hvdtrain.liveness.peers import Peers

_FUSION_BYTES = 128 << 20
_CYCLE_S = 0.001  # Horovod's, in which it collects operations too
_LEAVE_S = 10.0
_FAILURE_WAIT_S = 3.0

DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another "
    "tensor that is currently being processed.  If you want to request another tensor, use a "
    "different tensor name."
)


class Engine:
    """The engine of one rank, from `hvd.init` to `hvd.shutdown`.

    Three threads use it: the caller's submits and waits, the control thread receives answers, the
    executor runs operations. `_lock` guards the submitted operations and the end of the job:
    `shutdown_reason` is why no operation begins any more, `abort_reason` why running ones cannot
    complete either.
    """

    def __init__(self, world: World, store: Store, settings: Settings, hello: dict[str, Any]):
        """Connect. Collective. Raises WorldError naming the ranks that did not arrive."""
        self.world = world
        self.settings = settings
        self.sets: dict[int, list[int]] = {GLOBAL_SET: list(range(world.size))}
        self.channels: dict[str, BucketChannel] = {}
        self._num_channels: dict[str, int] = {}  # made so far, by the parameters that they are for
        self.executor_gpu = 0  # also of the zeros of a rank that has joined
        self.joins = 0  # completed joins, which are part of automatic names
        self.shutdown_reason: str | None = None
        self.abort_reason: str | None = None
        self._final_steps: dict[str, int] | None = None  # of the rank that left, by channel
        self._pending: dict[Key, Operation] = {}
        self._dropped: deque[tuple[str, int]] = deque()
        self._unsent: list[Operation] = []  # of those, submitted and not sent to rank 0 yet
        # Reentrant: the garbage collector may run code that submits.
        self._lock, self._send_lock = threading.RLock(), threading.RLock()
        self._send_at = 0.0  # when to send them, if no caller waits for one before
        self.waits = 0  # how often a caller of this rank has begun to wait for a result
        self._join: Operation | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()
        limits = settings.gloo_timeout_s, settings.peer_limit_s
        self.control, store = connect_control(world, store, hello, *limits)
        self.store = store
        """The store of these ranks, with a key prefix of this engine."""
        self.rank_infos = self.control.members
        self.process_groups = ProcessGroups(
            store,
            world.rank,
            self._choose_transport(),
            settings.gloo_timeout_s,
            self._abort_reason,
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
                _FUSION_BYTES if fusion is None else fusion,
                self.control.send_all,
                self.timeline,
            )
            self._stall = stall.StallInspector(self._coordinator, settings, self._describe_rank)
        self.executor = Executor(self)
        self.control.start(
            self._receive, self._lost, self._tick, self.bind_to_core, self.thread_failed
        )

    def _choose_transport(self) -> str:
        """Return the transport of CPU tensors: rank 0's setting, or the best that all ranks have.

        It is computed from the same exchanged data on all ranks, so that all agree.
        """
        transport = str(self.rank_infos[0]["transport"])
        if transport != "auto":
            return transport
        no_shm, no_mpi = (
            next((info[lacks] for info in self.rank_infos if info[lacks]), None)
            for lacks in ("no_shm", "no_mpi")
        )
        one_host = len({info["host_id"] for info in self.rank_infos}) == 1
        return transports.best_on_cpu(self.world, one_host, no_shm, no_mpi)[0]

    # The caller's thread

    def submit(self, operation: Operation) -> Operation:
        """Submit an operation. Never blocks.

        It is sent at once if it is the only one, else together with those that follow: by the
        control thread, or as soon as a caller waits for one of them.

        Raises ValueError if the name is already pending, HorovodInternalError once the job is over.
        """
        request = operation.request
        if eager.fits(request, len(self.sets[operation.key.set_id])):
            operation.payload = self._pack(operation)  # eager: small data travels with the request
        with self._lock:
            if self.shutdown_reason is not None:
                raise HorovodInternalError(self.shutdown_reason, lost_peer=True)
            if operation.key in self._pending:
                raise ValueError(DUPLICATE_NAME)
            operation.before_wait, operation.abort_reason = self.before_wait, self._abort_reason
            is_only = not self._pending
            self._pending[operation.key] = operation
            self._unsent.append(operation)
            is_first = len(self._unsent) == 1
        if is_only:
            self.send_submitted()
        elif is_first:
            self._send_at = time.monotonic() + _CYCLE_S
            self.control.tick_within(_CYCLE_S)
        return operation

    def send_submitted(self) -> None:
        """Send to rank 0 what this rank has submitted. In any thread; never blocks."""
        with self._send_lock:  # messages that follow must not overtake it
            with self._lock:
                operations, self._unsent = self._unsent, []
            # Operations that differ in name only are one entry, unless one of these is between.
            entries: list[tuple[Operation, list[Operation]]] = []
            alike: dict[Any, list[Operation]] = {}
            for op in operations:
                if op.request.kind in CONTROL_KINDS:
                    alike = {}
                    entries.append((op, [op]))
                    continue
                key = (op.key.set_id, op.request, len(op.payload))
                if key not in alike:
                    alike[key] = []
                    entries.append((op, alike[key]))
                alike[key].append(op)
            if operations:
                header = [
                    [op.key.set_id, op.request, len(op.payload), [each.key.name for each in ops]]
                    for op, ops in entries
                ]
                payload = b"".join([op.payload for _, ops in entries for op in ops])
                self.control.send(0, ["ops", header], payload)

    def before_wait(self) -> None:
        """Record that a caller waits, and send to rank 0 what this rank has submitted."""
        self.waits += 1
        if self._unsent:
            self.send_submitted()

    def request(
        self, name: str, kind: str, data: Any = None, payload: bytes = b"", set_id: int = GLOBAL_SET
    ) -> Operation:
        """Submit a request without tensors."""
        operation = Operation(Key(set_id, name), Request(kind, data=data))
        operation.payload = payload
        return self.submit(operation)

    def join(self) -> Operation:
        """Submit that this rank has no more data. The result is the last rank that joined."""
        with self._lock:
            if self.shutdown_reason is not None:
                raise HorovodInternalError(self.shutdown_reason, lost_peer=True)
            operation = self._join = Operation(Key(GLOBAL_SET, "join"), Request("join"))
        self.send_submitted()
        self.control.send(0, ["join"])
        return operation

    def channel(self, name: str, set_id: int) -> BucketChannel:
        """Return the channel of this name; the first call makes it."""
        with self._lock:
            if name not in self.channels:
                kind, _, number = name.rpartition(".")
                self._num_channels[kind] = max(self._num_channels.get(kind, 0), int(number))
                self.channels[name] = BucketChannel(self, name, set_id)
            return self.channels[name]

    def claim_channel(self, kind: str, set_id: int, built: int) -> BucketChannel:
        """Return the channel of an optimizer that begins its first step: that of the next number.

        If this rank had joined when its peers began to use the optimizer, the channel exists
        already. `built`: the optimizer's number in `BUILT`. Raises HorovodInternalError if the
        peers' optimizer cannot be this one.
        """
        with self._lock:
            alike = [c for c in self.channels.values() if c.name.rpartition(".")[0] == kind]
            waiting = (c for c in alike if c.owner is None and c.made > built)
            channel = next(waiting, None)
            if channel is None:
                number = self._num_channels.get(kind, 0) + 1
                channel = self.channel(f"{kind}.{number}", set_id)
            channel.follows = {c.name: c.owner < built for c in alike if c.owner is not None}
            channel.owner = built
        if channel.plan is not None and orders_differ(channel.plan.follows, channel.follows):
            raise HorovodInternalError(UNLIKE_ORDER)
        return channel

    def all_channels(self) -> list[BucketChannel]:
        """Return the current channels."""
        with self._lock:
            return list(self.channels.values())

    def drop_channel(self, name: str, set_id: int) -> None:
        """Report that the optimizer of a channel was garbage-collected on this rank.

        The channel is removed once that is so on all ranks: closing connections earlier would fail
        a peer that is still connecting. The garbage collector calls this, in any thread and under
        any lock, so it takes no lock: the control thread sends the report.
        """
        self._dropped.append((name, set_id))

    def shutdown(self) -> None:
        """Leave, which ends the operations of all ranks. Twice is safe."""
        if os.getpid() != self._pid:
            return  # a forked child: the engine belongs to its parent
        steps = {channel.name: channel.last_sent_step for channel in self.all_channels()}
        self.send_submitted()
        self.control.send(0, ["leave", steps])
        if not self._closed.wait(_LEAVE_S):  # no "close" came: a peer hangs, or rank 0 is lost
            self._end(SHUT_DOWN)
        self.executor.close(_LEAVE_S)
        self.control.close()
        self.disconnect()
        self.timeline.close()

    def disconnect(self) -> None:
        """Close the process groups' connections. Those of the control plane stay open."""
        for channel in self.all_channels():
            channel.disconnect()
        self.process_groups.close()

    def set_timeline(self, timeline: Timeline) -> None:
        """Switch to another timeline, and close the one before."""
        before, self.timeline = self.timeline, timeline
        if self._coordinator is not None:
            self._coordinator.timeline = timeline
        before.close()

    def ready_us(self, channel: str, step: int, num_ranks: int) -> dict[int, int]:
        """Return when each rank has begun a step, for the timeline; {} on other ranks than 0.

        All have begun it; waits up to 1 s for the control thread to read the last one's message.
        """
        state = self._coordinator and self._coordinator.channels.get(channel)
        if not state:
            return {}
        for _ in poll_until(time.monotonic() + 1.0, 0.001):
            if len(found := dict(state.ready_us.get(step, {}))) >= num_ranks:
                break
        return found

    def peer_left_before(self, channel: str, step: int) -> bool:
        """Return whether a rank left before it had sent all buckets of this step of a channel."""
        steps = self._final_steps
        return steps is not None and steps.get(channel, 0) < step

    def _abort_reason(self) -> str | None:
        return self.abort_reason

    def report_broken(self, reason: str) -> None:
        """Report a failed connection to rank 0, which shuts all ranks down a moment later."""
        self.control.send(0, ["broken", f"{SHUT_DOWN} Rank {self.world.rank} reports: {reason}"])

    def failure(self, otherwise: str) -> HorovodInternalError:
        """Return an error of why the job is over; of `otherwise` if that is unknown within 3 s.

        After a broken connection: the control plane usually names the lost rank a moment later.
        """
        deadline = time.monotonic() + _FAILURE_WAIT_S
        while self.shutdown_reason is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return HorovodInternalError(self.shutdown_reason or otherwise, lost_peer=True)

    def _pack(self, operation: Operation) -> bytes:
        tensors = operation.inputs
        if operation.request.prescale != 1.0:
            tensors = [scale_(t.detach().clone(), operation.request.prescale) for t in tensors]
        return eager.pack(tensors)

    def bind_to_core(self) -> None:
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
                self._coordinator.shut_down(reason)
            else:
                self.control.send(0, ["failed", reason])
        self._end(reason)
        if in_control:  # no thread receives the answers that `shutdown` and the executor wait for
            self._closed.set()
            self.executor.put(lambda: self.executor.drain(False))

    # The control thread

    def _receive(self, sender: int, header: list[Any], payload: bytes) -> None:
        what, *rest = header
        handler = getattr(self, f"_on_{what}", None)
        if handler is not None:
            handler(rest, payload)
        elif self._coordinator is not None:
            self._coordinator.receive(sender, header, payload, time.monotonic())

    def _on_done(self, rest: list[Any], payload: bytes) -> None:
        set_id, names, extra = rest
        operations = [self._pop_pending(Key(set_id, name)) for name in names]
        if payload:
            self._finish_eager([op for op in operations if op is not None], payload)
            return
        # Also without an operation: a joined rank adopts plans, too.
        if (plan_of := channel_of_plan(names[0])) is not None:
            self._adopt_plan(*plan_of, extra)
        for operation in operations:
            if operation is None:
                continue
            if operation.request.kind == "add_set":
                self.sets[extra] = list(operation.request.data)
            elif operation.request.kind == "remove_set":
                self._remove_set(operation.request.data)
            if operation.inputs:  # tensors without elements
                self._finish_eager([operation], payload)
            else:
                operation.finish(extra)

    def _finish_eager(self, operations: list[Operation], payload: bytes) -> None:
        try:
            results = eager.unpack(payload, [op.request for op in operations])
        except RuntimeError as error:
            for operation in operations:
                operation.fail(HorovodInternalError(str(error)))
            return
        collectives.deliver_all(operations, results)

    def _on_run(self, rest: list[Any], payload: bytes) -> None:
        set_id, kind, entries, requests = rest
        operations = [self._pop_pending(Key(set_id, name)) for name, _ in entries]
        known = [op.request if op is not None else None for op in operations]
        if requests is not None:  # sent if ranks have joined, which have no requests of their own
            known = [Request.from_wire(fields) for fields in requests]
        extras = [extra for _, extra in entries]
        members = self.sets[set_id]  # now: the set may be removed before the executor runs this
        self.executor.put(
            lambda: self.executor.run_batch(set_id, members, kind, operations, known, extras)
        )

    def _on_error(self, rest: list[Any], payload: bytes) -> None:
        operation = self._pop_pending(Key(rest[0], rest[1]))
        if operation is not None:
            operation.fail(HorovodInternalError(rest[2]))

    def _on_joined(self, rest: list[Any], payload: bytes) -> None:
        with self._lock:
            operation, self._join = self._join, None
            self.joins += 1
        if operation is not None:
            operation.finish(rest[0])

    def _on_send_zeros(self, rest: list[Any], payload: bytes) -> None:
        name, step = rest
        self.executor.put(self.channel(name, GLOBAL_SET).zeros_task(step))

    def _on_dropped(self, rest: list[Any], payload: bytes) -> None:
        self._remove_channel(rest[0])

    def _remove_set(self, set_id: int) -> None:
        self.sets.pop(set_id, None)
        for channel in self.all_channels():
            if channel.set_id == set_id:
                self._remove_channel(channel.name)
        self.executor.put(lambda: self.process_groups.drop(f"set{set_id}"))

    def _remove_channel(self, name: str) -> None:
        with self._lock:
            channel = self.channels.pop(name, None)

        def drop() -> None:
            if channel is not None:
                channel.disconnect()
            self.process_groups.drop(f"channel/{name}")

        self.executor.put(drop)

    def _on_down(self, rest: list[Any], payload: bytes) -> None:
        reason, steps = rest
        graceful = steps is not None
        if graceful:
            self._final_steps = steps
        self._end(reason, graceful)
        self.executor.put(lambda: self.executor.drain(graceful))

    def _on_close(self, rest: list[Any], payload: bytes) -> None:
        self._closed.set()

    def _pop_pending(self, key: Key) -> Operation | None:
        with self._lock:
            return self._pending.pop(key, None)

    def _adopt_plan(self, set_id: int, name: str, fields: list[Any]) -> None:
        channel = self.channel(name, set_id)
        channel.adopt(fields)
        self.executor.put(channel.connect)

    def _describe_rank(self, rank: int) -> str:
        info = self.rank_infos[rank]
        return f"process {info['pid']} on {info['host']}"

    def _lost(self, rank: int, why: str) -> None:
        who = self._describe_rank(rank)
        if self._coordinator is not None:
            self._coordinator.report_lost(rank, who, why)
        elif not self._closed.is_set():
            if self._final_steps is None:  # else the loss of rank 0 is part of a graceful shutdown
                self._end(f"{SHUT_DOWN} Rank 0 ({who}) {why}.")
            self._closed.set()

    def _tick(self) -> None:
        if self._unsent and time.monotonic() >= self._send_at:
            self.send_submitted()
        while self._dropped:
            self.control.send(0, ["drop", *self._dropped.popleft()])
        if self._coordinator is not None:
            self._coordinator.tick(time.monotonic())
            self._stall.check(time.monotonic())

    def _end(self, reason: str, graceful: bool = False) -> None:
        """Fail all operations that have not begun; running ones may complete if `graceful`."""
        with self._lock:
            if self.shutdown_reason is None:
                self.shutdown_reason = reason
            if not graceful:
                self.abort_reason = reason
            pending, self._pending, self._unsent = list(self._pending.values()), {}, []
            if self._join is not None:
                pending.append(self._join)
                self._join = None
        for operation in pending:
            operation.fail(HorovodInternalError(reason, lost_peer=True))


def connect_control(
    world: World, store: Store, hello: dict[str, Any], timeout_s: float, limit_s: float = 0.0
) -> tuple[Peers, Store]:
    """Connect the control plane, a star around rank 0. Collective.

    Returns it, with every rank's `hello` as its `members`, and a store with a prefix of its own. A
    rank that is silent for `limit_s` seconds counts as lost; 0 means no limit. Raises WorldError
    naming the ranks that did not arrive.
    """
    deadline = time.monotonic() + timeout_s
    try:
        # An init that failed on some ranks only must leave nothing that could disturb the next.
        store = await_ranks(store, world, timeout_s, deadline)
        peers = Peers(
            PrefixStore("control", store),
            world.rank,
            world.size,
            hello,
            listen_addresses(world) if world.rank == 0 else [],
            max(1.0, deadline - time.monotonic()),
            limit_s=limit_s,
            thread_name="hvd-control",
        )
    except (PeerLost, DistError) as error:
        raise WorldError(f"{world} lost a rank in hvd.init: {error}") from None
    return peers, store
