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
    "monitoredBarrier",
    "PeerLost",
    "connectFullMesh failed",
)
# Of NCCL: others, such as "Duplicate GPU detected", are about this rank's own use of it.
_NCCL_PHRASES = (
    "ncclRemoteError",
    "ncclSystemError",
    "collective operation timeout",
    "retrieving ncclUniqueId",
)


def is_peer_error(error: Exception) -> bool:
    """Return whether a transport or store raised `error` about a lost or late peer."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    nccl = isinstance(error, dist.DistBackendError)
    phrases = (*_PHRASES, *_NCCL_PHRASES) if nccl else _PHRASES
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)
