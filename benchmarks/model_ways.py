"""How long an all-reduce of K bytes takes, on H hosts with L ranks each, N = H L in all.

    gloo     a ring over all ranks (gloo/allreduce.cc): 2 (N - 1) messages of K / N; H of its N
             edges are between hosts
    shm      small: two waits on each host, and one message from each host to each other. Large:
             each rank reads and writes K once, and sends 2 (H - 1) / H K / L, in two all_to_alls
             of H - 1 messages (gloo/alltoallv.cc: all at once), in pieces: while one is on the
             network, the host works on the next. The L ranks of a host share its link
    mpi4py   the same with Open MPI's messages between hosts
    raw      Open MPI's Allreduce: recursive doubling, trees or Rabenseifner's algorithm, by the
             rules of coll_tuned_decision_fixed.c in 4.1. Its halving begins with neighbours
             (coll_base_allreduce.c), so a host sends 2 (H - 1) / H K, as with shm

Each way is a sum of terms: an amount (waits, messages, bytes) times a cost. `model.py` uses them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

# Open MPI's messages of so many bytes, within a host and between two, begin with a handshake.
EAGER, EAGER_BETWEEN = 4 << 10, 64 << 10
CACHED = 32 << 20  # bytes of a host's tensors that its caches keep between two operations
# Of hvdtrain/transports/hosts.py: the message in which hosts compare calls, the room in it for a
# sum; what is sent whole; pieces. A piece is on the network while the one before is.
MESSAGE, SUM, WHOLE, PIECE, IN_FLIGHT = 2048, 1984, 64 << 10, 1 << 20, 2
Terms = dict[str, float]  # how much of each cost; of "s" seconds
Costs = dict[str, float]


@dataclass(frozen=True)
class Network:
    """Between hosts: latency and core time of a message, bytes per second of a rank, of a host."""

    latency_s: float
    overhead_s: float
    stream: float
    link: float


@dataclass(frozen=True)
class Cluster:
    """Hosts with as many ranks each. `beside` ranks share cores: those of a host, or of all."""

    hosts: int
    per_host: int
    beside: int
    cores: int
    tcp: Network
    mpi: Network

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def turns(self) -> float:
        """How many ranks each core runs, one after another."""
        return max(1.0, self.beside / self.cores)


def total(*terms: Terms) -> Terms:
    found: Terms = defaultdict(float)
    for name, amount in (item for part in terms for item in part.items()):
        found[name] += amount
    return found


def gloo(c: Cluster, size: int, costs: Costs) -> Terms:
    number, each = 2 * (c.ranks - 1), size / c.ranks
    terms: Terms = {"gloo_message": number * c.turns, "gloo_byte": number * each * c.turns}
    if c.hosts > 1:  # of its L edges a host has one that leaves it; the slowest sets the pace
        terms["gloo_message"] *= 1 - 1 / c.per_host
        terms["s"] = number * c.tcp.latency_s / c.per_host
        wire_s = number * each / min(c.tcp.stream, c.tcp.link)
        terms["s"] += max(0.0, wire_s - terms["gloo_byte"] * costs["gloo_byte"])
    return terms


def shm(c: Cluster, size: int, costs: Costs, is_mpi: bool = False) -> Terms:
    wait: Terms = {"sync": c.turns, "switch": max(0, c.beside - c.cores)}
    added: Terms = {"small_byte": (c.beside + 2 * c.turns) * size}
    memory: Terms = {"memory_byte": 2 * c.beside * size}
    if c.hosts == 1:
        is_small = size <= max((2 << 20) // c.ranks, 64 << 10)
        return total(wait, added) if is_small else total(wait, wait, memory)
    net, others = c.mpi if is_mpi else c.tcp, c.hosts - 1
    exchange_s = net.latency_s + others * net.overhead_s
    compare: Terms = {"s": exchange_s + others * MESSAGE / net.link}
    if size <= SUM:
        return total(wait, wait, compare, added)
    share = size / c.per_host
    is_whole = c.hosts == 2 or c.hosts * share <= WHOLE
    part = min(share, PIECE) / (1 if is_whole else c.hosts)
    if is_mpi and part >= EAGER_BETWEEN:
        exchange_s += 2 * net.latency_s
    latency_s = exchange_s * (1 if is_whole else 2)
    sent = others * share * (1 if is_whole else 2 / c.hosts)
    wire_s = sent * max(1 / net.stream, c.per_host / net.link)
    pieces, memory_s = math.ceil(share / PIECE), memory["memory_byte"] * costs["memory_byte"]
    busy_s = max(wire_s, memory_s, pieces * latency_s / IN_FLIGHT)
    # The network starts when the first piece is added up, and the last is written when it is done.
    large: Terms = {"s": latency_s + busy_s + min(wire_s, memory_s) / pieces}
    return total(wait, wait, wait, compare, large)


def mpi4py(c: Cluster, size: int, costs: Costs) -> Terms:
    return shm(c, size, costs, is_mpi=True)


HALVING = [(math.inf, "halving")]
RULES: list[tuple[int, list[tuple[float, str]]]] = [  # below so many ranks: below so many bytes
    (4, [(4096, "doubling"), (8192, "ring"), (16384, "doubling"), (262144, "ring"), *HALVING]),
    (16, [(8192, "doubling"), *HALVING]),
    (32, [(4096, "doubling"), *HALVING]),
    (64, HALVING),
    (128, [(262144, "doubling"), *HALVING]),
    (256, [(131072, "tree"), (262144, "doubling"), *HALVING]),
    (512, [(4096, "tree"), *HALVING]),
    (2048, [(2048, "tree"), (16384, "doubling"), *HALVING]),
]  # of tensors of 128 bytes and more; a ring is chosen for two ranks only


def raw(c: Cluster, size: int, costs: Costs) -> Terms:
    """Return Open MPI's terms, for a power of two of ranks: messages at distance 1, 2, 4 ..."""
    rules = next(rules for below, rules in RULES if c.ranks < below)
    how = next(how for below, how in rules if size < below)
    number = 1 if how == "doubling" else 2  # a reduction, and its result the same way back
    byte = "mpi_byte_cached" if c.beside * size <= CACHED else "mpi_byte"
    terms: Terms = defaultdict(float)
    for distance in (1 << k for k in range(int(math.log2(c.ranks)))):
        sent = size if how in ("doubling", "tree") else size / 2 / distance
        if distance < c.per_host:
            terms["mpi_message"] += number * c.turns * (3 if sent >= EAGER else 1)
            terms[byte] += number * sent * c.beside
        else:
            senders = 1 if how == "tree" else c.per_host
            wire_s = sent * max(1 / c.mpi.stream, senders / c.mpi.link)
            terms["s"] += number * (c.mpi.latency_s * (3 if sent >= EAGER_BETWEEN else 1) + wire_s)
    return terms


WAYS: dict[str, Callable[[Cluster, int, Costs], Terms]]
WAYS = {"gloo": gloo, "shm": shm, "mpi4py": mpi4py, "raw": raw}


def ms(way: str, c: Cluster, size: int, costs: Costs) -> float:
    return 1000 * sum(costs[name] * amount for name, amount in WAYS[way](c, size, costs).items())
