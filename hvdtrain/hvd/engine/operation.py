"""Operation: one submitted collective, from the call to its result. The API waits for it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.engine.request import Key, Request


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
        self.cache_id = 0  # the number sent in place of the full request; 0: the request was sent
        self.extra: Any = None  # the numbers of rows that an allgather or alltoall has received
        self.result: Any = None
        self.error: Exception | None = None
        self.submitted = _event() if request.device == "GPU" else None
        self._finished: Any = None
        self._event = threading.Event()

    def finish(self, result: Any) -> None:
        """Store the result, which on CUDA is complete once the current stream gets here."""
        self.result = result
        if self.submitted is not None:
            self._finished = _event()
        self._event.set()

    def fail(self, error: Exception) -> None:
        """Complete with an error, unless completed already."""
        if not self._event.is_set():
            self.error = error
            self._event.set()

    def done(self) -> bool:
        """Return whether the result, or an error, is available."""
        if not self._event.is_set():
            return False
        return self._finished is None or bool(self._finished.query())

    def wait(self) -> Any:
        """Wait for the result and return it. Raises the error that the operation failed with.

        On CUDA it makes the current stream wait for the result, not the host.
        """
        self._event.wait()
        if self.error is not None:
            raise self.error
        if self._finished is not None:
            torch.cuda.current_stream().wait_event(self._finished)
        return self.result


def _event() -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
