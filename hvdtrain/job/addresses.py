"""Network addresses of this host: which of them other ranks can reach, and which one Gloo uses.

Used by the rendezvous, by Gloo groups and by the Horovod engine. A host's own name may resolve to a
loopback address (Debian maps it to 127.0.1.1), to one that others cannot reach, or not at all. So
addresses are taken from routes and interfaces, too. Gloo's is the one on this host's route to rank
0, over which the store is connected already.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from hvdtrain.errors import LaunchError
from hvdtrain.job.signed_store import base_of
from hvdtrain.job.store_exchange import ask_rank0
from hvdtrain.job.world import World, launch_env

_MAX_ADDRESSES = 8  # so that they fit into the message that rank 0 publishes
# Reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True)
class Network:
    """This host's address in the network that Gloo uses, its interface, and why it was chosen."""

    interface: str
    address: str
    reason: str

    def __str__(self) -> str:
        return f"{self.interface} {self.address}: {self.reason}"


def host_identity(*namespaces: str) -> str:
    """Return a text that is equal only for processes of one boot of one host which share these
    Linux namespaces: containers are hosts of their own if they do not share "net", for example.
    """
    parts = []
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
    for kind in namespaces:
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(parts)


def own_addresses(world: World) -> list[str]:
    """Return the addresses at which other ranks may reach this host, the likeliest first.

    With unknown hosts (see `World.is_complete`) "localhost" is one of them. Raises LaunchError if
    there is none.
    """
    if world.one_host:
        return ["localhost", "127.0.0.1"]
    name = socket.gethostname()
    addresses = []
    with suppress(OSError):  # the name may not resolve; the routes and interfaces still help
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = [str(address[0]) for *_, address in found]
    addresses += filter(None, map(route_source, _OUTSIDE))
    # The name itself comes late: without DNS, each attempt to resolve it may take seconds.
    usable = [a for a in dict.fromkeys([*addresses, *_interface_addresses()]) if not is_local(a)]
    usable = [*usable[: _MAX_ADDRESSES - 1], *([] if is_local(name) else [name])]
    if not world.is_complete:
        usable = [*usable[: _MAX_ADDRESSES - 1], "localhost"]
    if not usable:
        raise LaunchError(
            f"{name} has no address that other hosts could reach; set MASTER_ADDR and MASTER_PORT"
        )
    return usable


def _interface_addresses() -> list[str]:
    """Return the addresses of this host's interfaces, those of bridges such as docker0 last: they
    may be the same on every host.
    """
    stats = psutil.net_if_stats()
    names = [name for name in psutil.net_if_addrs() if name in stats and stats[name].isup]
    names.sort(key=lambda name: os.path.isdir(f"/sys/class/net/{name}/bridge"))
    return [address for name in names for address in _addresses_of(name)]


def _addresses_of(interface: str) -> list[str]:
    """Return an interface's addresses, IPv4 first; without link-local ones."""
    own = psutil.net_if_addrs().get(interface, [])
    found = [
        a.address for kind in (socket.AF_INET, socket.AF_INET6) for a in own if a.family == kind
    ]
    return [a for a in found if not ipaddress.ip_address(a).is_link_local]


def listen_addresses(world: World) -> list[str]:
    """Return the IP addresses at which rank 0 listens for the other ranks.

    That of the network in use, if it is known, else all that other hosts may reach. Raises
    LaunchError if there is none.
    """
    if world.one_host:
        return ["127.0.0.1"]
    if (network := network_in_use()) is not None:
        return [network.address]
    host = launch_env().get("MASTER_ADDR")  # all other ranks have reached the store there
    if host and (source := route_source(host)) is not None:
        return [source]
    addresses = [*filter(_parse, own_addresses(world))]
    if not addresses:
        raise LaunchError("this host has no known address; set GLOO_SOCKET_IFNAME or MASTER_ADDR")
    return addresses


# Gloo's network

_routed: list[Network] = []  # of the route to rank 0; at most one


def network_in_use() -> Network | None:
    """Return the network that Gloo uses: the user's interface, else the one on the route to rank 0.

    Not collective. Routes are known after `find_route`; without one, or on one host, return None:
    Gloo then takes the address of this host's name. Raises LaunchError if GLOO_SOCKET_IFNAME or
    HOROVOD_GLOO_IFACE names no interface of this host.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
        if name := os.environ.get(variable, "").partition(",")[0].strip():
            if found := _addresses_of(name):
                return Network(name, found[0], variable)
            names = ", ".join(n for n in psutil.net_if_addrs() if _addresses_of(n))
            raise LaunchError(
                f"{variable}={name} is not an interface of {socket.gethostname()} with an address; "
                f"choose one of {names}, or unset it to use the route to rank 0"
            )
    return _routed[0] if _routed else None


def find_route(store: Store, world: World) -> None:
    """Find this host's address on its route to rank 0's host, which itself takes the route to
    another host. Collective. Raises LaunchError like `network_in_use`.
    """
    network_in_use()
    _routed.clear()
    if world.one_host:
        return
    served = getattr(base_of(store), "store", None)
    mine, reason = route_source(served.host) if isinstance(served, TCPStore) else None, "rank 0"

    other = ask_rank0(
        store, "address", world, mine, lambda found: [next(filter(None, found), None)] * world.size
    )
    if mine is None and other is not None:
        mine, reason = route_source(other), f"another host, {other}"
    if mine is not None and (interface := find_interface(mine)) is not None:
        _routed.append(Network(interface, mine, f"on the route to {reason}"))


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
    own = psutil.net_if_addrs()
    return next((name for name in own if address in [a.address for a in own[name]]), None)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None
