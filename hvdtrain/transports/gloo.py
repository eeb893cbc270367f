"""Gloo groups that can be closed although an operation waits for a peer.

Gloo's own destructor waits for operations under way. Where a rank has died in the middle of
several, two others may wait for each other in different ones, for ever, and neither closes the
connections that would tell the other. So they are looked up when they are made, and hung up.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

_FDS = "/proc/self/fd"


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
    group = dist.ProcessGroupGloo(store, rank, size, _eager_options(timeout))
    new = {fd: name for fd, name in _sockets().items() if before.get(fd) != name}
    ends = {fd: pair for fd in new if (pair := _ends(fd)) is not None}
    store.set(f"ends/{rank}", json.dumps(list(ends.values())))
    peers = [f"ends/{r}" for r in range(size) if r != rank]
    store.wait(peers, timeout)
    theirs = [pair for peer in peers for pair in json.loads(store.get(peer))]
    # Other threads open sockets too; this group's have their other end in a peer's list.
    return group, Connections({fd: new[fd] for fd, pair in ends.items() if pair[::-1] in theirs})


def _eager_options(timeout: timedelta) -> Any:
    """Return torch's own options for Gloo, but for connecting when the group is made: with
    TORCH_GLOO_LAZY_INIT=1 it would connect on use, and there were no connections to end.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        options._devices = [gloo.create_device(interface=n, lazy_init=False) for n in names] or [
            gloo.create_default_device(lazy_init=False)
        ]
    except TypeError:  # an older torch, which knows nothing of lazy connections
        options._devices = [gloo.create_device(interface=n) for n in names] or [
            gloo.create_default_device()
        ]
    options._timeout = timeout
    options._threads = 2 * len(options._devices)
    return options


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
