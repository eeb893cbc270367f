"""Network addresses of this host: which of them other ranks can reach.

Used by the rendezvous, by Gloo groups and by the Horovod engine. A host's own name may resolve to a
loopback address (Debian maps it to 127.0.1.1), so routes and interfaces are asked, too.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import psutil
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hvdtrain.errors import LaunchError
from hvdtrain.world import World

_MAX_ADDRESSES = 8  # so that they fit into the message that rank 0 publishes
# Reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


def own_addresses(world: World) -> list[str]:
    """Return the addresses at which other ranks may reach this host, the likeliest first.

    Raises LaunchError if it has none.
    """
    if world.one_host:
        return ["localhost", "127.0.0.1"]
    name = socket.gethostname()
    addresses = [name]
    with suppress(OSError):  # the name may not resolve; the routes below still help
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses += [str(info[4][0]) for info in infos]
    addresses += [source for host in _OUTSIDE if (source := route_source(host)) is not None]
    usable = [a for a in dict.fromkeys(addresses) if not is_local(a)]
    if not usable:
        raise LaunchError(
            f"{name} has no address that other hosts could reach; set MASTER_ADDR and MASTER_PORT"
        )
    return usable[:_MAX_ADDRESSES]


def listen_addresses(world: World) -> list[str]:
    """Return the IP addresses at which rank 0 listens for the other ranks.

    Those of the interface in use, if it is known, else all that other hosts may reach. Raises
    LaunchError if there is none.
    """
    if world.one_host:
        return ["127.0.0.1"]
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if ipv4 := [a for a in psutil.net_if_addrs().get(name, []) if a.family == socket.AF_INET]:
        return [ipv4[0].address]
    host = os.environ.get("MASTER_ADDR")  # all other ranks have reached the store there
    if host and (source := route_source(host)) is not None:
        return [source]
    addresses = [address for address in own_addresses(world) if _parse(address) is not None]
    if not addresses:
        raise LaunchError("no address of this host is known; set GLOO_SOCKET_IFNAME or MASTER_ADDR")
    return addresses


_reachable_address: list[str] = []


def reachable_address() -> str | None:
    """Return the address at which other hosts reach this one, if its host name does not resolve to
    one; else None. Not collective. Known after `rendezvous.open_store`.
    """
    return _reachable_address[0] if _reachable_address else None


def find_reachable_address(store: Store, world: World) -> None:
    """Find `reachable_address`: the source address of a route to the store, or to a rank that has
    such a route. Collective.
    """
    if world.one_host:
        return
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    mine = route_source(base.host) if isinstance(base, TCPStore) else None
    store.set(f"address/{world.rank}", mine or "")
    others = store.multi_get([f"address/{rank}" for rank in range(world.size)])
    mine = mine or next(filter(None, (route_source(o.decode()) for o in others if o)), None)
    with suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None)
        if not all(is_local(str(info[4][0])) for info in infos):
            mine = None  # Gloo finds a usable address by the name
    _reachable_address[:] = [mine] if mine else []


def route_source(host: str) -> str | None:
    """Return this host's address on its route to `host`; None without a route, or for a local one.

    Sends nothing: connecting a datagram socket only makes the kernel choose the source address.
    """
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                if not is_local(source := str(probe.getsockname()[0])):
                    return source
    return None


def is_local(address: str) -> bool:
    """Return whether other hosts cannot use an address: loopback, link-local or unspecified."""
    ip = _parse(address)
    if ip is None:
        return address.split(".")[0].lower() == "localhost"
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified


def find_interface(address: str) -> str | None:
    """Return the name of the network interface with this address, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if address in [a.address for a in own]), None)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None
