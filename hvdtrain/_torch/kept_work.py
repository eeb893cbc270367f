"""The functions of torch's C++ code that take a Work from Python. Used by `transports`.

Relies on `dist.Reducer._set_forward_pass_work_handle`, by which DDP's `join` passes on an
all-reduce, and on `torch._C._distributed_c10d._register_work`, whose Work `wait_tensor` waits for.
torch keeps the C++ part of the Work alone. Without its Python part, `wait` never ends, and
`get_future` is "not implemented". Without the names, nothing is changed.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist

_work_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by its reducer


def keep_works_alive() -> None:
    """Let these functions keep the Python part of a Work, too. Not collective; twice is safe."""
    reducer: Any = dist.Reducer
    set_handle = getattr(reducer, "_set_forward_pass_work_handle", None)
    if set_handle is not None and not hasattr(set_handle, "__wrapped__"):

        @functools.wraps(set_handle)
        def set_and_keep(self: Any, work: Any, *more: Any) -> None:
            _work_of[self] = work  # instead of that of the step before
            set_handle(self, work, *more)

        reducer._set_forward_pass_work_handle = set_and_keep
    module: Any = torch._C._distributed_c10d
    register = getattr(module, "_register_work", None)
    if register is not None and not hasattr(register, "__wrapped__"):

        @functools.wraps(register)
        def register_and_keep(tensor: Any, work: Any) -> Any:
            weakref.finalize(tensor, id, work)  # holds the Work until the tensor is freed
            return register(tensor, work)

        module._register_work = register_and_keep
