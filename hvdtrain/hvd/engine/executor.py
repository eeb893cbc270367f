"""The executor: the thread that runs operations, in rank 0's order, once all ranks submitted them.

Each rank's engine has one. Because the order is the same everywhere, collectives cannot deadlock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.errors import first_line
from hvdtrain.hvd.engine import collectives
from hvdtrain.hvd.engine.gpu import await_event
from hvdtrain.hvd.engine.operation import Operation
from hvdtrain.hvd.engine.process_groups import ConnectionBroken, is_refusal
from hvdtrain.hvd.engine.request import ADASUM
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.liveness.failure import print_stderr

if TYPE_CHECKING:
    from hvdtrain.hvd.engine.engine import Engine


class Executor:
    """Runs one task after another. All ranks queue their tasks in the same order, so none waits for
    a task that a peer has queued behind another.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[int, torch.cuda.Stream] = {}  # for operations on each GPU
        self._failure = ""  # of a batch that failed on this rank, perhaps not on its peers
        self._thread = threading.Thread(target=self._run, name="hvd-executor", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Queue a task. Callable in any thread."""
        self._tasks.put(task)

    def close(self, timeout_s: float) -> None:
        """Stop the thread after the tasks queued so far; wait up to `timeout_s` for that."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def run_batch(
        self,
        set_id: int,
        members: list[int],
        kind: str,
        operations: list[Operation | None],
        requests: list[Any],
        extras: list[Any],
    ) -> None:
        """Run operations of one kind together, and finish or fail them. A task."""
        engine = self._engine
        if self._failure:  # peers may still be in the batch that failed here: begin no other one
            _fail(operations, engine.failure(self._failure))
            return
        timeline, names = engine.timeline, [op.key.name for op in operations if op is not None]
        for name in names:
            timeline.start(name, kind)
        try:
            device = requests[0].device
            stream = self._gpu_stream(operations) if device == "GPU" else None
            if requests[0].op == ADASUM:
                device = "CPU"  # Adasum's exchanges between two ranks use host memory
            cuda = device == "GPU"
            group = engine.process_groups.get(f"set{set_id}", members, device)

            def wait(work: Any) -> None:
                engine.process_groups.wait(work, cuda)

            rank = engine.world.rank
            batch = collectives.Batch(group, members, rank, operations, requests, extras, wait)
            for name in names:
                timeline.activity_start(name, engine.process_groups.activity(kind, device))
            with torch.cuda.stream(stream):
                if stream is not None:
                    _take_inputs(operations, stream)
                collectives.RUN[kind](batch)
        except ConnectionBroken as error:
            engine.report_broken(str(error))
            _fail(operations, engine.failure(str(error)))
        except Exception as error:
            _fail(operations, HorovodInternalError(str(error) or repr(error)))
            if not is_refusal(error) and len(members) > 1:
                # For example out of memory: the peers wait for this rank in the collective.
                listed = ", ".join(names[:3]) or "zeros, for a rank that has joined,"
                which = f"{kind} of {listed}{', ...' * (len(names) > 3)}"
                self._failure = f"{which} failed: {first_line(error)}"
                engine.report_broken(self._failure)
        for name in names:
            timeline.end(name)

    def drain(self, graceful: bool) -> None:
        """Complete what all ranks have begun if `graceful`, else close the connections.

        A task, the last one before shutdown.
        """
        if graceful:
            for channel in self._engine.all_channels():
                channel.drain()
            with suppress(HorovodInternalError):
                for stream in self._streams.values():
                    await_event(stream.query, lambda: self._engine.abort_reason)
        else:
            # So that the operations of a peer that waits for this rank's data fail, too.
            self._engine.disconnect()
        self._engine.control.send(0, ["drained"])

    def _gpu_stream(self, operations: list[Operation | None]) -> torch.cuda.Stream:
        """Select the GPU of the tensors, or on a rank that has joined the one used last; return the
        stream for operations on it.
        """
        devices = [op.inputs[0].device.index for op in operations if op and op.inputs]
        if devices:
            self._engine.executor_gpu = devices[0]
        gpu = self._engine.executor_gpu
        torch.cuda.set_device(gpu)
        if gpu not in self._streams:
            self._streams[gpu] = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
        return self._streams[gpu]

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            # No caller waits for this task in particular, so the whole job must fail.
            self._engine.thread_failed(error)
            with suppress(Exception):
                self.drain(graceful=False)  # the queued drain task will not run

    def _loop(self) -> None:
        engine = self._engine
        engine.bind_to_core()
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except ConnectionBroken as error:  # from connecting a channel
                if engine.shutdown_reason is None:
                    print_stderr(f"hvd: rank {engine.world.rank}: {error}")
                    engine.report_broken(str(error))
            except Exception:
                if engine.shutdown_reason is None:
                    raise
            if engine.world.rank == 0 and self._tasks.empty():
                engine.control.send(0, ["idle"])


def _take_inputs(operations: list[Operation | None], stream: torch.cuda.Stream) -> None:
    """Make a stream wait for the tensors, and keep their memory until it has used them."""
    for operation in operations:
        if operation is not None and operation.submitted is not None:
            stream.wait_event(operation.submitted)
            for t in (*operation.inputs, *(operation.outputs or ())):
                t.record_stream(stream)


def _fail(operations: list[Operation | None], error: Exception) -> None:
    for operation in operations:
        if operation is not None:
            operation.fail(error)
