"""What is known of other hosts' ranks, and of ranks that come at the last moment; and what a
transport is made of: descriptors, semaphores, connections.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.transports import heartbeat, shm_buffers
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
from hvdtrain.transports.host_channel import open_gloo_channel
from hvdtrain.transports.shm import STAGING_BYTES, Shm
from hvdtrain.transports.shm_buffers import MOVE_BYTES, SharedBuffers
from hvdtrain.transports.transport import call_text


def table_of(hosts: list[list[int]], own_host: int = 0) -> HeartbeatTable:
    memory = bytearray(HeartbeatTable.size_bytes(sum(map(len, hosts))))
    return HeartbeatTable(memoryview(memory), hosts, own_host)


def test_who_has_ended_is_known_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the thread that heard of it has ended: a survivor may look only then."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now_s * 1e9))
    table = table_of([[0, 1], [2, 3]])
    for rank, life in enumerate((ALIVE, ALIVE, STOPPED, ENDED)):
        table.write(rank, RankStatus(5, HERE, life))
    assert table.remote_status() == {2: (5, HERE, STOPPED), 3: (5, HERE, ENDED)}
    now_s += heartbeat._SILENT_S + 0.1
    assert table.remote_status() == {3: (5, HERE, ENDED)}


@pytest.mark.parametrize(("age_s", "life"), [(1.9, ALIVE), (2.1, STOPPED)])
def test_a_leader_without_a_heartbeat_for_two_seconds_is_taken_as_stopped(
    age_s: float, life: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of([[0, 1], [2, 3]])
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now_s * 1e9))
    for rank in range(4):
        table.write(rank, RankStatus(5, HERE))
    now_s += age_s
    table.write(0, RankStatus(5, HERE))  # this host's own leader goes on
    assert table.remote_status() == {2: (5, HERE, life), 3: (5, HERE, ALIVE)}


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """A limit on the descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_all_groups_together_take_a_quarter_of_the_descriptors() -> None:
    groups = [SharedBuffers(), SharedBuffers()]
    tensors = [torch.zeros(MOVE_BYTES, dtype=torch.uint8) for _ in range(24)]
    with descriptors(8 * 10):
        for t in tensors:
            for buffers in groups:
                buffers.prepare(t)
                buffers.prepare(t)
        assert sum(buffers.find(t) is not None for t in tensors for buffers in groups) == 10
        assert groups[0].allocate(100) is None
    for buffers in groups:
        buffers.close()


@pytest.mark.parametrize(("left", "moves"), [(0, False), (1, False), (2, True)])
def test_a_rank_without_descriptors_copies(left: int, moves: bool) -> None:
    """It raised before it came to the barrier, where the others waited for it."""
    buffers = SharedBuffers()
    t = torch.zeros(MOVE_BYTES, dtype=torch.uint8)
    buffers.prepare(t)
    last = max(map(int, os.listdir("/proc/self/fd")))
    taken = list[int]()
    with descriptors(last + 64):
        try:
            with suppress(OSError):  # until there are too many
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            for _ in range(left):
                os.close(taken.pop())
            buffers.prepare(t)
        finally:
            for fd in taken:
                os.close(fd)
    assert (buffers.find(t) is not None) == moves
    buffers.close()


