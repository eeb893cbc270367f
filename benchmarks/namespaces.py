"""Hosts for the benchmarks: network namespaces whose links have a limited rate, and a delay.

Linux, as root, with a C compiler. `switch.c` is the network: a process that passes frames between
the hosts' eth0, which are TAP devices. Neither netem nor a bridge is needed. It takes a tenth of a
core for each link that is full in both directions, most of it in the kernel. The kernel counts each
link's bytes; frames have up to 64 KB, so nearly none of them are headers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_PORT = 29700
_PINGS = 50
_WARM_S, _STREAM_S = 0.5, 1.5  # TCP's slow start does not count
# A host name of its own, because Open MPI names the files of a host after it.
ENTER = """\
#!/bin/sh
name=$1; shift
exec ip netns exec $name unshare --uts sh -c '
hostname "$0"
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
exec sh -c "$*"' $name "$@"
"""


@dataclass
class Hosts:
    """Running hosts: their names, and how to run a command on one."""

    names: list[str]
    enter: Path
    """A program `enter HOST COMMAND...`, which mpirun can use instead of ssh."""
    switch: psutil.Process


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def link_bytes() -> tuple[int, int]:
    """Return the bytes that this namespace's link has sent and received; 0 without a link."""
    folder = Path("/sys/class/net/eth0/statistics")
    if not folder.exists():
        return 0, 0
    sent, received = (int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextlib.contextmanager
def running_hosts(n: int, rate_mbit: float, delay_ms: float = 0) -> Iterator[Hosts]:
    """Make `n` hosts, and remove them at the end. The delay is that of each direction."""
    names = [f"hvdb{i}" for i in range(n)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        switch, enter = Path(folder) / "switch", Path(folder) / "enter"
        sh(f"cc -O2 -o {switch} {Path(__file__).with_name('switch.c')}")
        # No DNS, and no waiting for it: torch looks up the name of every address.
        known = "".join(f"{address(i)} {name}\n" for i, name in enumerate(names))
        (Path(folder) / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        (Path(folder) / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        enter.write_text(ENTER.format(folder=folder))
        enter.chmod(0o755)
        line = [str(switch), str(rate_mbit * 1e6), str(delay_ms / 1000), *names]
        process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            sys.exit("no TAP devices here")
        for i, name in enumerate(names):
            sh(f"ip netns add {name}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name])
            sh(f"ip link set {name} address 02:00:00:00:00:{i + 1:02x}")
            sh(f"ip link set {name} netns {name} name eth0")
            sh(f"ip -n {name} address add {address(i)}/24 dev eth0")
            sh(f"ip -n {name} link set lo up")
            sh(f"ip -n {name} link set eth0 up")
            sh(f"ip -n {name} route add default via {address(i)}")
        yield Hosts(names, enter, psutil.Process(process.pid))


def measure_links(hosts: Hosts) -> dict[str, Any]:
    """Return what the links give while each host sends a TCP stream to the next one, all at once:
    the slowest stream, the median round trip before, and the CPU time of the switch.
    """
    n, begin, cpu = len(hosts.names), time.monotonic(), sum(hosts.switch.cpu_times()[:2])
    processes = []
    for i, name in enumerate(hosts.names):
        inside = f"timeout 60 ip netns exec {name}".split()
        command = [*inside, sys.executable, __file__, str(i), str(n)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    found = [json.loads(process.communicate()[0]) for process in processes]
    taken = sum(hosts.switch.cpu_times()[:2]) - cpu
    return {
        "stream_mbit": min(mbit for mbit, _ in found),
        "round_trip_ms": statistics.median(ms for _, ms in found),
        "switch_cores": taken / (time.monotonic() - begin),
    }


def _stream(host: int, n: int) -> tuple[float, float]:
    """On a host: send to the next one, receive from the one before. Return Mbit/s and ms."""
    received: list[float] = []

    def receive() -> None:
        connection = server.accept()[0]
        for _ in range(_PINGS):
            connection.sendall(connection.recv(1))
        count, buffer, begin = 0, bytearray(1 << 18), time.monotonic() + _WARM_S
        while got := connection.recv_into(buffer):
            if (now := time.monotonic()) > begin:
                count += got
        received.append(8e-6 * count / (now - begin))

    with socket.create_server(("", _PORT)) as server:
        thread = threading.Thread(target=receive)
        thread.start()
        client = _connect((host + 1) % n)
        pings = []
        for _ in range(_PINGS):
            begin = time.monotonic()
            client.sendall(b"x")
            client.recv(1)
            pings.append(time.monotonic() - begin)
        chunk, end = bytes(1 << 18), time.monotonic() + _WARM_S + _STREAM_S
        while time.monotonic() < end:
            client.sendall(chunk)
        client.shutdown(socket.SHUT_WR)
        thread.join()
    return received[0], 1000 * statistics.median(pings)


def _connect(host: int) -> socket.socket:
    for _ in range(100):
        with contextlib.suppress(OSError):
            client = socket.create_connection((address(host), _PORT), 5)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return client
        time.sleep(0.1)
    raise TimeoutError(f"{address(host)} does not answer")


if __name__ == "__main__":
    print(json.dumps(_stream(int(sys.argv[1]), int(sys.argv[2]))))
