"""Client: what the calls of this rank have made since `init`: handles, names and process sets.

`basics` holds one, and makes a new one at each `shutdown`, so that all numbers restart together.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvdtrain.hvd.engine.request import Key

if TYPE_CHECKING:
    from hvdtrain.hvd.ops.handles import Handle
    from hvdtrain.hvd.process_sets import ProcessSet


@dataclass
class Client:
    """Tables of one rank. `lock` guards those of operations."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    """Reentrant: the garbage collector may run code that submits."""
    handles: dict[int, Handle] = field(default_factory=dict)
    """The operations that nobody has waited for yet."""
    named: dict[Key, Handle] = field(default_factory=dict)
    """Those whose name a caller chose, until the name is free."""
    next_handle: int = 0
    unnamed: dict[tuple[int, str], int] = field(default_factory=dict)
    """Numbers of unnamed operations, by process set and kind. Only accepted calls count, so a rank
    that is not in a set, or whose call raised, still uses the same numbers as the others.
    """
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    """The registered ones, by id, but for the global one."""
    set_requests: int = 0
    """The number of sets that were added or removed; makes their names, equal on all ranks."""
    num_batch_norms: int = 0
    """The number of `SyncBatchNorm` layers that have communicated."""
