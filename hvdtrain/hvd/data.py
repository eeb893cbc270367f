"""Horovod's `horovod.data`: a batch loader, and a mixin that prefetches batches in a thread.

For scripts; nothing in hvdtrain uses it. The thread reads the next epoch while the script still
computes the current one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

_LOG = logging.getLogger("hvdtrain")
_CHECK_S = 0.2  # how often `close_async_loader` checks whether the thread has ended
_ENDED = "the data loader is closed or has failed"


class BaseDataLoader:
    """Yields the batches of `_iterate`, each passed through `_process_batch`."""

    def __len__(self) -> int:
        """Return the number of batches. To be overridden."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the raw batches of one epoch. To be overridden."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return a batch in the form that training needs. May be overridden."""
        return batch


class AsyncDataLoaderMixin:
    """Prefetches batches in a thread: `class Loader(AsyncDataLoaderMixin, SomeLoader)`.

    The queue holds at most `async_loader_queue_size` batches; 0 disables the thread. The iteration
    raises an exception of `_iterate`. `debug_data_loader` logs the queue's length at every batch.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.started = False
        if async_loader_queue_size > 0:
            self.finished_event = Event()
            self.queue: Queue[Any] = Queue(async_loader_queue_size)
            self.thread = Thread(target=self._async_worker, name="hvd-data", daemon=True)

    def close_async_loader(self) -> None:
        """Stop the thread and drop the prefetched batches. Safe to call twice."""
        if not self.started:
            return
        self.finished_event.set()
        # The thread may wait for room in the queue, before it sees that it is to end.
        while self.thread.is_alive() or not self.queue.empty():
            with suppress(Empty):
                self.queue.get(timeout=_CHECK_S)
        self.queue.put(RuntimeError(_ENDED))

    def _async_worker(self) -> None:
        """Read epoch after epoch into the queue; None marks the end of each."""
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if self.finished_event.is_set():
                        return
                    self.queue.put(batch)
                    if self.debug_data_loader:
                        _LOG.warning("data loader: batches prefetched: %d", self.queue.qsize())
                self.queue.put(None)
        except Exception as error:
            self.queue.put(error)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch. Raises RuntimeError once the loader is closed."""
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self.queue.get()) is not None:
            if isinstance(batch, Exception):
                self.queue.put(RuntimeError(_ENDED))  # for later iterations
                raise batch
            yield self._process_batch(batch)  # type: ignore[attr-defined]
