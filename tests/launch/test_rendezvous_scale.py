"""The rendezvous of many ranks without processes: who connects to whom, and rank 0's messages.

Each rank is a thread with the environment of a launcher that does not say which ranks share a host,
which is the most that rank 0 ever serves. It runs the real code on a store in memory that counts.
Run as a program, this file prints the figures of 1,024 ranks.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from hvdtrain.job import rendezvous
from hvdtrain.job.world import World, detect
from hvdtrain.transports import gloo
from hvdtrain.transports.gloo import own_connections

PER_HOST = 8
_here = threading.local()


@dataclass
class Counted:
    """What rank 0's store has served. A repeated request of the same rank is a poll."""

    messages: int = 0
    bytes: int = 0
    most_of_a_rank: int = 0
    """Messages of the rank, but rank 0, that sent most."""
    connections: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By address."""


def _size_of(part: object) -> int:
    """Return the bytes of the keys and values in the arguments or the result of an operation."""
    if isinstance(part, list | tuple):
        return sum(map(_size_of, part))
    return len(part) if isinstance(part, str | bytes) else 0


def _counted(op: str) -> Any:
    """Return an operation of the store in memory that counts."""

    def call(store: CountingStore, keys: Any, *values: Any) -> Any:
        result = getattr(store._store, op)(keys, *values)
        store.count(op, keys, [values, result])
        return result

    return call


class CountingStore(Store):
    """A store in memory. Its methods run in the thread of the rank that calls."""

    port = 1

    def __init__(self) -> None:
        super().__init__()
        self._store: Any = HashStore()
        self._lock = threading.Lock()
        self._requests: Counter[tuple[int, str, str]] = Counter()
        self.counted = Counted()

    def count(self, op: str, keys: Any, sent: object) -> None:
        request = _here.rank, op, str(keys)
        with self._lock:
            self._requests[request] += 1
            if self._requests[request] == 1:
                self.counted.messages += 1
                self.counted.bytes += _size_of(keys) + _size_of(sent)

    def finish(self) -> Counted:
        """Return the counts at the end."""
        by_rank = Counter(rank for rank, *_ in self._requests if rank > 0)
        self.counted.most_of_a_rank = max(by_rank.values())
        return self.counted

    set, get, compare_set, check, wait, multi_get, multi_set = map(
        _counted, "set get compare_set check wait multi_get multi_set".split()
    )

    def has_extended_api(self) -> bool:
        return True


def simulate(size: int) -> Counted:
    """Open a World of `size` ranks; check every rank's, and return what rank 0 has served."""
    store = CountingStore()

    def connect(world: World, places: list[tuple[str, int]], *_: object) -> Store:
        with store._lock:
            store.counted.connections[places[0]] += 1
        return store

    def rank_main(rank: int) -> World:
        _here.rank = rank
        env = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % PER_HOST)}
        world = rendezvous.complete_world(detect({**env, **address}), 60)
        rendezvous.open_store(world, 60)
        return world

    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in address.items():
            patch.setenv(name, value)
        patch.setattr(rendezvous, "_complete_worlds", {})
        patch.setattr(rendezvous, "_serve", lambda *_: store)
        patch.setattr(rendezvous, "_connect", connect)
        patch.setattr(rendezvous, "host_identity", lambda *_: str(_here.rank // PER_HOST))
        with ThreadPoolExecutor(size) as ranks:
            worlds = [*ranks.map(rank_main, range(size))]
    hosts = -(-size // PER_HOST)
    for rank, world in enumerate(worlds):
        place = world.local_rank, world.local_size, world.cross_rank, world.cross_size
        assert (world.rank, world.size) == (rank, size)
        assert place == (rank % PER_HOST, PER_HOST, rank // PER_HOST, hosts)
    return store.finish()


@pytest.mark.exhaustive
def test_rank_0_serves_at_most_n_log_n() -> None:
    small, large = 64, 256
    few, many = simulate(small), simulate(large)
    growth = large * math.log2(large) / (small * math.log2(small))
    assert many.messages <= growth * few.messages, (few, many)
    assert many.bytes <= growth * few.bytes, (few, many)
    assert many.most_of_a_rank <= few.most_of_a_rank, (few, many)
    # Every rank connects to the store, and once more to find who shares its host.
    assert [*many.connections.values()] == [2 * (large - 1)], many


def simulate_gloo(size: int) -> Counted:
    """Find the connections of a Gloo group of `size` ranks, each with one place where it listens:
    what `open_gloo` adds to Gloo's own rendezvous.
    """
    store = CountingStore()

    def rank_main(rank: int) -> None:
        _here.rank = rank
        connections = {rank: f"socket:[{rank}]"}
        found = own_connections(store, rank, size, connections, 60)
        assert found._sockets == (connections if rank == 1 else {})

    places = {0: ("10.0.0.1", 40000)}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as ranks:
        patch.setattr(gloo, "_listening_address", places.get)
        patch.setattr(gloo, "_address_pair", {1: (("10.0.0.2", 5), places[0])}.get)
        list(ranks.map(rank_main, range(size)))
    return store.finish()


def test_an_exchange_has_one_value_of_each_rank_and_one_of_rank_0() -> None:
    """Before, each rank of a Gloo group read an address of each pair: 0.8 GB for 256 ranks."""
    for size in (16, 64):
        counted = simulate_gloo(size)
        assert counted.messages == 3 * size + 1, counted
        assert counted.bytes <= 10 * size**2, counted


if __name__ == "__main__":
    print(simulate(1024))
    print(simulate_gloo(1024))