@pytest.mark.parametrize(
    ("fails", "room", "wanted"), [(True, 1, 2), (True, 2, 2), (False, 3, 4), (False, 4, 4)]
)
def test_a_rank_moves_a_tensor_if_all_ranks_of_its_host_may(
    fails: bool, room: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All find the same room free; torch below 2.10 writes beyond it, which is SIGBUS."""
    monkeypatch.setattr(shm_buffers, "_FAILS_WITHOUT_ROOM", fails)
    size = SimpleNamespace(f_bavail=room, f_frsize=MOVE_BYTES)
    monkeypatch.setattr(os, "statvfs", lambda path: size)
    buffers, t = SharedBuffers(3), torch.zeros(MOVE_BYTES, dtype=torch.uint8)
    buffers.prepare(t)
    buffers.prepare(t)
    assert (buffers.find(t) is not None) == (room >= wanted)
    buffers.close()


def test_no_descriptor_is_lost_where_memory_cannot_be_had() -> None:
    buffers = SharedBuffers()
    before = os.listdir("/proc/self/fd")
    assert buffers.allocate(1 << 62) is None  # more than the address space
    assert buffers.allocate((1 << 63) - 1) is None  # more than a file can have
    assert os.listdir("/proc/self/fd") == before


class LeaderOfMany(Shm):
    """Local rank 0 of one of two hosts of `count` ranks, of which it alone exists."""

    def __init__(self, store: Any, me: int, count: int) -> None:
        self.size, self.local_rank, self._sequence = 2 * count, 0, 0
        self.hosts = [list(range(count)), list(range(count, 2 * count))]
        self._staging_areas: Any = [torch.empty(2, STAGING_BYTES, dtype=torch.uint8)]
        self._barrier: Any = SimpleNamespace(wait=lambda signature: None)
        self._across = open_gloo_channel(store, me, 2, 10.0)
        self.mine = self.hosts[me]

    def wait_for(self, signature: str, work: Any) -> None:
        work.wait()


@pytest.mark.parametrize("count", [2, 300])
def test_calls_are_compared_in_full_between_large_hosts(count: int) -> None:
    """Each host's ranks differ among themselves, and rank 1 from all others in its last bytes."""
    long = "all_reduce(float32[" + "1, " * 180
    store = HashStore()

    def compared(me: int) -> list[tuple[dict[int, bytes], bool]]:
        leader = LeaderOfMany(store, me, count)
        same = dict.fromkeys(leader.mine, b"barrier()")
        mixed = {r: call_text(f"{long}{r % 2 + 7 * (r == 1)}], sum)", 600) for r in leader.mine}
        alone = dict.fromkeys(leader.mine, call_text(f"{long}{me}], sum)", 600))
        return [leader._compare_across_hosts("x", calls, True) for calls in (same, mixed, alone)]

    with ThreadPoolExecutor(2) as both:
        answers = list(both.map(compared, range(2)))
    assert answers[0] == answers[1]
    (same, shared), (mixed, _), (alone, _) = answers[0]
    assert shared
    assert same == dict.fromkeys(range(2 * count), b"barrier()")
    assert list(mixed) == list(alone) == list(range(2 * count))
    assert {r for r, call in mixed.items() if call == mixed[1]} == {1}
    assert len(set(mixed.values())) == 3
    assert len(set(alone.values())) == 2


def test_hosts_are_watched_with_many_files_open() -> None:
    """The thread that watches them uses descriptors of 1024 and more, too. Each rank has a row."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this system allows {hard} descriptors")
    with descriptors(max(soft, 1200)):
        filler = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        try:
            store, ranks = HashStore(), [[0], [1, 2]]
            tables = [table_of(ranks, me) for me in range(2)]

            def watch(table: HeartbeatTable) -> Heartbeat:
                near = [RankStatus(7 + rank, HERE) for rank in ranks[table.own_host]]
                return Heartbeat(store, table, "127.0.0.1", lambda: near, 10.0)

            with ThreadPoolExecutor(2) as both:
                watches = list(both.map(watch, tables))
            deadline = time.monotonic() + 60
            while tables[0].read(2)[0].entered != 9 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert [tables[0].read(n)[0] for n in ranks[1]] == [(8, HERE, ALIVE), (9, HERE, ALIVE)]
            for one in watches:
                one.close()
        finally:
            for fd in filler:
                os.close(fd)


def test_gloo_connects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise there are no connections to shut down, and no address for other hosts."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    store = HashStore()
    with ThreadPoolExecutor(2) as both:
        opened = list(both.map(lambda rank: open_gloo(store, rank, 2, 20.0), range(2)))
    assert all(connections.address() for _, connections in opened)
    for _, connections in opened:
        connections.shut_down()
