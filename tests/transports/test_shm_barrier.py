"""The barrier of `shm`, between threads that have a rank's part of it each."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdtrain.errors import PeerLost
from hvdtrain.transports import shm_sync
from hvdtrain.transports.transport import TransportError
from hvdtrain.transports.work_queue import WorkQueue

ROUNDS = 300


BOTH = pytest.mark.parametrize("in_c", [True, False], ids=["in C", "by semaphores"])


def barriers(n: int, timeout_s: float, in_c: bool) -> list[shm_sync.HostBarrier]:
    """Return the barrier of `n` ranks, as each of them has it."""
    memories = []
    for _ in range(n):
        fd = shm_sync.create_memfd(shm_sync.HEADER_BYTES)
        mapping = shm_sync.SharedMapping(fd, shm_sync.HEADER_BYTES)
        memory = shm_sync.RankMemory(mapping, os.getpid())
        memory.init()
        memory.put_tokens(n)
        memories.append(memory)
        os.close(fd)
    ranks = list(range(n))
    return [shm_sync.HostBarrier(memories, r, ranks, timeout_s, in_c) for r in ranks]


def together(
    enter: Callable[[int, shm_sync.HostBarrier], None], ranks: list[shm_sync.HostBarrier]
) -> None:
    """Call a function with each rank and its barrier, in a thread each."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(enter, range(len(ranks)), ranks))


@BOTH
@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_nobody_passes_before_all_have_arrived(n: int, in_c: bool) -> None:
    """And the last rank's call is finished by then, once each time."""
    arrived, calls = [0] * n, [0]

    def enter(rank: int, barrier: shm_sync.HostBarrier) -> None:
        chance = random.Random(rank)

        def on_all_arrived() -> None:
            assert arrived == [turn] * n
            if chance.random() < 0.1:
                time.sleep(0.001)
            calls[0] += 1

        for turn in range(1, ROUNDS + 1):
            if chance.random() < 0.05:
                time.sleep(0.002)  # longer than a rank polls
            arrived[rank] = turn
            barrier.wait("barrier()", on_all_arrived)
            assert min(arrived) >= turn
            if is_called:
                assert calls[0] >= turn

    is_called = in_c or n != 2
    together(enter, barriers(n, 20, in_c))
    assert arrived == [ROUNDS] * n
    assert calls[0] == (ROUNDS if is_called else 0)


@BOTH
@pytest.mark.parametrize("n", [2, 4])
def test_who_is_late_is_named(n: int, in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set back, by an hour here, prolongs no wait. Who is stopped is read once:
    each waiting rank read a file of each of its peers five times a second.
    """
    now, read = time.time, list[int]()
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    monkeypatch.setattr(shm_sync, "CHECK_S", 0.02)
    monkeypatch.setattr(shm_sync, "_is_stopped", read.append)
    *present, _ = barriers(n, 0.5, in_c)

    def enter(_: int, barrier: shm_sync.HostBarrier) -> None:
        said = rf"barrier\(\): rank {n - 1} \(process .* did not arrive within 0.5 s"
        with pytest.raises(PeerLost, match=said):
            barrier.wait("barrier()")

    together(enter, present)
    assert len(read) == n * len(present)


@BOTH
def test_a_rank_that_fails_in_its_call_releases_nobody(in_c: bool) -> None:
    """The others raise, too, and do not take its work for done."""
    passed, lost = threading.Event(), list[str]()

    def fail() -> None:
        raise MemoryError

    def enter(_: int, barrier: shm_sync.HostBarrier) -> None:
        try:
            barrier.wait("all_reduce()", fail)
            passed.set()
        except MemoryError:
            barrier.leave(failed=True)
        except PeerLost as error:
            lost.append(str(error))

    together(enter, barriers(3, 20, in_c))
    assert not passed.is_set()
    assert len(lost) == 2


def test_groups_share_the_descriptors_of_their_peers() -> None:
    """A descriptor for each peer and group was 1270 of them for 10 groups of 128 ranks."""
    before = os.listdir("/proc/self/fd")
    with subprocess.Popen(["sleep", "1000"]) as child:
        groups = [shm_sync._watch(child.pid) for _ in range(10)]
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
        child.kill()
    assert shm_sync._watch(child.pid) not in groups  # another process may have its number
    groups.clear()
    assert os.listdir("/proc/self/fd") == before


def test_a_signal_handler_is_refused_a_collective_within_another_one() -> None:
    """Each would wait for the other."""
    queue, done = WorkQueue("queue", lambda: None), list[int]()

    def handle(number: int, frame: object) -> None:
        with pytest.raises(TransportError, match="set a flag in the handler"):
            queue.put(lambda: None, [], [], wait=True)
        done.append(number)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert queue.run_now(0, signal.raise_signal, signal.SIGUSR1)
        queue.put(lambda: signal.raise_signal(signal.SIGUSR1), [], [], wait=True).wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done == [signal.SIGUSR1] * 2
    queue.put(done.clear, [], [], wait=True).wait()
    assert not done
