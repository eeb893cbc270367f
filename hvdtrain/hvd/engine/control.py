"""The control plane: a star of connections around rank 0, which carries the engine's messages.

Each `hvd.init` begins with `await_ranks`, so that an init that failed on some ranks only leaves
nothing behind that could disturb the next one.
"""

from __future__ import annotations

import time
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.addresses import listen_addresses
from hvdtrain.errors import WorldError
from hvdtrain.peers import PeerLost, Peers, await_ranks
from hvdtrain.world import World


class Control(Peers):
    """This rank's connections of the control plane.

    `members` is every rank's `hello`, `store` has a prefix of its own. A rank that is silent for
    `limit_s` seconds counts as lost; 0 means no limit.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        hello: dict[str, Any],
        timeout_s: float,
        limit_s: float = 0.0,
    ) -> None:
        """Connect. Collective. Raises WorldError naming the ranks that did not come."""
        deadline = time.monotonic() + timeout_s
        try:
            self.store = await_ranks(store, world, timeout_s, deadline)
            super().__init__(
                PrefixStore("control", self.store),
                world.rank,
                world.size,
                hello,
                listen_addresses(world) if world.rank == 0 else [],
                max(1.0, deadline - time.monotonic()),
                limit_s=limit_s,
                thread_name="hvd-control",
            )
        except (PeerLost, DistError) as error:
            raise WorldError(f"{world} lost a rank in hvd.init: {error}") from None
