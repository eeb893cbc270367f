"""Shared memory between the processes of one host, and a barrier in it with liveness checks.

`shm` is built on it. Each rank has one anonymous file (memfd), which it keeps open until its peers
have mapped it through /proc/PID/fd/N. It has no name, so nothing of it remains, not even after
kill -9, and it does not count against the size of /dev/shm. A peer that can read a secret in it is
on the same host.

Ranks meet in C (`page`) or, if it was not compiled for all of them, by semaphores. A waiting rank
polls, then sleeps. Every 0.2 s it checks its peers: their state (HERE,
GAVE_UP, LEFT) from their memory, their liveness (ALIVE, ENDED) from the kernel, and for ranks of
other hosts both from the heartbeat table. It reads which local peers are STOPPED only when a rank
is late: that is a file of /proc for each peer, so n waiting ranks would read n * n files.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import secrets
import struct
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain.errors import PeerLost
from hvdtrain.job.addresses import host_identity
from hvdtrain.job.store_exchange import exchange
from hvdtrain.liveness.failure import abort_mpi_at_exit
from hvdtrain.system.processes import WatchedProcess
from hvdtrain.transports import page
from hvdtrain.transports.heartbeat import (
    ALIVE,
    ENDED,
    GAVE_UP,
    HERE,
    LEFT,
    LOST,
    STOPPED,
    UNREACHABLE,
    HeartbeatTable,
    RankStatus,
)

_SEM_BYTES = 64  # a sem_t has 32 bytes; one per cache line
_NUM_SEMS = 3  # `released`, `arrived` and `tokens`: see HostBarrier
_WORDS = struct.Struct("<QQ")  # barriers entered, state
_FLAG = _WORDS.size  # one byte
_SEMS = 64
_SLOTS = _SEMS + _NUM_SEMS * _SEM_BYTES
SLOT_BYTES = 768
_PAGE = _SLOTS + 2 * SLOT_BYTES
HEADER_BYTES = 4096
assert _PAGE % 64 == 0
assert _PAGE + page.PAGE_BYTES <= HEADER_BYTES
STAGING_BYTES = 4 << 20  # a rank has two such areas: one is filled while the other is read

_HEARTBEAT_DELAY_S = 1.0  # the longest delay of a heartbeat between hosts
CHECK_S = 0.2  # interval of the liveness checks of a waiting rank
# The polls of a rank before it sleeps: some 20 us. After each poll it yields its core to another
# process. Without polls an operation takes longer, whether each rank has a core or not; more polls
# save 10 us at most.
_POLLS = 30
_MFD_CLOEXEC = 1  # linux/memfd.h
_libc = ctypes.CDLL(None, use_errno=True)
# These two are called often: without a copy of errno. They release the GIL, so that the process's
# other threads run while a rank polls.
_sem_post = ctypes.CDLL(None).sem_post
_sem_trywait = ctypes.CDLL(None).sem_trywait
# From glibc 2.30 a wait can use the monotonic clock. Otherwise setting the clock back prolongs it.
_CLOCK = time.CLOCK_MONOTONIC if hasattr(_libc, "sem_clockwait") else time.CLOCK_REALTIME


class SharedMapping:
    """Shared bytes as a tensor, `.bytes`. They stay mapped as long as a view of them exists."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.map = mmap.mmap(fd, num_bytes)
        self.bytes: Tensor = torch.frombuffer(self.map, dtype=torch.uint8)


