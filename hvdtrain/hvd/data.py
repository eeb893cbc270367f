"""Horovod's `horovod.data`: a batch loader, and a mixin that prefetches batches in a thread.

For scripts; nothing in hvdtrain uses it. The thread reads the next epoch while the script still
computes the current one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

_LOG = logging.getLogger("hvdtrain")
_CHECK_S = 0.2  # how often a blocked thread checks whether the loader is closed


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
        while self.thread.is_alive():
            self._drop_all()
            self.thread.join(_CHECK_S)
        self._drop_all()

    def _drop_all(self) -> None:
        try:
            while True:
                self.queue.get_nowait()
        except Empty:
            pass

    def _async_worker(self) -> None:
        """Read epoch after epoch into the queue; None marks the end of each."""
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if not self._put(batch):
                        return
                self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: Any) -> bool:
        """Put an item into the queue. Return False if the loader is closed first."""
        while not self.finished_event.is_set():
            try:
                self.queue.put(item, timeout=_CHECK_S)
            except Full:
                continue
            if self.debug_data_loader:
                _LOG.warning("data loader: %d batches are prefetched", self.queue.qsize())
            return True
        return False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():  # type: ignore[attr-defined]
                yield self._process_batch(batch)  # type: ignore[attr-defined]
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self._get()) is not None:
            yield self._process_batch(batch)  # type: ignore[attr-defined]

    def _get(self) -> Any:
        """Return the next item. Raises the exception of `_iterate`, or RuntimeError once closed."""
        while True:
            try:
                item = self.queue.get(timeout=_CHECK_S)
            except Empty:
                if self.thread.is_alive():
                    continue
                # The thread may have put its last item after the timeout, so check once more.
                if self.queue.empty():
                    raise RuntimeError("the data loader is closed, or has failed before") from None
                continue
            if isinstance(item, Exception):
                raise item
            return item
