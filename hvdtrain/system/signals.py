"""Signal handlers for the time of a block.

Used by the commands, `failure`, `horovod_build`, `compare` and `launch`. Python sets handlers, and
runs them, in the main thread only: in another thread these blocks change nothing. Imports no torch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn

Handler = Callable[[int, FrameType | None], object]

STOP = (signal.SIGTERM, signal.SIGINT)
"""The requests to end a command: those of a launcher, and Ctrl-C."""

_SPARED = (signal.SIGINT, signal.SIGHUP)


def stop_launcher() -> tuple[signal.Signals, ...]:
    """Return the requests to end a launcher: STOP, and SIGHUP unless `nohup` has it ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return STOP if is_ignored else (*STOP, signal.SIGHUP)


@contextmanager
def restored(*numbers: signal.Signals) -> Iterator[None]:
    """Restore the handlers of these signals after the block, whatever the block sets."""
    before = {number: signal.getsignal(number) for number in numbers if _in_main_thread()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextmanager
def handled(handler: Handler | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals with `handler` inside the block.

    SIGINT and SIGHUP stay ignored: a shell for its background jobs, and nohup, start commands so.
    """
    given = [n for n in numbers if n not in _SPARED or signal.getsignal(n) != signal.SIG_IGN]
    with restored(*given):
        set_handler(handler, *given)
        yield


def uninterrupted() -> AbstractContextManager[None]:
    """Ignore Ctrl-C and SIGTERM inside the block: it cleans up, or must not stop half-way."""
    return handled(signal.SIG_IGN, *STOP)


def raised_as_exit(*numbers: signal.Signals) -> AbstractContextManager[None]:
    """Raise SystemExit(128 + number) inside the block: a signal unwinds it, as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    return handled(leave, *numbers)


@contextmanager
def deferred(*numbers: signal.Signals) -> Iterator[None]:
    """Hold these signals back until the block ends or raises, then raise the first that arrived."""
    arrived: list[int] = []
    try:
        with handled(lambda number, frame: arrived.append(number), *numbers):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def set_handler(handler: Handler | signal.Handlers, *numbers: signal.Signals) -> None:
    """Set the handler of these signals for good; in another thread than the main one do nothing."""
    if _in_main_thread():
        for number in numbers:
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
