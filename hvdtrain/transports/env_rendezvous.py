"""`init_process_group()` without an address, under launchers that set no RANK: mpirun, horovodrun.

Importing `hvdtrain.transports` registers it. torch's default, `env://`, requires RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. If none of these is set and a known launcher has started this process,
the ranks rendezvous through `hvdtrain.rendezvous` instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvdtrain.rendezvous import open_store
from hvdtrain.world import detect

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register() -> None:
    """Replace torch's `env://` handler by one that falls back on it. Twice is safe."""
    # In torch.distributed a function `rendezvous` hides the module of that name.
    handlers: dict[str, Any] = sys.modules[f"{dist.__name__}.rendezvous"]._rendezvous_handlers
    torch_handler = handlers["env"]
    if getattr(torch_handler, "is_hvdtrain", False):
        return

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[Any]:
        has_variables = any(name in os.environ for name in _TORCH_VARIABLES)
        world = None if has_variables or "?" in url else detect()
        if world is None or world.launcher == "none":
            yield from torch_handler(url, timeout=timeout, **more)
            return
        yield open_store(world, timeout.total_seconds()), world.rank, world.size
        raise RuntimeError("env:// has no second rendezvous")  # torch's handler raises here, too

    handler.is_hvdtrain = True  # type: ignore[attr-defined]
    handlers["env"] = handler
