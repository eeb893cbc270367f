"""Gloo process groups that can be closed while an operation still waits for a peer.

Used by `shm`, by the engine of `hvd`, and by `ddp` for the address that Gloo binds to. Gloo's own
destructor waits for pending operations. If a rank dies in the middle of several, two survivors can
wait for each other for ever, each in a different operation, and neither closes the connections
whose end would fail the other's. So a group's sockets are found when it is made, and shut down when
it must end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain.job.addresses import network_in_use
from hvdtrain.job.store_exchange import exchange

_FDS = "/proc/self/fd"
Address = tuple[str, int]
T = TypeVar("T")


class Connections:
    """The TCP connections of one group: descriptors, each with the name of its socket in /proc."""

    def __init__(self, sockets: dict[int, str]) -> None:
        self._sockets = sockets

    def address(self) -> str:
        """Return the address at which peers reach this process; empty if there are no peers."""
        pairs = filter(None, map(_address_pair, self._sockets))
        return next((str(own[0]) for own, _ in pairs), "")

    def shut_down(self) -> None:
        """Shut the connections down, so that operations that wait on them fail on both ends.

        Not collective. Does nothing if the system does not list the sockets (no /proc).
        """
        for fd, name in self._sockets.items():
            with suppress(OSError):
                # Duplicate it first: if it was closed, its number may belong to another socket.
                copy = os.dup(fd)
                if os.readlink(f"{_FDS}/{copy}") != name:
                    os.close(copy)
                    continue
                with socket.socket(fileno=copy) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def open_gloo(store: Store, rank: int, size: int, timeout_s: float) -> tuple[Any, Connections]:
    """Make a group outside torch.distributed's registry, and find its sockets. Collective.

    All members are connected when it returns, so a member that closes the group at once does not
    disturb the connecting of others. `store` must have its own key prefix. Raises RuntimeError if a
    member does not join in time.
    """
    before = _sockets()
    options = gloo_options(timedelta(seconds=timeout_s))
    group = dist.ProcessGroupGloo(store, rank, size, options)
    new = {fd: name for fd, name in _sockets().items() if before.get(fd) != name}
    return group, own_connections(store, rank, size, new, timeout_s)


def own_connections(
    store: Store, rank: int, size: int, new: dict[int, str], timeout_s: float
) -> Connections:
    """Return those of this process's new sockets that connect members of a group. Collective.

    Other threads may have opened sockets meanwhile. A connection is the group's if one end is where
    a member listens; each rank publishes that alone, not an address for each peer.
    """
    own = list(filter(None, map(_listening_address, new)))
    published = exchange(store, "listening", rank, size, own, timeout_s)
    listening = {tuple(address) for member in published for address in member}
    return Connections(
        {fd: name for fd, name in new.items() if not listening.isdisjoint(_address_pair(fd) or ())}
    )


def gloo_options(timeout: timedelta) -> Any:
    """Return a group's options: an address of this host that peers can reach, and eager connecting.

    With TORCH_GLOO_LAZY_INIT=1 Gloo would connect on first use, and `open_gloo` would find no
    sockets.
    """
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    places = [{"interface": name} for name in names if name]
    if not places and (network := network_in_use()) is not None:
        places = [{"hostname": network.address}]
    options = gloo._Options()
    options._devices = [_eager(gloo.create_device, **place) for place in places] or [
        _eager(gloo.create_default_device)
    ]
    options._timeout = timeout
    options._threads = 2 * len(options._devices)
    return options


def _eager(create: Callable[..., Any], **place: str) -> Any:
    """Create a Gloo device that connects eagerly."""
    try:
        return create(**place, lazy_init=False)
    except TypeError:  # an older torch, which always connects eagerly
        return create(**place)


@contextmanager
def gloo_reachable() -> Iterator[None]:
    """Make `init_process_group("gloo")` inside the block use the same address as `gloo_options`.

    It accepts only the name of an interface, and only from the environment.
    """
    name, network = "GLOO_SOCKET_IFNAME", network_in_use()
    if network is None or name in os.environ:
        yield
        return
    os.environ[name] = network.interface
    try:
        yield
    finally:
        del os.environ[name]


def _sockets() -> dict[int, str]:
    """Return this process's sockets by descriptor, each with its /proc name "socket:[inode]"."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(_FDS):
            with suppress(OSError):
                link = os.readlink(f"{_FDS}/{name}")
                if link.startswith("socket:"):
                    found[int(name)] = link
    return found


def _read_socket(fd: int, read: Callable[[socket.socket], T]) -> T | None:
    """Return what `read` finds of a TCP socket; None for any other descriptor, or if it fails."""
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as s:
        if s.family in (socket.AF_INET, socket.AF_INET6):
            return read(s)
    return None


def _address_pair(fd: int) -> tuple[Address, Address] | None:
    """Return a connected TCP socket's local and remote address; None for any other descriptor."""
    return _read_socket(fd, lambda s: (s.getsockname()[:2], s.getpeername()[:2]))


def _listening_address(fd: int) -> Address | None:
    """Return where a TCP socket listens; None for any other descriptor."""

    def read(s: socket.socket) -> Address | None:
        listens = s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return s.getsockname()[:2] if listens else None

    return _read_socket(fd, read)
