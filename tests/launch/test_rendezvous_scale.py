"""The rendezvous of many ranks without processes: who connects to whom, and rank 0's messages.

Each rank is a thread with a launcher's environment, which runs the real code on a store in memory
that counts. Run as a program, this file prints the figures of 1,024 ranks under every launcher.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

import hvdtrain.world
from hvdtrain import elastic_world, rendezvous
from hvdtrain.world import LAUNCHERS, World, detect

PER_HOST = 8
# What a launcher sets equally for all ranks
COMMON = {
    "torchrun": {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    },
    "env://": {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    "horovodrun": {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "driver",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "1",
    },
    "flux": {"FLUX_JOB_ID": "f1"},
    "srun": {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[0-999]"},
}

_here = threading.local()


@dataclass
class Counted:
    """What rank 0's store has served. A repeated request of the same rank is a poll."""

    messages: int = 0
    bytes: int = 0
    polls: int = 0
    most_of_a_rank: int = 0
    """Messages of the rank, but rank 0, that sent most."""
    connections: Counter[str] = field(default_factory=Counter)
    """By host."""

    def __str__(self) -> str:
        to = ", ".join(f"{n} to {host}" for host, n in self.connections.items())
        return (
            f"{self.messages:8} {self.bytes:10} {self.most_of_a_rank:8} {self.polls:8}  "
            f"connections: {to}"
        )


class CountingStore(Store):
    """A store in memory. Its methods run in the thread of the rank that calls."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._requests: Counter[tuple[int, str, str, int]] = Counter()
        self.counted = Counted()

    def _count(self, op: str, keys: Sequence[str], values: Sequence[bytes] = ()) -> None:
        request = _here.rank, op, keys[0], len(keys)
        with self._lock:
            self._requests[request] += 1
            if self._requests[request] > 1:
                self.counted.polls += 1
                return
            self.counted.messages += 1
            self.counted.bytes += sum(map(len, keys)) + sum(map(len, values))

    def finish(self) -> Counted:
        """Return the counts at the end."""
        by_rank = Counter(rank for rank, *_ in self._requests if rank > 0)
        self.counted.most_of_a_rank = max(by_rank.values())
        return self.counted

    def _event(self, key: str) -> threading.Event:
        with self._lock:
            return self._changed.setdefault(key, threading.Event())

    def _put(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._event(key).set()

    def _await(self, keys: Sequence[str], timeout_s: float = 60.0) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        for key in keys:
            if not self._event(key).wait(max(0.0, deadline - time.monotonic())):
                raise DistStoreError(f"wait timeout: {key}")
        return [self._values[key] for key in keys]

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._count("set", [key], [value])
        self._put(key, value)

    def get(self, key: str) -> bytes:
        (value,) = self._await([key])
        self._count("get", [key], [value])
        return value

    def compare_set(  # type: ignore[override]
        self, key: str, expected: bytes, desired: bytes
    ) -> bytes:
        with self._lock:
            value = self._values.setdefault(key, bytes(desired))
        self._event(key).set()
        self._count("compare_set", [key], [expected, desired, value])
        return value

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys)
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._await(keys, timeout.total_seconds())
        self._count("wait", keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._await(keys)
        self._count("multi_get", keys, values)
        return values

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)
        self._count("multi_set", keys, values)

    def has_extended_api(self) -> bool:
        return True


def environment(launcher: str, rank: int, size: int) -> dict[str, str]:
    """Return what a launcher sets for a rank of a job with PER_HOST ranks on every host."""
    row = next(row for row in LAUNCHERS if row.name == launcher)
    hosts = -(-size // PER_HOST)
    values = {
        row.rank: rank,
        row.size: size,
        row.local_rank: rank % PER_HOST,
        row.local_size: f"{PER_HOST}(x{hosts})" if launcher == "srun" else PER_HOST,
        row.cross_rank: rank // PER_HOST,
        row.cross_size: hosts,
    }
    set_by_row = {name: str(value) for name, value in values.items() if name}
    return {**COMMON.get(launcher, {}), **set_by_row}


@dataclass
class Message:
    """What rank 0 sends to all ranks past its store: by MPI_Ibcast, or horovodrun's server."""

    text: bytes = b""
    is_sent: threading.Event = field(default_factory=threading.Event)

    def exchange(self, text: bytes) -> bytes:
        if text:
            self.text = text
            self.is_sent.set()
        assert self.is_sent.wait(60), "rank 0 has sent no message"
        return self.text


