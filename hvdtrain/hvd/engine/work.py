"""One submitted operation, from the call to its result."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.engine.request import Key, Meta


class Work:
    """An operation under way. `wait` and `done` may be called from any thread.

    `inputs` are what the caller gave, contiguous; `outputs` are the tensors to write, or None where
    the operation makes its own.
    """

    def __init__(
        self,
        key: Key,
        meta: Meta,
        inputs: list[Tensor] | None = None,
        outputs: list[Tensor] | None = None,
    ) -> None:
        self.key = key
        self.meta = meta
        self.inputs = inputs or []
        self.outputs = outputs
        self.payload = b""
        self.cache_id = 0  # what rank 0 was asked with; 0: with all that is known of it
        self.extra: Any = None  # what it was told of the other ranks' tensors: their rows
        self.result: Any = None
        self.error: Exception | None = None
        self.submitted = _event() if meta.device == "GPU" else None
        self._finished: Any = None
        self._event = threading.Event()

    def finish(self, result: Any) -> None:
        """Hand over the result, which on CUDA is complete once the current stream is."""
        self.result = result
        if self.submitted is not None:
            self._finished = _event()
        self._event.set()

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended already."""
        if not self._event.is_set():
            self.error = error
            self._event.set()

    def done(self) -> bool:
        """Whether the result, or an error, is there."""
        if not self._event.is_set():
            return False
        return self._finished is None or bool(self._finished.query())

    def wait(self) -> Any:
        """Return the result. Raises what the operation has ended with.

        On CUDA the current stream waits, not the host.
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
