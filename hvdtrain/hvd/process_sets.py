"""Process sets: operations among some of the ranks. Horovod's `common.process_sets`.

Used by `basics` and by every operation. Registration is collective, and rank 0 assigns the id.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.operation import GLOBAL_SET
from hvdtrain.job import elastic_world

_log = logging.getLogger("hvdtrain")
basics: Any  # the one instance of HorovodBasics: see `set_up`


class ProcessSet:
    """Some ranks, in ascending order. Usable once registered by `init` or `add_process_set`."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        """Describe a set. Not collective. Raises ValueError for anything but ranks or a Comm."""
        if hasattr(ranks_or_comm, "Get_rank"):  # an mpi4py communicator
            self.mpi_comm = ranks_or_comm
            return
        if isinstance(ranks_or_comm, str) or not isinstance(ranks_or_comm, Iterable):
            raise ValueError(_NOT_RANKS)
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(_NOT_RANKS)
        self.ranks = ranks

    def size(self) -> int | None:
        """Return the number of ranks; None before the set is registered."""
        members = self._members()
        return None if members is None else len(members)

    def rank(self) -> int | None:
        """Return this process's rank in the set; None before the set is registered.

        Raises ValueError if this process is not in the set.
        """
        members = self._members()
        if members is not None and basics.rank() not in members:
            raise ValueError("Process is not part of provided process set.")
        return None if members is None else members.index(basics.rank())

    def _members(self) -> list[int] | None:
        if self.process_set_id is None:
            return None
        members: list[int] | None = basics._engine_or_raise().sets.get(self.process_set_id)
        return members

    def included(self) -> bool | None:
        """Return whether this process is in the set; None while the set has no list of ranks."""
        if self.ranks is None:
            return None
        return bool(basics.rank() in self.ranks)

    def __reduce__(self) -> Any:
        if self is global_process_set:  # operations compare it by identity
            return "global_process_set"
        return ProcessSet, (self.ranks,), vars(self)

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


_NOT_RANKS = (
    "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"
)

global_process_set = ProcessSet([])
global_process_set.process_set_id = GLOBAL_SET
global_process_set.ranks = None  # until `begin` knows the world


_registered: dict[int, ProcessSet] = {}
"""By id, without the global one; empty before `hvd.init`."""


def set_up(owner: Any) -> None:
    """Use this instance. `basics` imports this module, which cannot import it."""
    global basics
    basics = owner


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set, and return it. Collective over all ranks, members or not.

    Raises ValueError unless process sets are dynamic, and if a set of the same ranks exists.
    """
    engine = _dynamic_engine("adding")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _register(engine, process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Deregister a set; return False if it is not registered, or the global one.

    Collective over all ranks. Raises ValueError unless process sets are dynamic.
    """
    engine = _dynamic_engine("removing")
    set_id = process_set.process_set_id
    if set_id is None or set_id == GLOBAL_SET:
        return False
    process_set.process_set_id = None
    known = _registered.pop(set_id, None) is not None
    engine.request(engine.next_set_name(), "remove_set", set_id).wait()
    return known


def _dynamic_engine(change: str) -> Engine:
    """Return the running engine. Raises ValueError unless its process sets are dynamic."""
    engine: Engine = basics._engine_or_raise()
    if not engine.settings.dynamic_process_sets:
        raise ValueError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {change} process sets after Horovod "
            "initialization."
        )
    return engine


def listed(process_sets: Any) -> list[ProcessSet]:
    """Return the sets that `init` was given. Raises ValueError for a string but "dynamic"."""
    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, str):
        raise ValueError(f"process_sets={process_sets!r} must be None, a list or 'dynamic'")
    return list(process_sets)


def begin(engine: Engine, process_sets: list[ProcessSet]) -> None:
    """Set up the global set and register those given to `init`. Collective."""
    global_process_set.ranks = list(engine.sets[GLOBAL_SET])
    # Every rank sent the sets that it was given when it connected.
    given = [info["sets"] for info in engine.rank_infos]
    if any(sets != given[0] for sets in given):
        raise ValueError(
            "Horovod initialization failed. Please check log messages above for a more descriptive "
            f"error. The ranks gave different process sets: {given}"
        )
    for process_set in process_sets:
        if elastic_world.is_elastic() and not _fits(process_set, engine.world.size):
            _log.warning("elastic: %s is not registered in %s", process_set, engine.world)
            continue
        _register(engine, process_set)


def end() -> None:
    """Invalidate every set but the global one."""
    for process_set in _registered.values():
        process_set.process_set_id = None
    _registered.clear()


def _register(engine: Engine, process_set: ProcessSet) -> None:
    ranks = process_set.ranks
    if ranks is None:
        raise NotImplementedError(
            "Process sets of an MPI communicator are not implemented: give a list of ranks."
        )
    if not ranks or ranks[0] < 0 or ranks[-1] >= engine.world.size or len(set(ranks)) < len(ranks):
        raise ValueError(f"{process_set} must have different ranks below {engine.world.size}")
    if ranks in engine.sets.values():
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = engine.request(engine.next_set_name(), "add_set", ranks).wait()
    assert process_set.process_set_id is not None
    _registered[process_set.process_set_id] = process_set


def _fits(process_set: ProcessSet, size: int) -> bool:
    """Return whether a set is a proper part of a world of this size, which may have shrunk."""
    ranks = process_set.ranks or []
    return len(ranks) < size and max(ranks, default=0) < size
