"""Peers: the exchange of values through a c10d store, and the error of a lost rank."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]


class PeerLost(RuntimeError):
    """A rank has exited, or did not arrive in time. What it belonged to cannot be used any more."""


def exchange(
    store: Store, name: str, rank: int, size: int, value: Any, timeout_s: float
) -> list[Any]:
    """Return every rank's JSON `value`, in rank order, through the store. Collective.

    `name` must be new for this store's key prefix. Raises PeerLost naming the missing ranks.
    """
    keys = [f"{name}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(value))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except DistError:
        missing = [str(r) for r, key in enumerate(keys) if not store.check([key])]
        if missing:  # else the last one arrived just after the timeout
            raise PeerLost(
                f"rank {rank} timed out after {timeout_s:g} s waiting for rank "
                f"{', '.join(missing)} ({len(missing)} of {size} ranks missing)"
            ) from None
    return [json.loads(text) for text in store.multi_get(keys)]
