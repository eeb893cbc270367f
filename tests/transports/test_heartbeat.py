"""What is known of other hosts' ranks, and of ranks that come at the last moment; and what a
transport is made of: descriptors, semaphores, connections.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.transports import heartbeat, shm_sync
from hvdtrain.transports.gloo import open_gloo
from hvdtrain.transports.heartbeat import (
    ALIVE,
    ENDED,
    HERE,
    STOPPED,
    Heartbeat,
    HeartbeatTable,
    RankStatus,
)
from hvdtrain.transports.shm_buffers import MOVE_BYTES, SharedBuffers
from tests.launching import wait_until


def table_of(hosts: list[list[int]], own_host: int) -> HeartbeatTable:
    memory = memoryview(bytearray(HeartbeatTable.size_bytes(sum(map(len, hosts)))))
    return HeartbeatTable(memory, hosts, own_host)


SILENT_S = heartbeat._SILENT_S + 0.1


@pytest.mark.parametrize(
    ("lives", "age_s", "leader_goes_on", "known"),
    [
        ([STOPPED, ENDED], 0.0, False, {2: STOPPED, 3: ENDED}),
        # Where this host's leader has ended: what is known for good.
        ([STOPPED, ENDED], SILENT_S, False, {3: ENDED}),
        # A leader without a heartbeat for two seconds is taken as stopped.
        ([ALIVE, ALIVE], 1.9, True, {2: ALIVE, 3: ALIVE}),
        ([ALIVE, ALIVE], 2.1, True, {2: STOPPED, 3: ALIVE}),
    ],
)
def test_what_is_known_of_another_hosts_ranks(
    lives: list[int],
    age_s: float,
    leader_goes_on: bool,
    known: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now_s * 1e9))
    table = table_of([[0, 1], [2, 3]], 0)
    for rank, life in enumerate([ALIVE, ALIVE, *lives]):
        table.write(rank, RankStatus(5, HERE, life))
    now_s += age_s
    if leader_goes_on:
        table.write(0, RankStatus(5, HERE))
    expected = {rank: RankStatus(5, HERE, life) for rank, life in known.items()}
    assert table.remote_status() == expected


@contextmanager
def descriptors(limit: int, taken: int = 0) -> Iterator[list[int]]:
    """A limit on the descriptors of this process; yield so many that are open, if there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    opened: list[int] = []
    try:
        with suppress(OSError):  # until there are too many
            while len(opened) < taken:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        yield opened
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def large() -> torch.Tensor:
    return torch.zeros(MOVE_BYTES, dtype=torch.uint8)


def is_moved(t: torch.Tensor, buffers: SharedBuffers) -> bool:
    """Use a tensor twice; return whether it is in shared memory then."""
    buffers.prepare(t)
    buffers.prepare(t)
    return buffers.find(t) is not None


def test_all_groups_together_take_a_quarter_of_the_descriptors() -> None:
    groups = [SharedBuffers(), SharedBuffers()]
    tensors = [large() for _ in range(24)]
    with descriptors(8 * 10):
        assert sum(is_moved(t, buffers) for t in tensors for buffers in groups) == 10
        assert groups[0].allocate(100) is None
    for buffers in groups:
        buffers.close()


@pytest.mark.parametrize(("left", "moves"), [(0, False), (1, False), (2, True)])
def test_a_rank_without_descriptors_copies(left: int, moves: bool) -> None:
    """It raised before it came to the barrier, where the others waited for it."""
    buffers, t = SharedBuffers(), large()
    buffers.prepare(t)
    used = [int(name) for name in os.listdir("/proc/self/fd")]
    with descriptors(max(used) + 64, taken=1000) as taken:
        for _ in range(left):
            os.close(taken.pop())
        buffers.prepare(t)
    assert (buffers.find(t) is not None) == moves
    buffers.close()


@pytest.mark.parametrize("room", [3, 4])
def test_a_rank_moves_a_tensor_if_all_ranks_of_its_host_may(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All find the same room free; torch below 2.10 writes beyond it, which is SIGBUS."""
    size = SimpleNamespace(f_bavail=room, f_frsize=MOVE_BYTES)
    monkeypatch.setattr(os, "statvfs", lambda path: size)
    with subprocess.Popen(["sleep", "1000"]) as one, subprocess.Popen(["sleep", "1000"]) as other:
        peers = [shm_sync._watch(process.pid) for process in (one, other)]
        buffers = SharedBuffers()
        moved = is_moved(large(), buffers)
        one.kill()
        other.kill()
    assert moved == (room == 4), peers
    buffers.close()


def test_no_descriptor_is_lost_where_memory_cannot_be_had() -> None:
    buffers = SharedBuffers()
    before = set(os.listdir("/proc/self/fd"))
    assert buffers.allocate(1 << 62) is None  # more than the address space
    assert buffers.allocate((1 << 63) - 1) is None  # more than a file can have
    assert set(os.listdir("/proc/self/fd")) == before


def test_hosts_are_watched_with_many_files_open() -> None:
    """The thread that watches them uses descriptors of 1024 and more, too. Each rank has a row."""
    store, hosts = HashStore(), [[0], [1, 2]]
    tables = [table_of(hosts, own_host) for own_host in range(2)]

    def watch(own_host: int) -> Heartbeat:
        local = [RankStatus(7 + rank, HERE) for rank in hosts[own_host]]
        return Heartbeat(store, tables[own_host], "127.0.0.1", lambda: local, 10.0)

    with descriptors(1200, taken=1100), ThreadPoolExecutor(2) as both:
        watches = list(both.map(watch, range(2)))
        remote = [RankStatus(8, HERE), RankStatus(9, HERE)]
        wait_until(lambda: [tables[0].read(r)[0] for r in (1, 2)] == remote, "both rows")
        for one in watches:
            one.close()


def test_gloo_connects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise there are no connections to shut down, and no address for other hosts."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    store = HashStore()
    with ThreadPoolExecutor(2) as both:
        opened = list(both.map(lambda rank: open_gloo(store, rank, 2, 20.0), range(2)))
    assert all(connections.address() for _, connections in opened)
    for _, connections in opened:
        connections.shut_down()
