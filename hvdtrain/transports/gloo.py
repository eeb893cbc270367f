"""Gloo groups that can be closed although an operation waits for a peer.

Gloo's own destructor waits for operations under way. Where a rank has died in the middle of
several, two others may wait for each other in different ones, for ever, and neither closes the
connections that would tell the other. So they are looked up when they are made, and hung up.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain.rendezvous import reachable_address

_FDS = "/proc/self/fd"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class Connections:
    """The TCP connections of one group: descriptors, and names that no other sockets ever have."""

    def __init__(self, sockets: dict[int, str]) -> None:
        self._sockets = sockets

    def address(self) -> str:
        """Return where the others reach this process; empty where there are none."""
        ends = (_ends(fd) for fd in self._sockets)
        return next((str(pair[0][0]) for pair in ends if pair is not None), "")

    def hang_up(self) -> None:
        """End them, so that whoever waits for what comes over them fails. Not collective; does
        nothing where the system does not say what sockets there are.
        """
        for fd, name in self._sockets.items():
            with suppress(OSError):
                # A copy first: closed meanwhile, the number could be that of another socket.
                copy = os.dup(fd)
                if os.readlink(f"{_FDS}/{copy}") != name:
                    os.close(copy)
                    continue
                with socket.socket(fileno=copy) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def open_gloo(store: Store, rank: int, size: int, timeout_s: float) -> tuple[Any, Connections]:
    """Make a group that torch.distributed's registry does not know. Collective.

    All members have connected when it returns, so that one that closes the group at once breaks
    nobody's connecting. `store` must be a name space of its own. Raises RuntimeError where a member
    does not come.
    """
    before = _sockets()
    timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroupGloo(store, rank, size, gloo_options(timeout))
    new = {fd: name for fd, name in _sockets().items() if before.get(fd) != name}
    ends = {fd: pair for fd in new if (pair := _ends(fd)) is not None}
    store.set(f"ends/{rank}", json.dumps(list(ends.values())))
    peers = [f"ends/{r}" for r in range(size) if r != rank]
    store.wait(peers, timeout)
    theirs = [pair for peer in peers for pair in json.loads(store.get(peer))]
    # Other threads open sockets too; this group's have their other end in a peer's list.
    return group, Connections({fd: new[fd] for fd, pair in ends.items() if pair[::-1] in theirs})


def gloo_options(timeout: timedelta) -> Any:
    """Return the options of a group: an address of this host that the others reach, and connections
    made when the group is. With TORCH_GLOO_LAZY_INIT=1 Gloo would connect on use, and there would
    be no connections to end.
    """
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    places = [{"interface": name} for name in names]
    if not names and (address := reachable_address()) is not None:
        places = [{"hostname": address}]
    options = gloo._Options()
    options._devices = [_eager(gloo.create_device, **place) for place in places] or [
        _eager(gloo.create_default_device)
    ]
    options._timeout = timeout
    options._threads = 2 * len(options._devices)
    return options


def _eager(create: Callable[..., Any], **place: str) -> Any:
    """Create a device of Gloo's that connects at once."""
    try:
        return create(**place, lazy_init=False)
    except TypeError:  # an older torch, which knows nothing of lazy connections
        return create(**place)


@contextmanager
def gloo_reachable() -> Iterator[None]:
    """Let `init_process_group("gloo")` inside the block take the same address: it knows names of
    interfaces only, and those from the environment.
    """
    name, address = "GLOO_SOCKET_IFNAME", reachable_address()
    interface = None if address is None else _interface(address)
    if interface is None or name in os.environ:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


def _interface(address: str) -> str | None:
    """Return the network interface with this address."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        with suppress(OSError), open("/proc/net/if_inet6") as file:
            return next((row[5] for row in map(str.split, file) if row[0] == wanted), None)
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                request = struct.pack("256s", name.encode())
                found = fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return None


def _sockets() -> dict[int, str]:
    """Return this process's sockets by descriptor, each with a name that no other ever has."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(_FDS):
            with suppress(OSError):
                link = os.readlink(f"{_FDS}/{name}")
                if link.startswith("socket:"):
                    found[int(name)] = link
    return found


def _ends(fd: int) -> list[list[Any]] | None:
    """Return the addresses of this end and the other; None for what is not connected by TCP."""
    with suppress(OSError):
        with socket.socket(fileno=os.dup(fd)) as s:
            if s.family in (socket.AF_INET, socket.AF_INET6):
                return [list(s.getsockname()[:2]), list(s.getpeername()[:2])]
    return None
