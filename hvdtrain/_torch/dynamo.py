"""Functions that Dynamo, the front end of torch.compile, leaves alone. Used by `transports`, `hvd`.

While a compiled function runs, Dynamo compiles every Python function that starts in its thread,
also those that C++ calls: collectives of a process group in Python, and gradient hooks.

Relies on `torch._C._dynamo.eval_frame.set_code_exec_strategy` and on the attribute
`_torchdynamo_disable`. Without the first `torch.compiler.disable` is used: it does the same, but
imports Dynamo at once, which takes as long as importing torch.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

F = TypeVar("F")
C = TypeVar("C", bound=type)

_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def untraced(function: F) -> F:
    """Make Dynamo neither compile `function` nor what it calls; in a compiled caller it is a graph
    break.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"not a function: {function!r}")
    if not hasattr(_eval_frame, "set_code_exec_strategy"):
        return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
    skip = _eval_frame._FrameAction.SKIP
    # The second one is for the functions that this one calls.
    strategy = _eval_frame._FrameExecStrategy(skip, skip)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def untraced_methods(cls: C) -> C:
    """Apply `untraced` to the methods that a class defines."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType):
            setattr(cls, name, untraced(value))
    return cls
