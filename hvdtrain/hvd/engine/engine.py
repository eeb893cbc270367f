"""One rank's side of the engine: the operations that it has submitted, and how they end.

`hvd.basics` holds one. Each rank sends requests to the coordinator on rank 0, and its control
thread handles the answers: an answer "run" in `_on_run`, and so on.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain import transports
from hvdtrain.errors import PeerLost, WorldError
from hvdtrain.hvd.engine import stall
from hvdtrain.hvd.engine.batch import copy_in, finish_batch, from_bytes, split_like, to_bytes
from hvdtrain.hvd.engine.coordinator import Coordinator
from hvdtrain.hvd.engine.executor import Executor
from hvdtrain.hvd.engine.operation import GLOBAL_SET, Key, Operation, Request, dtype_of
from hvdtrain.hvd.engine.process_groups import ProcessGroups
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.engine.slots import Names, runs_of
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.exceptions import SHUT_DOWN, HorovodInternalError
from hvdtrain.job.addresses import listen_addresses
from hvdtrain.job.store_exchange import await_ranks
from hvdtrain.job.world import World
from hvdtrain.liveness.failure import print_stderr
from hvdtrain.liveness.peers import Peers

_FUSION_BYTES = 128 << 20
_CYCLE_S = 0.001  # Horovod's, in which it collects operations too
_SUBMITTING_S = 0.008  # in which a caller that goes on submitting is not interrupted
_LOOP_S = 0.1  # the same for a caller that submits more than so many between two looks
_MANY = 100
_LEAVE_S = 10.0
_FAILURE_WAIT_S = 3.0
_TIMELINE_WAIT_S = 1.0  # the executor may be waiting for a peer

DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another "
    "tensor that is currently being processed.  If you want to request another tensor, use a "
    "different tensor name."
)


class Engine:
    """The engine of one rank, from `hvd.init` to `hvd.shutdown`.

    Three threads use it: the caller's submits and waits, the control thread receives answers, the
    executor runs operations. `lock` guards the submitted operations and the end of the job.
    `shutdown_reason` is why no operation begins any more, `abort_reason` why running ones cannot
    complete either.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        settings: Settings,
        hello: dict[str, Any],
        make_channels: Callable[[Engine], Any],
    ) -> None:
        """Connect. Collective. Raises WorldError naming the ranks that did not arrive."""
        self.world, self.settings = world, settings
        limits = settings.gloo_timeout_s, settings.peer_limit_s
        self.control, self.store = connect_control(world, store, hello, *limits)
        self.executor_gpu = 0  # also of the zeros of a rank that has joined
        self.shutdown_reason: str | None = None
        self.abort_reason: str | None = None
        self.final_steps: dict[str, int] | None = None  # of the rank that left, by channel
        self.rank_infos = self.control.members
        self.sets: dict[int, list[int]] = {GLOBAL_SET: list(range(world.size))}
        self.joins = 0  # completed joins, which are part of automatic names
        self.waits = 0  # how often a caller of this rank has begun to wait for a result
        # Reentrant: the garbage collector may run code that submits.
        self.lock, self._send_lock = threading.RLock(), threading.RLock()
        self.handles: dict[int, Operation] = {}  # which nobody has waited for yet
        self._next_handle, self._num_sets = itertools.count(), itertools.count(1)
        self.batch_norms = itertools.count()  # numbers `SyncBatchNorm` layers that communicate
        # Numbers of unnamed operations, by process set and kind. Only accepted calls count, so a
        # rank that is not in a set, or whose call raised, uses the same numbers as the others.
        self._num_unnamed: Counter[tuple[int, str]] = Counter()
        self.names = Names(self.lock)
        self._pending: set[Operation] = set()  # submitted, and neither complete nor running
        self._unsent: list[Operation] = []  # of those, not sent to rank 0 yet
        self._seen_unsent = 0  # how many these were when the control thread last looked
        self._send_at = 0.0  # when to send them, if no caller waits or adds more before
        self._dropped: deque[tuple[str, int]] = deque()
        self._closed = threading.Event()
        self._pid = os.getpid()
        self.process_groups = ProcessGroups(
            self.store,
            world.rank,
            self._choose_transport(),
            settings.gloo_timeout_s,
            lambda: self.abort_reason,
            settings.peer_limit_s,
        )
        # Opened before any rank can submit an operation, so that it contains the first one.
        recorded = settings.timeline if world.rank == 0 and settings.timeline != "DYNAMIC" else None
        self.timeline = Timeline(recorded, settings.timeline_mark_cycles)
        self.channels = make_channels(self)  # of the optimizers' buckets: `gradients.channel`
        self._coordinator: Coordinator | None = None
        if world.rank == 0:
            fusion = settings.fusion_threshold
            self._coordinator = Coordinator(
                world.size,
                _FUSION_BYTES if fusion is None else fusion,
                self.control.send_all,
                self.timeline,
            )
            self._stall = stall.StallInspector(
                self._coordinator, settings, self._describe_rank, self.channels.tensors
            )
        self.executor = Executor(self)
        self.control.start(self._receive, self._lost, self._tick, on_failure=self.thread_failed)

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

    def submit(self, operation: Operation, unnamed: str = "") -> Operation:
        """Submit an operation. Waits at most for an earlier one of this name to finish: see
        `Operation.frees_name`.

        It is sent at once if it is the only one, else together with those that follow: by the
        control thread after 1 ms without another one, or as soon as a caller waits for one of them.
        `unnamed`: it has no name, but gets the next number of its process set and of this kind.

        Raises ValueError while an earlier operation has the name, HorovodInternalError once the job
        is over.
        """
        with self.lock:
            self.check_running()
            if unnamed:
                number = operation.key.set_id, unnamed
                # Joins restart the count.
                again = [self.joins] if self.joins and number[0] == GLOBAL_SET else []
                counts = "noname", *again, self._num_unnamed[number]
                operation.own_name = ".".join(map(str, counts))
                operation.key = Key(number[0], f"{unnamed}.{operation.own_name}")
            earlier = self.names.hold(operation)
            if earlier is None:
                operation.owner = self
                operation.waits = self.waits
                is_only, is_first = not self._pending, not self._unsent
                self._pending.add(operation)
                self._unsent.append(operation)
                if unnamed:
                    self._num_unnamed[number] += 1
        # Without the lock: a thread that sends takes it after `_send_lock`.
        if earlier is not None:
            if operation.own_name is None or not earlier.frees_name():
                raise ValueError(DUPLICATE_NAME)
            self.names.free(earlier)
            return self.submit(operation, unnamed)
        if is_only:
            self.send_submitted()
        elif is_first:
            self._send_at = time.monotonic() + _CYCLE_S
            self.control.tick_within(_CYCLE_S)
        return operation

    def submit_call(self, operation: Operation, unnamed: str = "") -> int:
        """Submit the operation of a caller, and return its handle."""
        handle = next(self._next_handle)
        self.handles[handle] = self.submit(operation, unnamed)
        return handle

    def send_submitted(self) -> None:
        """Send to rank 0 what this rank has submitted. In any thread; never blocks."""
        if not self._unsent:
            return
        by_table: defaultdict[int | None, list[tuple[int, Operation]]] = defaultdict(list)
        with self._send_lock:  # messages that follow must not overtake it
            with self.lock:
                operations, self._unsent = self._unsent, []
                self._seen_unsent = 0
                for op in operations:
                    # By name if the slot was forgotten since the caller found it.
                    agreed = op.request is op.name.request
                    table, number = op.name.slot if agreed else (None, 0)
                    by_table[table].append((number, op))
            by_name = [op for _, op in by_table.pop(None, ())]
            for table, ops in by_table.items():
                ops.sort()
                runs = runs_of(number for number, _ in ops)
                self.control.send(0, ["slots", table, runs], _data_of([op for _, op in ops]))
            if by_name:
                self._send_names(by_name)

    def _send_names(self, operations: list[Operation]) -> None:
        # Operations in a row that differ in name only are one entry.
        header, payload = [], []
        for (set_id, request), found in itertools.groupby(
            operations, lambda op: (op.key.set_id, op.request)
        ):
            ops = list(found)
            is_eager = request.is_eager(len(self.sets.get(set_id, ())))
            data = _data_of(ops) if is_eager else ops[0].payload
            header.append([set_id, request, len(data) // len(ops), [op.key.name for op in ops]])
            payload.append(data)
        self.control.send(0, ["ops", header], b"".join(payload))

    def request(
        self, name: str, kind: str, data: Any = None, payload: bytes = b"", set_id: int = GLOBAL_SET
    ) -> Operation:
        """Submit a request without tensors."""
        operation = Operation(Key(set_id, name), Request(kind, data=data))
        operation.payload = payload
        return self.submit(operation)

    def next_set_name(self) -> str:
        """Return the name of the next request for a process set, equal on all ranks."""
        return f"process_set.{next(self._num_sets)}"

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
        self.send_submitted()
        self.control.send(0, ["leave", self.channels.sent_steps()])
        if not self._closed.wait(_LEAVE_S):  # no "close" came: a peer hangs, or rank 0 is lost
            self._end(SHUT_DOWN)
        self.executor.close(_LEAVE_S)
        self.control.close()
        self.disconnect()
        self.timeline.close()

    def disconnect(self) -> None:
        """Close the process groups' connections. Those of the control plane stay open."""
        self.channels.disconnect()
        self.process_groups.drop()

    def set_timeline(self, timeline: Timeline) -> None:
        """Switch to another timeline, and close the one before."""
        before, self.timeline = self.timeline, timeline
        if self._coordinator is not None:
            self._coordinator.timeline = timeline
        if before.is_open:  # the executor records an operation after its caller has the result
            recorded = threading.Event()
            self.executor.put(recorded.set)
            recorded.wait(_TIMELINE_WAIT_S)
        before.close()

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
            self.executor.put(lambda: self._drain(False))

    def executor_failed(self, error: BaseException) -> None:
        """End the job: no caller waits for the executor's task in particular."""
        self.thread_failed(error)
        with suppress(Exception):
            self._drain(graceful=False)  # the queued task will not run

    def _drain(self, graceful: bool) -> None:
        """Complete what all ranks have begun if `graceful`, else close the connections, so that the
        operations of a peer that waits for this rank's data fail, too. The executor's last task.
        """
        if graceful:
            self.channels.drain()
            self.executor.await_streams()
        else:
            self.disconnect()
        self.control.send(0, ["drained"])

    # The end of the job

    def peer_left_before(self, channel: str, step: int) -> bool:
        """Return whether a rank left before it had sent all buckets of this step of a channel."""
        return self.final_steps is not None and self.final_steps.get(channel, 0) < step

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

    def check_running(self) -> None:
        """Raise HorovodInternalError if no operation begins any more."""
        if self.shutdown_reason is not None:
            raise HorovodInternalError(self.shutdown_reason, lost_peer=True)

    # The control thread

    def _receive(self, sender: int, header: list[Any], payload: bytes) -> None:
        handler = getattr(self, f"_on_{header[0]}", None)
        if handler is not None:
            handler(payload, *header[1:])
        elif self._coordinator is not None:
            self._coordinator.receive(sender, header, payload, time.monotonic())

    def _on_reduced(self, data: bytes, set_id: int, names: list[str], agreed: Any) -> None:
        with self.lock:
            taken = [self._take(Key(set_id, name)) for name in names]
            operations = [op for op in taken if op is not None]
            if not operations:
                return  # the job has ended here
            self.names.learn(operations, agreed)
        flat = from_bytes(data, dtype_of(operations[0].request.dtypes[0]))
        finish_batch(operations, split_like(flat, [t for op in operations for t in op.inputs]))

    def _on_sums(self, data: bytes, table: int, runs: list[list[int]]) -> None:
        with self.lock:
            if self.shutdown_reason is not None:
                return
            results = self.names.tables[table]
            operations: list[Any] = [name.operation for name in results.slots_of(runs)]
            self._pending.difference_update(operations)
        finish_batch(operations, results.load(runs, data))

    def _on_done(self, _: bytes, set_id: int, name: str, extra: Any) -> None:
        operation = self._take(Key(set_id, name))
        if operation is None:
            return
        if operation.request.kind == "add_set":
            self.sets[extra] = list(operation.request.data)
        elif operation.request.kind == "remove_set":
            self._remove_set(operation.request.data)
        operation.finish(extra)

    def _on_exchanged(self, _: bytes, set_id: int, name: str, texts: list[str]) -> None:
        problem = self.channels.adopt(set_id, name, texts)  # also on a rank that has joined
        if problem is not None:
            self._on_error(b"", set_id, name, problem)
        elif (operation := self._take(Key(set_id, name))) is not None:
            operation.finish(None)

    def _on_run(self, _: bytes, set_id: int, entries: list[Any]) -> None:
        if self.shutdown_reason is not None:
            return  # this rank has failed
        # The request is sent if ranks have joined, which have no operation of their own.
        operations = [
            self._take(key := Key(set_id, name)) or Operation(key, Request.from_wire(request))
            for name, _, request in entries
        ]
        extras = [extra for _, extra, _ in entries]
        members = self.sets[set_id]  # now: the set may be removed before the executor runs this
        self.executor.put(lambda: self.executor.run_batch(members, operations, extras))

    def _on_error(self, _: bytes, set_id: int, name: str, text: str) -> None:
        operation = self._take(Key(set_id, name))
        if operation is not None:
            operation.fail(HorovodInternalError(text))

    def _on_joined(self, _: bytes, last_rank: int) -> None:
        with self.lock:
            operation = self._take(Key(GLOBAL_SET, "join"))
            self.joins += 1
            self.names.forget(GLOBAL_SET)
            # A rank that joined early has made fewer calls than others.
            for number in [n for n in self._num_unnamed if n[0] == GLOBAL_SET]:
                del self._num_unnamed[number]
        if operation is not None:
            operation.finish(last_rank)

    def _on_send_zeros(self, _: bytes, channel: str, step: int) -> None:
        self.channels.send_zeros(channel, step)

    def _on_dropped(self, _: bytes, channel: str) -> None:
        self.channels.remove(lambda name, set_id: name == channel)

    def _remove_set(self, number: int) -> None:
        self.sets.pop(number, None)
        with self.lock:
            self.names.forget(number)
        self.channels.remove(lambda name, set_id: set_id == number)
        self.executor.put(lambda: self.process_groups.drop(f"set{number}"))

    def _on_down(self, _: bytes, reason: str, steps: dict[str, int] | None) -> None:
        graceful = steps is not None
        if graceful:
            self.final_steps = steps
        self._end(reason, graceful)
        self.executor.put(lambda: self._drain(graceful))

    def _on_close(self, _: bytes) -> None:
        self._closed.set()

    def _take(self, key: Key) -> Operation | None:
        """Return the operation that is pending under a name, and is not from now on."""
        with self.lock:
            operation = self.names.find(key).operation
            if operation is None or operation not in self._pending:
                return None
            self._pending.remove(operation)
            if operation.own_name is None:
                self.names.free(operation)
            return operation

    def _describe_rank(self, rank: int) -> str:
        info = self.rank_infos[rank]
        return f"process {info['pid']} on {info['host']}"

    def _lost(self, rank: int, why: str) -> None:
        who = self._describe_rank(rank)
        if self._coordinator is not None:
            self._coordinator.report_lost(rank, who, why)
        elif not self._closed.is_set():
            if self.final_steps is None:  # else the loss of rank 0 is part of a graceful shutdown
                self._end(f"{SHUT_DOWN} Rank 0 ({who}) {why}.")
            self._closed.set()

    def _tick(self) -> None:
        if self._unsent:
            now, grown = time.monotonic(), len(self._unsent) - self._seen_unsent
            self._seen_unsent += grown
            limit_s = _LOOP_S if grown > _MANY else _SUBMITTING_S
            if grown > 0 and now < self._send_at + limit_s:
                # A caller is at it, which this thread would only interrupt; or it has sent those
                # before, so that this one is not due yet.
                self.control.tick_within(max(_CYCLE_S, 2 * (now - self._send_at)))
            else:
                self.send_submitted()
        while self._dropped:
            self.control.send(0, ["drop", *self._dropped.popleft()])
        if self._coordinator is not None:
            self._coordinator.tick(time.monotonic())
            self._stall.check(time.monotonic())

    def _end(self, reason: str, graceful: bool = False) -> None:
        """Fail all operations that have not begun; running ones may complete if `graceful`."""
        with self.lock:
            if self.shutdown_reason is None:
                self.shutdown_reason = reason
            if not graceful:
                self.abort_reason = reason
            pending, self._pending, self._unsent = self._pending, set(), []
        for operation in pending:
            operation.fail(HorovodInternalError(reason, lost_peer=True))


def _data_of(operations: list[Operation]) -> bytes:
    """Return the small data of operations that are reduced alike."""
    tensors = [*itertools.chain.from_iterable(op.inputs for op in operations)]
    return to_bytes(copy_in(tensors, operations[0].request.prescale)) if tensors else b""


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
