"""`init_process_group()` without an address, under launchers that set no RANK: mpirun, horovodrun.

torch's default, `env://`, requires RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. After a call of
`rendezvous_by_launcher`, if none of these is set and a known launcher has started this process, the
ranks rendezvous through `hvdtrain.job.rendezvous` instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from hvdtrain._torch.env_handler import Handler, replace_env_handler
from hvdtrain.job.rendezvous import complete_world, open_store
from hvdtrain.job.world import detect

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rendezvous_by_launcher() -> None:
    """Let `init_process_group` without an address find its ranks under every launcher.

    Replaces torch's handler of `env://` in this process, by one that calls it under torchrun. Not
    collective; a second call does nothing. Raises BackendUnavailable if this torch has no such
    handler.
    """
    replace_env_handler(_replacement)


def _replacement(torch_handler: Handler) -> Handler:
    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[Any]:
        world = (
            None if any(name in os.environ for name in _TORCH_VARIABLES) or "?" in url else detect()
        )
        if world is None or world.launcher == "none":
            yield from torch_handler(url, timeout=timeout, **more)
            return
        world = complete_world(world, timeout.total_seconds())
        yield open_store(world, timeout.total_seconds()), world.rank, world.size
        raise RuntimeError("env:// has no second rendezvous")  # torch's handler raises here, too

    return handler
