"""The errors of torch.distributed that mean a lost or late peer. Used by the backend `ddp`.

Relies on the texts of plain RuntimeErrors: most have no type of their own. Without a text the error
is still raised, with its traceback, as a bug instead of a lost peer.
"""

from __future__ import annotations

import torch.distributed as dist

_PHRASES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout",
    "Socket closed",
    "ProcessGroupNCCL",
    "monitoredBarrier",
    "PeerLost",
    "connectFullMesh failed",
)


def is_peer_error(error: Exception) -> bool:
    """Return whether a transport or store raised `error` about a lost or late peer."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)
