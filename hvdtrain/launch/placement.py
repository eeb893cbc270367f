"""Free ports, and the variables of ranks that a scheduler has placed: Ray's actors, Spark's tasks.

Used by `supervisor`, `ray` and `spark_task`. Ranks are numbered node by node; rank 0's node and a
free port there are MASTER_ADDR and MASTER_PORT. Imports no torch.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from typing import NamedTuple

PORTS = range(28000, 30000)
"""Below the ports that the kernel gives to clients, above those of a job's id: `rendezvous`."""


def free_port(wanted: int = 0) -> int:
    """Return a port of this host that is free, and that the kernel gives to no client meanwhile:
    `wanted` if it is given, 0 if that is in use.
    """
    while True:
        port = wanted or random.choice(PORTS)
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # left by an ended job
                probe.bind(("", port))
            return port
        except OSError:
            if wanted:
                return 0


class Place(NamedTuple):
    """Where a scheduler has started a process."""

    node: str
    address: str
    port: int
    """One that is free on the node."""
    gpus: list[str]
    """Those that the scheduler has given to this process."""


def number_ranks(places: Sequence[Place]) -> tuple[list[int], list[dict[str, str]]]:
    """Return the processes in the order of their ranks, by their indices in `places`, and the
    environment variables of each rank.

    The GPUs of a rank are those of all ranks on its node, so that they can reach each other.
    """
    nodes = [place.node for place in places]
    order = sorted(range(len(places)), key=lambda k: nodes.index(nodes[k]))
    master = places[order[0]]
    found = []
    for rank, own in enumerate(order):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "MASTER_ADDR": master.address,
            "MASTER_PORT": str(master.port),
        }
        if gpus := [gpu for k in order if nodes[k] == nodes[own] for gpu in places[k].gpus]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        found.append(variables)
    return order, found
