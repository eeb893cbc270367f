"""The exceptions of `horovod.common.exceptions`."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed on this rank: requests mismatched, a peer is lost, or hvd is shut down.

    Elastic training restores the last commit and retries. `lost_peer`: the job is over, and this
    rank is not the cause.
    """

    def __init__(self, *args: object, lost_peer: bool = False) -> None:
        super().__init__(*args)
        self.lost_peer = lost_peer


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed: elastic training initialises hvd again and keeps its state.

    `skip_sync`: hosts were only removed, so the state needs no broadcast.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A native library was built for another version of the framework. Never raised here."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built for {name} {version}, but {installed_version} is installed")
        self.name = name
        self.version = version
        self.installed_version = installed_version


SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt "
    "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution. If "
    "the shutdown was caused by an exception, you should see the exception in the log before the "
    "first shutdown message."
)
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
