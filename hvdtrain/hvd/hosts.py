"""Horovod's `horovod.runner.common.util.hosts`: hosts, their slots, and the ranks in them.

For scripts that import it, and for `hvd.runner`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.launch.host_list import parse_host_file


class HostInfo:
    """A host and its number of process slots."""

    def __init__(self, hostname: str, slots: int) -> None:
        self.hostname = hostname
        self.slots = slots

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Read "host:slots". Raises ValueError for anything else."""
        hostname, slots = host_string.strip().split(":")
        return HostInfo(hostname, int(slots))


@dataclass
class SlotInfo:
    """A rank's host, and its global, local and cross numbers."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Return the numbers in the reply format of Horovod's rendezvous server."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank)
        return ",".join(map(str, (*numbers, self.cross_size)))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_host_files(filename: str) -> str:
    """Return the lines "host slots=n" of a file as "host:n,host:n".

    Unlike Horovod's, it accepts comments, empty lines and hosts without slots, which have one, and
    the other forms of `hvdtrain launch --hostfile`. Raises InputError for a file without hosts.
    """
    return ",".join(map(str, parse_host_file(Path(filename).read_text(), filename)))


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Return the host names, and the slots by name, of "host:n,host:n". Raises ValueError."""
    pairs = [host.strip() for host in hosts.split(",")]
    if not all(re.match(r"^[\w.-]+:[0-9]+$", pair) for pair in pairs):
        raise ValueError(
            "Invalid host input, please make sure it has format as : worker-0:2,worker-1:2."
        )
    parsed = [HostInfo.from_string(pair) for pair in pairs]
    return [host.hostname for host in parsed], {host.hostname: host.slots for host in parsed}


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Return the hosts of "host:n,host:n"."""
    return [HostInfo.from_string(host) for host in hosts_string.split(",")]


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Assign ranks to slots, host after host, up to `max_num_proc`.

    Raises ValueError if there are fewer slots than `min_num_proc`.
    """
    room = sum(host.slots for host in hosts)
    size = room if max_num_proc is None else min(room, max_num_proc)
    if size < min_num_proc:
        raise ValueError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({size})"
        )
    counts: list[int] = []
    for host in hosts:
        counts.append(min(host.slots, size - sum(counts)))
    return [
        SlotInfo(
            host.hostname,
            rank=sum(counts[:i]) + local_rank,
            local_rank=local_rank,
            # The number of hosts before this one that have a process of this local rank.
            cross_rank=sum(n > local_rank for n in counts[:i]),
            size=size,
            local_size=counts[i],
            cross_size=sum(n > local_rank for n in counts),
        )
        for i, host in enumerate(hosts)
        for local_rank in range(counts[i])
    ]
