"""The all-reduce that DDP's `join` passes to torch's reducer. Used by `transports`.

Relies on `dist.Reducer._set_forward_pass_work_handle`. It keeps the C++ part of the Work alone, and
without its Python part `get_future` is "not implemented". (`_register_work`, and what C++ code
calls itself, keep both.) Without the name nothing is changed.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch.distributed as dist

_work_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by its reducer


def keep_join_work() -> None:
    """Let the reducer keep the Python part of the Work, too. Not collective; twice is safe."""
    reducer: Any = dist.Reducer  # type: ignore[attr-defined]
    set_handle = getattr(reducer, "_set_forward_pass_work_handle", None)
    if set_handle is None or hasattr(set_handle, "__wrapped__"):
        return

    @functools.wraps(set_handle)
    def set_and_keep(self: Any, work: Any, *more: Any) -> None:
        _work_of[self] = work  # instead of that of the step before
        set_handle(self, work, *more)

    reducer._set_forward_pass_work_handle = set_and_keep
