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
from hvdtrain.hvd.engine.batch import RUN, Batch, give_zeros
from hvdtrain.hvd.engine.gpu import await_event
from hvdtrain.hvd.engine.operation import ADASUM, Operation
from hvdtrain.hvd.engine.process_groups import ConnectionBroken, is_refusal
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.liveness.failure import print_stderr

if TYPE_CHECKING:
    from hvdtrain.hvd.engine.engine import Engine


class Executor:
    """Runs one task after another. All ranks queue their tasks in the same order, so none waits for
    a task that a peer has queued behind another.
    """

    def __init__(self, job: Engine) -> None:
        self._job = job
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

    def run_batch(self, members: list[int], operations: list[Operation], extras: list[Any]) -> None:
        """Run operations of one kind together, and finish or fail them. A task. One without an
        owner was not submitted: this rank has joined.
        """
        job, own = self._job, [op for op in operations if op.owner is not None]
        request = operations[0].request
        kind, device = request.kind, request.device
        if self._failure:  # peers may still be in the batch that failed here: begin no other one
            _fail(own, job.failure(self._failure))
            return
        timeline, names = job.timeline, [op.key.name for op in own]
        begin_us = timeline.now_us()
        try:
            stream = self._gpu_stream(own) if device == "GPU" else None
            if request.op == ADASUM:
                device = "CPU"  # Adasum's exchanges between two ranks use host memory
            cuda = device == "GPU"
            group = job.process_groups.get(f"set{operations[0].key.set_id}", members, device)

            def wait(work: Any) -> None:
                job.process_groups.wait(work, cuda)

            with torch.cuda.stream(stream):
                for op in operations:
                    if op.owner is None:
                        give_zeros(op)
                if stream is not None:
                    _take_inputs(own, stream)
                me = members.index(job.world.rank)
                RUN[kind](Batch(group, members, me, operations, extras, wait))
        except ConnectionBroken as error:
            job.report_broken(str(error))
            _fail(own, job.failure(str(error)))
        except Exception as error:
            _fail(own, HorovodInternalError(str(error) or repr(error)))
            if not is_refusal(error) and len(members) > 1:
                # For example out of memory: the peers wait for this rank in the collective.
                listed = ", ".join(names[:3]) or "zeros, for a rank that has joined,"
                which = f"{kind} of {listed}{', ...' * (len(names) > 3)}"
                self._failure = f"{which} failed: {first_line(error)}"
                job.report_broken(self._failure)
        for name in names:
            activity = job.process_groups.activity(kind, device)
            timeline.ran(name, (kind.upper(), activity), begin_us)

    def await_streams(self) -> None:
        """Wait for what the GPUs have been given, unless the job is over."""
        with suppress(HorovodInternalError):
            for stream in self._streams.values():
                await_event(stream.query, lambda: self._job.abort_reason)

    def _gpu_stream(self, operations: list[Operation]) -> torch.cuda.Stream:
        """Select the GPU of the tensors, or on a rank that has joined the one used last; return the
        stream for operations on it.
        """
        devices = [op.inputs[0].device.index for op in operations if op.inputs]
        if devices:
            self._job.executor_gpu = devices[0]
        gpu = self._job.executor_gpu
        torch.cuda.set_device(gpu)
        if gpu not in self._streams:
            self._streams[gpu] = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
        return self._streams[gpu]

    def _run(self) -> None:
        job = self._job
        try:
            while (task := self._tasks.get()) is not None:
                try:
                    task()
                except Exception as error:
                    if job.shutdown_reason is None:
                        if not isinstance(error, ConnectionBroken):  # from connecting a channel
                            raise
                        print_stderr(f"hvd: rank {job.world.rank}: {error}")
                        job.report_broken(str(error))
                if job.world.rank == 0 and self._tasks.empty():
                    job.control.send(0, ["idle"])
        except BaseException as error:
            # No caller waits for this task in particular, so the whole job must fail.
            job.executor_failed(error)


def _take_inputs(operations: list[Operation], stream: torch.cuda.Stream) -> None:
    """Make a stream wait for the tensors, and keep their memory until it has used them."""
    for operation in operations:
        stream.wait_event(operation.submitted)
        for t in (*operation.inputs, *(operation.outputs or ())):
            t.record_stream(stream)


def _fail(operations: list[Operation], error: Exception) -> None:
    for operation in operations:
        operation.fail(error)
