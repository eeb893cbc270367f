"""What a rank knows of the other ranks without the engine of its backend."""

from __future__ import annotations

from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain._torch.peer_errors import is_peer_error
from hvdtrain.errors import PeerLost, WorldError, first_line
from hvdtrain.job.addresses import network_in_use
from hvdtrain.job.world import World
from hvdtrain.liveness.hang_watch import HangWatch
from hvdtrain.liveness.monitor import Monitor, RankProgress


class PeerWatch:
    """The connections to the other ranks that do not depend on the engine, once they are open."""

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        """None with one rank, and before `start`."""
        self._hang_watch: HangWatch | None = None

    def start(
        self,
        world: World,
        store: Store,
        hosts: list[str],
        progress: RankProgress,
        timeout_s: float,
    ) -> None:
        """Connect the ranks, and watch for those that keep the others waiting. Collective."""
        self.monitor = Monitor(world, store, hosts, progress, timeout_s)
        self._hang_watch = HangWatch(self.monitor)

    def close(self) -> None:
        """Close the connections. Not collective; twice is safe."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = self._hang_watch = None

    def explain(self, error: Exception) -> str:
        """Return "; " and who was late, for the end of a message about `error`; "" if the watch
        has not started. Not collective. It may take some seconds.
        """
        return "" if self._hang_watch is None else f"; {self._hang_watch.explain(error)}"


def lost_contact(error: Exception) -> WorldError | None:
    """Return a WorldError for an error of a transport or a store about a lost or late peer, else
    None. Not collective.
    """
    if not (isinstance(error, PeerLost) or is_peer_error(error)):
        return None
    text = f"lost contact with a peer, which has ended or hangs: {first_line(error)}"
    if "connectFullMesh" in text and (network := network_in_use()) is not None:
        text += f" (Gloo uses {network}; GLOO_SOCKET_IFNAME can name another interface)"
    return WorldError(text)
