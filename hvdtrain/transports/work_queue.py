"""The work queue of a process group: collectives that wait for their turn, and their results.

`process_group` uses it. One worker thread per group runs collectives in the order of their calls.
A caller that would only wait runs its collective itself if the queue is empty, which saves two
thread switches; a small one, whose tensor needs no preparation, without a `QueuedWork` (`run_now`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain._torch.dynamo import untraced_methods
from hvdtrain._torch.storage import storage_key
from hvdtrain.errors import PeerLost
from hvdtrain.transports.transport import Mismatch, TransportError

_FROM_CALLBACKS = (
    "if a hook of DDP calls collectives in callbacks, as PowerSGD and overlapping ZeRO do, "
    "use one bucket (bucket_cap_mb)"
)

# The storages that pending operations read or write, one entry per operation. One list for the
# process, because groups may share a storage. CPython's list.extend and .remove are atomic.
_in_use: list[int] = []
_in_use_now: list[int] = []  # for `run_now`: addresses of data, cheaper than keys of storages


class StorageUse:
    """Marks the storages of tensors as in use until `end`: they must not be moved meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # References keep the storages alive, so that no new storage gets the same key.
        self._storages = [t.untyped_storage() for t in tensors if not t.is_sparse]
        _in_use.extend([storage_key(storage) for storage in self._storages])

    def end(self) -> None:
        """Remove the marks. Twice is safe."""
        storages, self._storages = self._storages, []
        for storage in storages:
            _in_use.remove(storage_key(storage))

    __del__ = end


def is_in_use(t: Tensor) -> bool:
    """Return whether a pending operation reads or writes the tensor's storage."""
    storage = t.untyped_storage()
    if storage_key(storage) in _in_use:
        return True
    addresses = _in_use_now.copy()
    begin = storage.data_ptr() if addresses else 0
    return any(begin <= at < begin + storage.nbytes() for at in addresses)


_C10dWork: Any = dist.Work  # torch's stubs have overloads that no override in Python could have


