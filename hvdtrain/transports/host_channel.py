"""What a group of `shm` sends between hosts, by Gloo; `mpi_channel` has the same by MPI.

Each method starts an operation of all members and returns it. Its `wait(timedelta)` raises
RuntimeError when it fails, or has not completed by then: `is_completed` tells which.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain.transports.gloo import Connections, open_gloo


class GlooChannel:
    """This rank's side of a channel through the connections of a Gloo group.

    Tensors are contiguous, in the memory of the CPU.
    """

    def __init__(self, group: Any, connections: Connections) -> None:
        self.group, self.connections = group, connections

    def broadcast(self, t: Tensor, root: int) -> Any:
        """Overwrite `t` with the root's."""
        return self.group.broadcast(t, root)

    def all_gather(self, out: Tensor, t: Tensor) -> Any:
        """Concatenate the bytes `t` of all members into `out`."""
        return self.group._allgather_base(out, t)

    def all_to_all(
        self, out: Tensor, t: Tensor, recv_bytes: list[int], send_bytes: list[int]
    ) -> Any:
        """Send each member its bytes of `t`, and receive its own ones into `out`."""
        return self.group.alltoall_base(out, t, recv_bytes, send_bytes)

    def shut_down(self) -> None:
        """Abort pending operations, here and on the other members. Not collective."""
        self.connections.shut_down()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation waits by itself. Not collective."""
        self.group._set_default_timeout(timeout)

    def close(self) -> None:
        """Do nothing: this channel holds only its connections. Collective for MPI."""


def open_gloo_channel(store: Store, rank: int, size: int, timeout_s: float) -> GlooChannel:
    """Open a channel over Gloo. Collective: see `open_gloo`."""
    return GlooChannel(*open_gloo(store, rank, size, timeout_s))
