"""PyTorch-Ignite treats our process groups as Gloo's.

Used by `transports`, when it is imported and when a group is made. ignite's `auto_model` wraps a
model for the groups nccl, gloo and mpi only: with "shm" each rank would train alone, and nothing
would say so. So ignite, if it has been imported, gets another list and another answer.
"""

from __future__ import annotations

import sys
from typing import Any


def add_names(names: tuple[str, ...]) -> None:
    """Let ignite accept these backends, and call them gloo. Twice is safe; not collective."""
    native = sys.modules.get("ignite.distributed.comp_models.native")
    model: Any = getattr(native, "_NativeDistModel", None)
    if model is None or names[0] in model.available_backends:
        return
    model.available_backends += names
    own_backend = model.backend

    def backend(self: Any) -> str:
        name = str(own_backend(self))
        return "gloo" if name in names else name

    model.backend = backend
