"""The numbers that torch gives to the process groups of a process. Used by `backends.c10d`.

Relies on `torch.distributed.distributed_c10d._world.group_count`: the number of the default group,
0 in a new process, is part of the keys under which its ranks meet. Without it, a process in which
`init_process_group` has failed, as when a rank dies meanwhile, meets no other ranks any more.
"""

from __future__ import annotations

from torch.distributed import distributed_c10d


def restart_group_numbers() -> None:
    """Give the next default group the number 0. Not collective; call it while there is no group."""
    world = getattr(distributed_c10d, "_world", None)
    if world is not None and hasattr(world, "group_count"):
        world.group_count = 0
