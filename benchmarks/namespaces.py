"""Hosts for the benchmarks: network namespaces on a bridge, each with a link of a limited rate.

Linux, as root. tc tbf limits both directions of a link, and the kernel counts its bytes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path


def link_bytes() -> tuple[int, int]:
    """Return the bytes that this namespace's link has sent and received; 0 without a link."""
    folder = Path("/sys/class/net/eth0/statistics")
    if not folder.exists():
        return 0, 0
    sent, received = (int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


def make_hosts(n: int, rate_mbit: int) -> list[str]:
    """Make `n` namespaces on a bridge; return their names."""
    names = [f"hvdb{i}" for i in range(n)]
    sh("ip link add hvdb type bridge")
    sh("ip link set hvdb up")
    limit = f"root tbf rate {rate_mbit}mbit burst 64kb latency 1s"
    for i, name in enumerate(names):
        sh(f"ip netns add {name}")
        sh(f"ip link add hvdb{i} type veth peer name eth0 netns {name}")
        sh(f"ip link set hvdb{i} master hvdb up")
        sh(f"ip -n {name} address add 10.77.0.{i + 1}/24 dev eth0")
        sh(f"ip -n {name} link set lo up")
        sh(f"ip -n {name} link set eth0 up")
        sh(f"ip -n {name} route add default via 10.77.0.{i + 1}")
        sh(f"tc qdisc add dev hvdb{i} {limit}")
        sh(f"ip netns exec {name} tc qdisc add dev eth0 {limit}")
    return names


def remove_hosts(n: int) -> None:
    for i in range(n):
        subprocess.run(["ip", "netns", "del", f"hvdb{i}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"hvdb{i}"], capture_output=True)
    subprocess.run(["ip", "link", "del", "hvdb"], capture_output=True)
