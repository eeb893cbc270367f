"""A call at the end of the backward pass, and the node that accumulates a gradient.

`hvd`'s reducers use the first, the backend `ddp` the second.

Relies on `torch.autograd.Variable._execution_engine.queue_callback`, which FSDP uses too. Without
it, as in a compiled backward pass, the reducers do the same in `synchronize`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.autograd import Variable


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass of the calling hook has run all nodes and hooks."""
    with suppress(AttributeError, RuntimeError):
        Variable._execution_engine.queue_callback(function)


def accumulation_of(p: Tensor) -> Any:
    """Return the AccumulateGrad node of a parameter. Its hooks are lost when nothing holds it."""
    node = p.expand_as(p).grad_fn
    assert node is not None
    return node.next_functions[0][0]