@untraced_methods
class QueuedWork(_C10dWork):  # type: ignore[misc]
    """One pending collective. `wait` raises the error that it failed with.

    Callbacks of its future may run in the worker thread. If a callback waits for another
    collective, as PowerSGD's do, the worker runs that collective from within the wait.
    """

    def __init__(self, results: list[Tensor], tensors: list[Tensor], queue: WorkQueue) -> None:
        super().__init__()
        self._results = results
        self._use = StorageUse(tensors)
        self._queue = queue
        self._done = threading.Lock()
        self._done.acquire()
        self._future: Any = None
        self._guard = threading.Lock()
        self._completed = False
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Record the outcome and release all waiters. Called once."""
        self._use.end()
        with self._guard:
            self._error = error
            self._completed = True
            future = self._future
        self._done.release()
        if future is not None:
            future.set_result(self._results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for completion. Raises RuntimeError if that takes longer than `timeout`.

        Without one, the group's timeout limits the wait.
        """
        if not self._completed:
            self._queue.drain_to(self)
        seconds = timeout.total_seconds() if timeout is not None else 0
        if not self._done.acquire(timeout=seconds if seconds > 0 else -1):
            if not self._completed:
                raise TransportError("Operation timed out")  # Gloo's words
            self._done.acquire()
        self._done.release()
        if self._error is not None:
            raise self._error
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._completed

    def is_success(self) -> bool:
        """Return whether it has completed without an error."""
        return self._completed and self._error is None

    def exception(self) -> Any:
        """Return the error it failed with, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return self._results

    def get_future(self) -> Any:
        """Return a future of the result, which DDP uses instead of `wait`."""
        self._queue.has_futures = True
        if not self._completed:
            self._queue.drain_to(self)
        with self._guard:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._completed:
                    self._future.set_result(self._results)
            future = self._future
        # C++ code sees an exception that a callback raises, but not one set on the future.
        return future.then(self._checked)

    def _checked(self, future: Any) -> Any:
        if self._error is not None:
            raise self._error
        return future.value()


class WorkQueue:
    """The work queue of a group, and its worker thread, which runs collectives in order.

    `fail` is called after an unexpected error, when this rank may be out of step with its peers.
    """

    def __init__(self, name: str, fail: Callable[[], object]) -> None:
        self.name = name
        self._tasks: SimpleQueue[tuple[Callable[[], None], QueuedWork] | None] = SimpleQueue()
        # A signal handler may want them while its thread has them.
        self._turn, self._count = threading.RLock(), threading.RLock()
        self._pending = 0
        self._broken: PeerLost | None = None
        self._fail = fail
        self._thread: threading.Thread | None = None
        self._closed = False
        self.has_futures = False
        """Whether callbacks may call collectives, which they do at each rank's own time."""

    def put(
        self, run: Callable[[], None], results: list[Tensor], tensors: list[Tensor], wait: bool
    ) -> QueuedWork:
        """Queue `run`, which reads or writes `tensors`, and return its work, of the `results`.

        `wait`: the caller only waits, so if the queue is empty, run it here. Raises TransportError
        in a signal handler of a thread that runs one: each would wait for the other.
        """
        work = QueuedWork(results, tensors, self)
        if self._turn._is_owned():  # type: ignore[attr-defined]
            raise TransportError(
                "a signal handler called a collective while its thread was in another one; set a "
                "flag in the handler, and call the collective later"
            )
        with self._count:
            idle = self._pending == 0
            closed = self._closed
            self._pending += not closed
            if not closed and not (idle and wait):
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                    self._thread.start()
                self._tasks.put((run, work))
        if closed:
            work.finish(PeerLost("the group was closed before this collective"))
        elif idle and wait:
            self._execute(run, work)
        return work

    def run_now(self, address: int, run: Callable[..., None], *arguments: Any) -> bool:
        """Run a collective in the caller's thread; return False if it must be queued instead.

        It must be queued if others are pending. `address` is that of the tensor's data. Raises
        what the collective raises.
        """
        with self._count:
            if self._pending or self._closed:
                return False
            self._pending = 1
        _in_use_now.append(address)
        try:
            with self._turn:
                if self._broken is not None:
                    raise PeerLost(str(self._broken))
                run(*arguments)
        except BaseException as error:
            self._record(error)
            raise
        finally:
            _in_use_now.remove(address)
            with self._count:
                self._pending -= 1
        return True

    def drain_to(self, work: QueuedWork) -> None:
        """Drain the queue up to and including `work` if called in the worker thread itself."""
        if threading.current_thread() is not self._thread:
            return
        while not work.is_completed():
            if (task := self._tasks.get()) is None:
                self._tasks.put(None)  # the end marker is still needed, by `_run`
                return
            self._execute(*task)

    def close(self) -> None:
        """Stop the worker after the tasks queued so far. Does not wait: a task may hang."""
        with self._count:
            self._closed = True
            self._tasks.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the worker to end; return whether it has."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._execute(*task)
            del task  # release its tensors before waiting for the next task

    def _execute(self, run: Callable[[], None], work: QueuedWork) -> None:
        error: BaseException | None = None
        try:
            # An inference tensor can be written in inference mode only. Others must be written
            # outside it: Gloo replaces the indices and values of a sparse tensor, and a normal
            # tensor cannot hold parts that were made in inference mode.
            is_inference = any(t.is_inference() for t in work.result())
            with self._turn, torch.inference_mode(is_inference), torch.no_grad():
                if self._broken is not None:
                    raise PeerLost(str(self._broken))
                run()
        except BaseException as problem:
            error = problem
            if isinstance(error, Mismatch) and self.has_futures:
                error = Mismatch(f"{error}; {_FROM_CALLBACKS}")
            self._record(error)
        with self._count:
            self._pending -= 1
        work.finish(error)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _record(self, error: BaseException) -> None:
        """Decide from a collective's error whether the group can still be used."""
        if isinstance(error, PeerLost):
            self._broken = error
        elif not isinstance(error, (Mismatch, TransportError)):
            # An unexpected error or an interrupt: the peers may be at any point of this operation.
            self._broken = PeerLost(f"an earlier collective failed on this rank: {error!r}")
            self._fail()
