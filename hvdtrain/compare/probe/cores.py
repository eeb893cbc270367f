"""Which cores a rank is bound to. Imports nothing of hvdtrain, and no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def share_of_cores(rank: int, ranks: int, cores: Collection[int]) -> list[int]:
    """Return the cores of one of a host's ranks: an equal share of whole physical cores, with all
    their hardware threads; one thread each if the ranks exceed the physical cores, a physical core
    of its own as long as there are any.
    """
    physical: dict[str, list[int]] = {}
    for core in sorted(cores):
        physical.setdefault(_siblings(core), []).append(core)
    groups = list(physical.values())
    if share := len(groups) // ranks:
        return sorted(sum(groups[rank * share :][:share], []))
    order = sorted(cores, key=lambda core: (physical[_siblings(core)].index(core), core))
    return [order[rank % len(order)]]


def _siblings(core: int) -> str:
    """Return a name that all hardware threads of a physical core share."""
    try:
        return Path(_SIBLINGS.format(core)).read_text().strip()
    except OSError:
        return str(core)
