"""One call at a time in a thread: how `--checkpoint-async` writes while the run takes steps.

The run directory owns one, the Checkpointer starts the calls. All methods are for one thread, that
of the training loop; the call itself must use nothing that this thread changes. Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundCall:
    """At most one running call, and the exception of the last one until it is raised."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Call `function` in a thread. Call `wait` for the previous call before."""
        assert self._thread is None, "wait() was not called for the previous call"

        def call() -> None:
            try:
                function()
            except BaseException as error:  # raised again by `wait` and `raise_error`
                self._error = error

        # A daemon: a disk that hangs must not keep the process from its end.
        self._thread = threading.Thread(target=call, name="checkpoint", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Return whether the call has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def raise_error(self) -> None:
        """Raise the exception of a call that has ended with one, once."""
        if self._error is not None and not self.is_running():
            self.wait(0)

    def wait(self, timeout_s: float) -> None:
        """Wait for the call, if there is one, and raise its exception, once.

        Raises TimeoutError if it takes longer than `timeout_s`; it then goes on. A signal handler
        may interrupt the wait by an exception.
        """
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