def create_memfd(num_bytes: int) -> int:
    """Return the descriptor of a new anonymous file of zeros; pages are allocated on first use."""
    # Not os.memfd_create: a Python built for an old system lacks it.
    fd: int = _libc.memfd_create(b"hvdtrain", _MFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_peer(pid: int, fd: int, num_bytes: int) -> SharedMapping:
    """Map a file that another process of this host has open. Raises OSError."""
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return SharedMapping(mine, num_bytes)
    finally:
        os.close(mine)


class RankMemory:
    """One rank's shared memory, mapped by its local peers: a header, and `.staging` for data.

    The header holds the owner's barrier count and state, the semaphores that the owner waits on,
    and two slots for its calls: one is written while peers still read the other.
    """

    def __init__(self, mapping: SharedMapping, pid: int) -> None:
        self.pid = pid
        self.memory = memoryview(mapping.map)
        self.staging = mapping.bytes[HEADER_BYTES:]
        self.flag = self.memory[_FLAG : _FLAG + 1]  # for shm_calls
        base = self.address = mapping.bytes.data_ptr()
        self.sems = [ctypes.c_void_p(base + _SEMS + k * _SEM_BYTES) for k in range(_NUM_SEMS)]

    def init(self) -> None:
        """Initialise the semaphores. Called by the owner before any peer maps the memory."""
        for sem in self.sems:
            if _libc.sem_init(sem, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init")

    def put_tokens(self, num_ranks: int) -> None:
        """Put a token for each rank but one into `tokens`. Called before any rank takes one."""
        for _ in range(num_ranks - 1):
            _sem_post(self.sems[2])

    def status(self, liveness: int) -> RankStatus:
        """Return the owner's barrier count and state, with its liveness."""
        entered, state = _WORDS.unpack_from(self.memory)
        return RankStatus(entered, state, liveness)

    def set_status(self, entered: int, state: int = HERE) -> None:
        """Store the owner's barrier count and state."""
        _WORDS.pack_into(self.memory, 0, entered, state)

    def slot(self, number: int) -> memoryview:
        """Return the slot of operation `number`; two slots alternate."""
        begin = _SLOTS + number % 2 * SLOT_BYTES
        return self.memory[begin : begin + SLOT_BYTES]


def _wait_briefly(sem: ctypes.c_void_p) -> bool:
    """Wait up to `CHECK_S` for a semaphore; return whether it was posted."""
    until = time.clock_gettime(_CLOCK) + CHECK_S
    deadline = struct.pack("ll", int(until), int(until % 1 * 1e9))  # a timespec
    if _CLOCK == time.CLOCK_MONOTONIC:
        failed = _libc.sem_clockwait(sem, _CLOCK, deadline)
    else:
        failed = _libc.sem_timedwait(sem, deadline)
    if failed and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "waiting for a semaphore")
    return not failed


class HostBarrier:
    """The memories of one host's ranks, by local rank, and the barrier over them.

    `page` is the barrier in C, if there is one. Else two ranks post each other's semaphore. With
    more, a rank sleeps once at most, and the last to arrive does not. The last finds no token left;
    the posts of `arrived`, which it takes, make the others' memory visible to it:

        each rank:      post `arrived`;  try to take one of the n - 1 tokens of `tokens`
        with a token:   wait for `released`, its own semaphore
        without one:    take the n posts of `arrived`;  call `on_all_arrived`
                        put the n - 1 tokens back;  post each other rank's `released`
    """

    def __init__(
        self,
        memories: list[RankMemory],
        local_rank: int,
        ranks: list[int],
        timeout_s: float,
        in_c: bool,
    ) -> None:
        self.memories = memories
        self.local_rank = local_rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.entered = 0
        self.heartbeats: HeartbeatTable | None = None  # the ranks of other hosts, if any
        self.closed = self.has_given_up = False
        self._mine = memories[local_rank]
        others = [memory for memory in memories if memory is not self._mine]
        self._peers = {memory: _watch(memory.pid) for memory in others}
        self._others = [memory.sems[0] for memory in others]
        _, self._arrived, self._tokens = memories[0].sems
        self.page = _open_page(memories, local_rank) if in_c else None

    def wait(self, signature: str, on_all_arrived: Callable[[], None] | None = None) -> None:
        """Wait for all local ranks. Raises PeerLost with the missing ranks and the call.

        The last rank to arrive calls `on_all_arrived`, and the others wait until it returns; not if
        there are two ranks that use semaphores.
        """
        if self.page is not None:
            if self.meet(signature, self.page.enter) == page.LAST:
                if on_all_arrived is not None:
                    on_all_arrived()
                self.page.release()
            return
        if self.closed:
            raise PeerLost(f"{signature}: the group was closed meanwhile")
        self.entered += 1
        self._mine.set_status(self.entered)
        if self.closed:  # by another thread just now: `set_status` has overwritten its state
            self.leave(failed=True)
            raise PeerLost(f"{signature}: the group was closed meanwhile")
        if len(self._others) == 1:
            _sem_post(self._others[0])
            self._take(self._mine.sems[0], signature)
            return
        if self._others:
            _sem_post(self._arrived)
            if _sem_trywait(self._tokens) == 0:
                self._take(self._mine.sems[0], signature)
                return
            for _ in self.memories:
                self._take(self._arrived, signature)
        if on_all_arrived is not None:
            on_all_arrived()
        for _ in self._others:
            _sem_post(self._tokens)
        for theirs in self._others:
            _sem_post(theirs)

    def meet(self, signature: str, enter: Callable[..., int], *arguments: Any) -> int:
        """Wait for all local ranks by a method of `page`; return the outcome, which is not LATE.

        Raises PeerLost with the missing ranks and the call.
        """
        if self.closed:
            raise PeerLost(f"{signature}: the group was closed meanwhile")
        self.entered += 1
        outcome = enter(*arguments)
        if outcome == page.LATE:
            liveness = LivenessCheck(self, signature)
            while outcome == page.LATE:
                liveness.check()
                outcome = self.page.wait()  # type: ignore[union-attr]
        return outcome

    def _take(self, sem: ctypes.c_void_p, signature: str) -> None:
        """Poll for a semaphore, then sleep until it is posted."""
        for _ in range(_POLLS):
            if _sem_trywait(sem) == 0:
                return
            os.sched_yield()
        liveness = LivenessCheck(self, signature)
        while not _wait_briefly(sem):
            liveness.check()

    def local_status(self, find_stopped: bool = True) -> list[RankStatus]:
        """Return the status of this host's ranks, this one included.

        Without `find_stopped` one that is STOPPED is returned as ALIVE.
        """
        found = []
        for memory in self.memories:
            peer = self._peers.get(memory)
            liveness = STOPPED if find_stopped and _is_stopped(memory.pid) else ALIVE
            if peer is not None and peer.has_ended():
                liveness = ENDED
            # Read last: one that leaves before it ends has left.
            found.append(memory.status(liveness))
        return found

    def peer_status(self, find_stopped: bool = False) -> dict[int, RankStatus]:
        """Return the status of all other ranks of the group, by rank: see `local_status`."""
        found = self.heartbeats.remote_status() if self.heartbeats is not None else {}
        found |= zip(self.ranks, self.local_status(find_stopped), strict=True)
        del found[self.ranks[self.local_rank]]
        return found

    def give_up(self, signature: str, missing: list[int], why: str) -> PeerLost:
        """Mark this rank as having given up, for waiting peers; return the error to raise."""
        self.has_given_up = True
        abort_mpi_at_exit()
        self._mine.set_status(self.entered, GAVE_UP)
        who = ", ".join(map(self._name, missing)) or "a peer"
        return PeerLost(f"{signature}: {who} {why}; rank {self.ranks[self.local_rank]} waited")

    def _name(self, rank: int) -> str:
        if rank not in self.ranks:
            return f"rank {rank} (on another host)"
        return f"rank {rank} (process {self.memories[self.ranks.index(rank)].pid})"

    def leave(self, failed: bool = False) -> None:
        """Mark this rank as having left, which its waiting peers read. Twice is safe.

        `failed`: it does not complete the barrier that it has entered, either.
        """
        self.has_given_up |= failed
        self.closed = True
        self._mine.set_status(self.entered, GAVE_UP if self.has_given_up else LEFT)

    def close(self) -> None:
        """Leave, and drop the peers' descriptors. Twice is safe."""
        self.leave()
        self._peers = {}


def _open_page(memories: list[RankMemory], local_rank: int) -> page.Page:
    """Return a rank's side of the barrier in C."""
    bases = [memory.address for memory in memories]
    return page.Page(
        bases[0] + _PAGE,
        bases[0] + _FLAG,
        bases[local_rank],
        [base + _SLOTS + k * SLOT_BYTES for k in range(2) for base in bases],
        [base + HEADER_BYTES + k * STAGING_BYTES for k in range(2) for base in bases],
        local_rank,
    )


class LivenessCheck:
    """One wait of this rank in an operation, with the liveness checks that can end it."""

    def __init__(self, barrier: HostBarrier, signature: str) -> None:
        self._barrier = barrier
        self._signature = signature
        self._begin = time.monotonic()
        self._first_seen = math.inf  # when the loss of a rank was first seen

    def check(self) -> None:
        """Raise PeerLost if a rank is lost, or is late. Call it every `CHECK_S`."""
        barrier, now, first_seen = self._barrier, time.monotonic(), self._first_seen
        if barrier.closed:
            raise PeerLost(f"{self._signature}: the group was closed meanwhile")
        # A rank that gave up may have detected an exit before this rank: wait for that heartbeat.
        confirmed = now - first_seen > _HEARTBEAT_DELAY_S
        is_late = now - self._begin > barrier.timeout_s
        peers = barrier.peer_status(find_stopped=confirmed or is_late)
        # A rank can enter the barrier and exit or hang before it posts its peers' semaphores, so a
        # rank that has entered it can still be late.
        awaited = {
            r: p for r, p in peers.items() if p.entered <= barrier.entered and p.state == HERE
        }
        # A rank that gave up may exit afterwards; its exit is not the cause.
        ended = [r for r, p in awaited.items() if p.liveness in LOST]
        # A rank that gave up did not complete the last barrier that it entered.
        gave_up = [
            r for r, p in peers.items() if p.entered <= barrier.entered and p.state == GAVE_UP
        ]
        left = [r for r, p in peers.items() if p.entered < barrier.entered and p.state == LEFT]
        if ended or gave_up or left:
            self._first_seen = min(first_seen, now)
        if ended and first_seen < now:
            # The second check: all that the lost rank had sent has arrived by now.
            unreachable = any(peers[r].liveness == UNREACHABLE for r in ended)
            lost, why = ended, "is unreachable" if unreachable else "has ended"
        elif left and confirmed:
            lost, why = left, "has left"
        elif (gave_up and confirmed) or is_late:
            # Peers that gave up because of the late ranks raise the same error for them.
            lost, why = _find_late(awaited), f"did not arrive within {barrier.timeout_s:g} s"
            if gave_up and not lost:
                lost, why = gave_up, "has given up"
        else:
            return
        raise barrier.give_up(self._signature, lost, why)


def _find_late(awaited: dict[int, RankStatus]) -> list[int]:
    """Return the ranks to name as late: the stopped ones, else those furthest behind.

    The others may just be waiting for these.
    """
    stopped = [r for r, p in awaited.items() if p.liveness == STOPPED]
    first = min((p.entered for p in awaited.values()), default=0)
    return stopped or [r for r, p in awaited.items() if p.entered == first]


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


watched: weakref.WeakValueDictionary[int, WatchedProcess] = weakref.WeakValueDictionary()
"""The peers on this host, by process, in all groups of this one."""


def _watch(pid: int) -> WatchedProcess:
    """Return a peer's process, with the descriptor that all groups of this process share."""
    peer = watched.get(pid)
    if peer is None or peer.has_ended():  # another process may have its number by now
        peer = watched[pid] = WatchedProcess(pid)
    return peer


# Rendezvous: which ranks share memory

_APART = "they exchange messages as if on two hosts"


def say_slower(why: str, what: str) -> None:
    """Print why an operation is slower than it should be."""
    print(f"hvdtrain: {why}: {what}, which is slower", file=sys.stderr, flush=True)


def group_by_host(
    store: Store, rank: int, size: int, num_bytes: int, timeout_s: float
) -> tuple[list[list[int]], dict[int, RankMemory], bool]:
    """Return the ranks grouped by host, the memories of this host's by rank, and whether these can
    meet in C. Collective.

    Each rank's memory has `num_bytes`.
    """
    fd = create_memfd(num_bytes)
    try:
        mine = RankMemory(SharedMapping(fd, num_bytes), os.getpid())
        mine.init()
        secret = secrets.token_hex(16)
        mine.slot(0)[: len(secret)] = secret.encode()
        host = host_identity("net", "pid")  # ranks that share both can share memory, too
        own = {"pid": mine.pid, "fd": fd, "secret": secret, "host": host}
        own["page"] = page.version()
        process_info = exchange(store, "process", rank, size, own, timeout_s)
        memories = {rank: mine}
        for r, other in enumerate(process_info):
            if r != rank and other["host"] == host:
                try:
                    peer = RankMemory(map_peer(other["pid"], other["fd"], num_bytes), other["pid"])
                except (OSError, ValueError) as error:
                    say_slower(f"rank {rank} cannot map the memory of rank {r} ({error})", _APART)
                    continue
                if peer.slot(0)[: len(secret)] == other["secret"].encode():
                    memories[r] = peer
        mine.put_tokens(len(memories))
        reached = exchange(store, "reached", rank, size, sorted(memories), timeout_s)
    finally:
        os.close(fd)
    groups = sorted(
        {
            # A rank of which a peer reached other memories counts as its own host.
            tuple(ranks) if all(reached[other] == ranks for other in ranks) else (r,)
            for r, ranks in enumerate(reached)
        }
    )
    here = next(group for group in groups if rank in group)
    in_c = bool(own["page"]) and all(process_info[r]["page"] == own["page"] for r in here)
    return list(map(list, groups)), {r: memories[r] for r in here}, in_c
