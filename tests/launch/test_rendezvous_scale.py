"""The rendezvous of many ranks without processes: who connects to whom, and rank 0's messages.

Each rank is a thread with the environment of a launcher that does not say which ranks share a host,
which is the most that rank 0 ever serves. It runs the real code on a store in memory that counts.
Run as a program, this file prints the figures of 1,024 ranks.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest.mock import Mock, patch

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.job import rendezvous
from hvdtrain.job.world import World, detect
from hvdtrain.transports import gloo
from tests.launching import variables

T = TypeVar("T")
PER_HOST = 8
_here = threading.local()


def _size_of(part: object) -> int:
    """Return the bytes of the keys and values in the arguments or the result of an operation."""
    if isinstance(part, list | tuple):
        return sum(map(_size_of, part))
    return len(part) if isinstance(part, str | bytes) else 0


def _counted(op: str) -> Any:
    """Return an operation of a store in memory that counts what it has served."""

    def call(store: CountingStore, *args: Any) -> Any:
        result = getattr(HashStore, op)(store, *args)
        request = _here.rank, op, str(args[0])
        store.requests.setdefault(request, _size_of([*args, result]))
        return result

    return call


class CountingStore(HashStore):
    """A store in memory. Its methods run in the thread of the rank that calls."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[tuple[int, str, str], int] = {}
        """The bytes of each, by rank, operation and keys. A repeated one of a rank is a poll."""

    set, get, compare_set, check, wait, multi_get, multi_set = map(
        _counted, "set get compare_set check wait multi_get multi_set".split()
    )

    def counts(self) -> tuple[int, int, int]:
        """Return the messages that rank 0 has served, their bytes, and the messages of the rank,
        but rank 0, that sent most.
        """
        by_rank = Counter(rank for rank, *_ in self.requests if rank > 0)
        return len(self.requests), sum(self.requests.values()), max(by_rank.values())


def on_ranks(size: int, rank_main: Callable[[int], T]) -> list[T]:
    """Call a function for each rank, in a thread of its own."""

    def call(rank: int) -> T:
        _here.rank = rank
        return rank_main(rank)

    with ThreadPoolExecutor(size) as ranks:
        return [*ranks.map(call, range(size))]


def simulate(size: int) -> tuple[int, int, int]:
    """Open a World of `size` ranks; check every rank's, and return what rank 0 has served.

    Every rank connects to the store, and once more to find who shares its host.
    """
    store = CountingStore()
    connect = Mock(return_value=store)
    address = variables("MASTER_ADDR=localhost MASTER_PORT=29500")

    def rank_main(rank: int) -> World:
        env = variables(f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={rank % PER_HOST}")
        world = rendezvous.complete_world(detect(env | address), 60)
        rendezvous.open_store(world, 60)
        return world

    with (
        patch.dict(os.environ, address),
        patch.multiple(
            rendezvous,
            _complete_worlds={},
            _serve=lambda *_: store,
            _connect=connect,
            host_identity=lambda *_: str(_here.rank // PER_HOST),
        ),
    ):
        worlds = on_ranks(size, rank_main)
    hosts = -(-size // PER_HOST)
    for rank, world in enumerate(worlds):
        place = rank % PER_HOST, PER_HOST, rank // PER_HOST, hosts
        assert world == World(rank, size, *place, "env://", world.source)
    places = [call.args[1] for call in connect.call_args_list]
    assert places == [[("localhost", 29500)]] * 2 * (size - 1)
    return store.counts()


@pytest.mark.exhaustive
def test_rank_0_serves_at_most_n_log_n() -> None:
    small, large = 64, 256
    few, many = simulate(small), simulate(large)
    growth = large * math.log2(large) / (small * math.log2(small))
    for before, after, factor in zip(few, many, (growth, growth, 1), strict=True):
        assert after <= factor * before, (few, many)


def simulate_gloo(size: int) -> tuple[int, int, int]:
    """Find the connections of a Gloo group of `size` ranks, of which rank 0 listens: what
    `open_gloo` adds to Gloo's own rendezvous.
    """
    store = CountingStore()
    places = {0: ("10.0.0.1", 40000)}
    pairs = {1: (("10.0.0.2", 5), places[0])}

    def rank_main(rank: int) -> None:
        new = {rank: f"socket:[{rank}]"}
        found = gloo.own_connections(store, rank, size, new, 60)
        assert found._sockets == (new if rank == 1 else {})

    with patch.multiple(gloo, _listening_address=places.get, _address_pair=pairs.get):
        on_ranks(size, rank_main)
    return store.counts()


def test_an_exchange_has_one_value_of_each_rank_and_one_of_rank_0() -> None:
    """Before, each rank of a Gloo group read an address of each pair: 0.8 GB for 256 ranks."""
    for size in (16, 64):
        messages, num_bytes, _ = simulate_gloo(size)
        assert messages == 3 * size + 1
        assert num_bytes <= 10 * size**2


if __name__ == "__main__":
    print(simulate(1024))
    print(simulate_gloo(1024))
