"""A call at the end of the backward pass. Used by `hvd`'s reducers.

Relies on `torch.autograd.Variable._execution_engine.queue_callback`, which FSDP uses too. Without
it, as in a compiled backward pass, the reducers do the same in `synchronize`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch.autograd import Variable


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass of the calling hook has run all nodes and hooks."""
    with suppress(AttributeError, RuntimeError):
        Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]
