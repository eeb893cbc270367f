"""Operation: one submitted collective, from the call to its result. The API waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hvdtrain.hvd.engine.gpu import await_event, record_event, use_on_current_stream
from hvdtrain.hvd.engine.request import Key, Request

_lock = threading.Lock()  # guards the events of all operations


class Operation:
    """A pending or completed operation. `wait` and `done` may be called from any thread.

    `inputs` are the caller's tensors, contiguous; `outputs` are the tensors to write, or None if
    the operation makes its own.
    """

    def __init__(
        self,
        key: Key,
        request: Request,
        inputs: list[Tensor] | None = None,
        outputs: list[Tensor] | None = None,
    ) -> None:
        self.key = key
        self.request = request
        self.inputs = inputs or []
        self.outputs = outputs
        self.payload = b""
        self.extra: Any = None  # the numbers of rows that an allgather or alltoall has received
        self.result: Any = None
        self.error: Exception | None = None
        self.before_wait: Callable[[], None] = lambda: None
        """Sends to rank 0 what this rank has submitted and not sent yet."""
        self.abort_reason: Callable[[], str | None] = lambda: None
        """Returns why the job is over, so that a GPU may never complete this; else None."""
        # On a GPU: when its inputs are there, and when its result is.
        self.submitted = record_event(self.inputs[0].device) if request.device == "GPU" else None
        self._finished: Any = None
        self._is_over = False
        self._event: threading.Event | None = None  # made by the first that has to wait

    def finish(self, result: Any) -> None:
        """Store the result, which on a GPU is complete once the current stream gets here."""
        self.result = result
        if self.submitted is not None:
            self._finished = record_event(self.inputs[0].device)
        self._end()

    def fail(self, error: Exception) -> None:
        """Complete with an error, unless completed already."""
        if not self._is_over:
            self.error = error
            self._end()

    def _end(self) -> None:
        self._is_over = True
        with _lock:
            event = self._event
        if event is not None:
            event.set()

    def done(self) -> bool:
        """Return whether the result, or an error, is available."""
        if not self._is_over:
            return False
        return self._finished is None or bool(self._finished.query())

    def wait(self) -> Any:
        """Wait until the result is complete, also on a GPU, and return it.

        Raises the error that the operation failed with; HorovodInternalError if the job is over
        before a GPU has completed it.
        """
        self.before_wait()
        if not self._is_over:
            with _lock:
                self._event = self._event or threading.Event()
            if not self._is_over:
                self._event.wait()
        if self.error is not None:
            raise self.error
        if self._finished is not None:
            await_event(self._finished.query, self.abort_reason)
            use_on_current_stream(self.result)
        return self.result
