"""Checks of `hvdtrain doctor`: the names and interfaces by which ranks reach each other."""

from __future__ import annotations

import os
import re
import socket

import psutil

from hvdtrain.doctor.finding import Finding
from hvdtrain.errors import LaunchError
from hvdtrain.job.addresses import find_interface, is_local, own_addresses
from hvdtrain.job.world import World

# Variables that name interfaces, separated by commas, and whether a name's beginning suffices.
_NAME_AN_INTERFACE = {
    "GLOO_SOCKET_IFNAME": False,
    "HOROVOD_GLOO_IFACE": False,
    "NCCL_SOCKET_IFNAME": True,
    "TP_SOCKET_IFNAME": False,
    "OMPI_MCA_btl_tcp_if_include": False,
    "OMPI_MCA_oob_tcp_if_include": False,
}
_FIRST_OF_TWO_HOSTS = World(0, 2, 0, 1, 0, 2)


def host_name(ranks: int) -> Finding:
    """Resolve this host's own name."""
    name, outside = socket.gethostname(), outside_address()
    # Move the name from loopback to the address. Not `sed -i`: /etc/hosts is a mount in containers.
    move = rf"/^(127\.|::1)/ s/\s{re.escape(name)}(\s|$)/ /g; 1i {outside} {name}"
    line = f"hosts=$(sed -E '{move}' /etc/hosts) && echo \"$hosts\" > /etc/hosts"
    fix = line if outside else ""
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return Finding("warning", f"{name} does not resolve ({error.strerror})", fix)
    found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    text = f"{name} resolves to {', '.join(found)}"
    if not is_local(found[0]):  # Gloo binds to the first
        return Finding("ok", text)
    if not outside:
        return Finding("note", f"{text}; this host has no other address")
    text += (
        f", which other hosts cannot reach; hvdtrain gives them {outside}, but real Horovod and "
        "plain torch scripts give them the name"
    )
    return Finding("warning", text, fix)


def interface(ranks: int) -> Finding:
    """List the interfaces, and the one that ranks on other hosts reach."""
    listed = ", ".join(interfaces())
    address = outside_address()
    if address is None:
        return Finding("note", f"none that other hosts can reach: {listed}; enough for one host")
    by_variable = os.environ.get("GLOO_SOCKET_IFNAME")
    chosen = by_variable or find_interface(address)
    why = "GLOO_SOCKET_IFNAME" if by_variable else address
    return Finding("ok", f"{chosen} ({why}) is used between hosts; interfaces up: {listed}")


def interface_variables(ranks: int) -> Finding:
    """Find variables that name an interface which is missing or down."""
    present = interfaces()
    given = {name: os.environ[name] for name in _NAME_AN_INTERFACE if os.environ.get(name)}
    for variable, value in given.items():
        for name in value.removeprefix("=").split(","):
            starts = _NAME_AN_INTERFACE[variable] and not value.startswith("=")
            known = any(own.startswith(name) if starts else own == name for own in present)
            if known or value.startswith("^") or "/" in name:  # NCCL's "not", MPI's subnets
                continue
            up = ", ".join(present)
            text = f"{variable}={value}: no interface {name} is up; interfaces up: {up}"
            return Finding("failure", text, f"unset {variable}")
    return Finding("ok", ", ".join(f"{n}={v}" for n, v in given.items()) or "none is set")


def interfaces() -> list[str]:
    """Return the names of the interfaces that are up."""
    return [name for name, state in psutil.net_if_stats().items() if state.isup]


def outside_address() -> str | None:
    """Return the IP address by which other hosts reach this one; None without any."""
    try:
        addresses = own_addresses(_FIRST_OF_TWO_HOSTS)
    except LaunchError:
        return None
    return next((address for address in addresses if find_interface(address)), None)