class Mpi:
    """What the rendezvous uses of `mpi4py.MPI`. The communicator is the module, too."""

    BYTE = None

    def __init__(self, message: Message) -> None:
        self.COMM_WORLD = self
        self._message = message

    def Ibcast(self, data: list[Any], root: int) -> Any:
        buffer = data[0]
        buffer[:] = self._message.exchange(bytes(buffer) if _here.rank == root else b"")
        return SimpleNamespace(Test=lambda: True)


class RequestOfRank:
    """`rendezvous._broadcast`, the request of a process, for each thread."""

    def __bool__(self) -> bool:
        return bool(_here.request)

    def __iter__(self) -> Iterator[Any]:
        return iter(_here.request)

    def extend(self, request: tuple[Any, Any]) -> None:
        _here.request = request


@contextmanager
def memory(launcher: str, patch: pytest.MonkeyPatch) -> Iterator[CountingStore]:
    """Replace what leaves the process: the store of rank 0, MPI, HTTP and the command `flux`."""
    store = CountingStore()
    message = Message()

    def connect(world: World, places: list[tuple[str, int]], *_: object) -> Store:
        _here.is_connected = True
        with store._lock:
            store.counted.connections[places[0][0]] += 1
        return store

    def serve(*_: object) -> Any:
        return store

    for name, value in COMMON.get(launcher, {}).items():
        patch.setenv(name, value)
    for name in ("_published_by", "_served_at", "_completed"):
        patch.setattr(rendezvous, name, {})
    patch.setattr(hvdtrain.world, "_launch_env", {})
    patch.setattr(store.__class__, "port", 1, raising=False)
    patch.setattr(rendezvous, "_serve", serve)
    patch.setattr(rendezvous, "_connect", connect)
    patch.setattr(rendezvous, "own_addresses", lambda world: ["rank0"])
    patch.setattr(rendezvous, "host_identity", lambda *_: str(_here.rank // PER_HOST))
    patch.setattr(elastic_world, "request", lambda path, text=b"": message.exchange(text))
    patch.setattr(rendezvous, "_first_flux_host", lambda *_: "node0")
    patch.setattr(rendezvous, "load_mpi", lambda _: Mpi(message))
    patch.setattr(rendezvous, "_broadcast", RequestOfRank())
    yield store


def simulate(launcher: str, size: int) -> Counted:
    """Open a World of `size` ranks; check every rank's, and return what rank 0 has served."""

    def rank_main(rank: int) -> World:
        _here.rank, _here.request = rank, ()
        world = rendezvous.complete_world(detect(environment(launcher, rank, size)), 60)
        rendezvous.open_store(world, 60)
        return world

    with pytest.MonkeyPatch.context() as patch, memory(launcher, patch) as store:
        with ThreadPoolExecutor(size) as ranks:
            worlds = [*ranks.map(rank_main, range(size))]
        counted = store.finish()
    hosts = -(-size // PER_HOST)
    for rank, world in enumerate(worlds):
        place = world.local_rank, world.local_size, world.cross_rank, world.cross_size
        assert (world.rank, world.size, world.launcher) == (rank, size, launcher)
        assert place == (rank % PER_HOST, PER_HOST, rank // PER_HOST, hosts)
    return counted


# Of each way to the address of rank 0 one launcher in `make test`.
FIRST = ("env://", "openmpi", "srun")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(row.name, marks=() if row.name in FIRST else pytest.mark.exhaustive)
        for row in LAUNCHERS
    ],
)
def test_rank_0_serves_at_most_n_log_n(launcher: str) -> None:
    small, large = 64, 256
    few, many = simulate(launcher, small), simulate(launcher, large)
    growth = large * math.log2(large) / (small * math.log2(small))
    assert many.messages <= growth * few.messages, (few, many)
    assert many.bytes <= growth * few.bytes, (few, many)
    assert many.most_of_a_rank <= few.most_of_a_rank, (few, many)
    # Every rank connects to one place, that of the store: once more to find who shares its host.
    (opened,) = many.connections.values()
    clients = large if launcher == "torchrun" else large - 1  # torchrun's agent serves rank 0, too
    assert opened == (2 * clients if launcher in ("env://", "jsrun", "flux") else clients), many


def main() -> None:
    """Print the figures."""
    print("launcher   messages      bytes  of a rank   polls")
    for row in LAUNCHERS:
        begin = time.monotonic()
        print(f"{row.name:10} {simulate(row.name, 1024)}  ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    main()
