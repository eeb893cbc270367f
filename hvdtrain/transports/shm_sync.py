"""Shared memory between the processes of one host, and a barrier in it with liveness checks.

`shm` is built on it. Each rank has one anonymous file (memfd), which it keeps open until its peers
have mapped it through /proc/PID/fd/N. It has no name, so nothing of it remains, not even after
kill -9, and it does not count against the size of /dev/shm. A peer that can read a secret in it is
on the same host.

A rank waits on a semaphore in its own memory. Every 0.2 s it checks its peers: their state (HERE,
GAVE_UP, LEFT) from their memory, their liveness (ALIVE, ENDED, STOPPED) from the kernel, and for
ranks of other hosts both from the heartbeat table.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain.errors import PeerLost
from hvdtrain.job.addresses import host_identity
from hvdtrain.job.store_exchange import exchange
from hvdtrain.liveness.failure import abort_mpi_at_exit
from hvdtrain.system.processes import WatchedProcess
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
HEADER_BYTES = 4096
assert _SLOTS + 2 * SLOT_BYTES <= HEADER_BYTES

_HEARTBEAT_DELAY_S = 1.0  # the longest delay of a heartbeat between hosts
CHECK_S = 0.2  # interval of the liveness checks of a waiting rank
# The polls of a rank before it sleeps: some 20 us. After each poll it yields its core to another
# process. Without polls an operation takes longer, whether each rank has a core or not; more polls
# save 10 us at most.
_POLLS = 30
_MFD_CLOEXEC = 1  # linux/memfd.h
_libc = ctypes.CDLL(None, use_errno=True)
for _name, _types in {
    "sem_init": [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint],
    "sem_timedwait": [ctypes.c_void_p, ctypes.c_void_p],
    "sem_clockwait": [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p],
}.items():
    if hasattr(_libc, _name):
        getattr(_libc, _name).argtypes = _types
# These two are called often: without a copy of errno. They release the GIL, so that the process's
# other threads run while a rank polls.
_sem_post = ctypes.CDLL(None).sem_post
_sem_trywait = ctypes.CDLL(None).sem_trywait
_sem_post.argtypes = _sem_trywait.argtypes = [ctypes.c_void_p]
# From glibc 2.30 a wait can use the monotonic clock. Otherwise setting the clock back prolongs it.
_BY_MONOTONIC_CLOCK = hasattr(_libc, "sem_clockwait")


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class SharedMapping:
    """Shared bytes as a tensor, `.bytes`. They stay mapped as long as a view of them exists."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.map = mmap.mmap(fd, num_bytes)
        self.bytes: Tensor = torch.frombuffer(self.map, dtype=torch.uint8)


def _memfd() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hvdtrain", os.MFD_CLOEXEC)
    fd: int = _libc.memfd_create(b"hvdtrain", _MFD_CLOEXEC)  # a Python built for an old system
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def create_memfd(num_bytes: int) -> int:
    """Return the descriptor of a new anonymous file of zeros; pages are allocated on first use."""
    fd = _memfd()
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
        self._keep = mapping
        self.flag = self.memory[_FLAG : _FLAG + 1]  # for shm_calls
        base = mapping.bytes.data_ptr()
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

    def status(self) -> RankStatus:
        """Return the owner's barrier count and state."""
        return RankStatus(*_WORDS.unpack_from(self.memory))

    def set_status(self, entered: int, state: int = HERE) -> None:
        """Store the owner's barrier count and state."""
        _WORDS.pack_into(self.memory, 0, entered, state)

    def slot(self, number: int) -> memoryview:
        """Return the slot of operation `number`; two slots alternate."""
        begin = _SLOTS + number % 2 * SLOT_BYTES
        return self.memory[begin : begin + SLOT_BYTES]


@dataclass
class MissingRanks:
    """The ranks that keep a barrier from completing, by reason.

    Of the late ranks only the stopped ones are listed, else those furthest behind: the others may
    just be waiting for these.
    """

    ended: list[int]
    late: list[int]
    gave_up: list[int]
    left: list[int]


class HostBarrier:
    """The memories of one host's ranks, by local rank, and the barrier over them.

    Two ranks post each other's semaphore. With more, a rank sleeps once at most, and the last to
    arrive does not. The last finds no token left; the posts of `arrived`, which it takes, make the
    others' memory visible to it:

        each rank:      post `arrived`;  try to take one of the n - 1 tokens of `tokens`
        with a token:   wait for `released`, its own semaphore
        without one:    take the n posts of `arrived`;  call `on_all_arrived`
                        put the n - 1 tokens back;  post each other rank's `released`
    """

    def __init__(
        self, memories: list[RankMemory], local_rank: int, ranks: list[int], timeout_s: float
    ) -> None:
        self.memories = memories
        self.local_rank = local_rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.entered = 0
        self.heartbeats: HeartbeatTable | None = None  # the ranks of other hosts, if any
        self._closed = False
        self.has_given_up = False
        self._peers = {i: WatchedProcess(m.pid) for i, m in enumerate(memories) if i != local_rank}
        self._mine = memories[local_rank]
        self._others = [m.sems[0] for i, m in enumerate(memories) if i != local_rank]
        self._released = self._mine.sems[0]
        _, self._arrived, self._tokens = memories[0].sems
        self._deadline = _Timespec()

    def wait(self, signature: str, on_all_arrived: Callable[[], None] | None = None) -> None:
        """Wait for all local ranks. Raises PeerLost with the missing ranks and the call.

        Unless there are two, the last rank to arrive calls `on_all_arrived`, and the others wait
        until it returns.
        """
        if self._closed:
            raise PeerLost(f"{signature}: the group was closed meanwhile")
        self.entered += 1
        self._mine.set_status(self.entered)
        if self._closed:  # by another thread just now: `set_status` has overwritten its state
            self.leave(failed=True)
            raise PeerLost(f"{signature}: the group was closed meanwhile")
        if len(self._others) == 1:
            _sem_post(self._others[0])
            self._take(self._released, signature)
            return
        if self._others:
            _sem_post(self._arrived)
            if _sem_trywait(self._tokens) == 0:
                self._take(self._released, signature)
                return
            for _ in self.memories:
                self._take(self._arrived, signature)
        if on_all_arrived is not None:
            on_all_arrived()
        for _ in self._others:
            _sem_post(self._tokens)
        for theirs in self._others:
            _sem_post(theirs)

    def _take(self, sem: ctypes.c_void_p, signature: str) -> None:
        """Poll for a semaphore, then sleep until it is posted."""
        for _ in range(_POLLS):
            if _sem_trywait(sem) == 0:
                return
            os.sched_yield()
        self._wait(sem, signature)

    def _wait(self, sem: ctypes.c_void_p, signature: str) -> None:
        liveness = LivenessCheck(self, signature)
        while not self._wait_briefly(sem):
            liveness.check()

    def _wait_briefly(self, sem: ctypes.c_void_p) -> bool:
        """Wait up to `CHECK_S` for a semaphore; return whether it was posted."""
        until = (time.monotonic() if _BY_MONOTONIC_CLOCK else time.time()) + CHECK_S
        self._deadline.sec, self._deadline.nsec = int(until), int(until % 1 * 1e9)
        soon = ctypes.byref(self._deadline)
        if _BY_MONOTONIC_CLOCK:
            failed = _libc.sem_clockwait(sem, time.CLOCK_MONOTONIC, soon)
        else:
            failed = _libc.sem_timedwait(sem, soon)
        if failed and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "waiting for a semaphore")
        return not failed

    def local_status(self) -> list[RankStatus]:
        """Return the status of this host's ranks, this one included."""
        found = []
        for i, memory in enumerate(self.memories):
            stopped = STOPPED if _is_stopped(memory.pid) else ALIVE
            found.append(
                replace(memory.status(), liveness=ENDED if self._has_ended(i) else stopped)
            )
        return found

    def _peer_status(self) -> dict[int, RankStatus]:
        """Return the status of all other ranks of the group, by rank."""
        found = self.heartbeats.remote_status() if self.heartbeats is not None else {}
        found |= zip(self.ranks, self.local_status(), strict=True)
        del found[self.ranks[self.local_rank]]
        return found

    def find_missing(self) -> MissingRanks:
        """Return the ranks that keep this rank in the current barrier."""
        peers = self._peer_status()
        absent = [r for r, peer in peers.items() if not _may_enter(peer, self.entered)]
        # A rank can enter the barrier and exit or hang before it posts its peers' semaphores, so a
        # rank that has entered it can still be late.
        behind = [r for r, p in peers.items() if p.entered <= self.entered and p.state != LEFT]
        awaited = [r for r in behind if r not in absent]
        first = min((peers[r].entered for r in awaited), default=0)
        stopped = [r for r in awaited if peers[r].liveness == STOPPED]
        return MissingRanks(
            # A rank that gave up may exit afterwards; its exit is not the cause.
            ended=[r for r in behind if peers[r].liveness in LOST and peers[r].state == HERE],
            late=stopped or [r for r in awaited if peers[r].entered == first],
            gave_up=[r for r in absent if peers[r].state != LEFT],
            left=[r for r in absent if peers[r].state == LEFT],
        )

    def how_lost(self, ranks: list[int]) -> str:
        """Return how ranks were lost, in words for an error message."""
        peers = self._peer_status()
        liveness = [peers[rank].liveness for rank in ranks if rank in peers]
        return "is unreachable" if UNREACHABLE in liveness else "has ended"

    def give_up(self, signature: str, missing: list[int], why: str) -> PeerLost:
        """Mark this rank as having given up, for waiting peers; return the error to raise."""
        self.has_given_up = True
        abort_mpi_at_exit()
        self.memories[self.local_rank].set_status(self.entered, GAVE_UP)
        who = ", ".join(map(self._name, missing)) or "a peer"
        return PeerLost(f"{signature}: {who} {why}; rank {self.ranks[self.local_rank]} waited")

    def _name(self, rank: int) -> str:
        if rank not in self.ranks:
            return f"rank {rank} (on another host)"
        return f"rank {rank} (process {self.memories[self.ranks.index(rank)].pid})"

    @property
    def closed(self) -> bool:
        """Whether `leave` or `close` has been called."""
        return self._closed

    def _has_ended(self, i: int) -> bool:
        return i in self._peers and self._peers[i].has_ended()

    def leave(self, failed: bool = False) -> None:
        """Mark this rank as having left, which its waiting peers read. Twice is safe.

        `failed`: it does not complete the barrier that it has entered, either.
        """
        self.has_given_up = self.has_given_up or failed
        self._closed = True
        self.memories[self.local_rank].set_status(
            self.entered, GAVE_UP if self.has_given_up else LEFT
        )

    def close(self) -> None:
        """Leave, and close the descriptors. Twice is safe."""
        self.leave()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()


class LivenessCheck:
    """One wait of this rank in an operation, with the liveness checks that can end it."""

    def __init__(self, barrier: HostBarrier, signature: str) -> None:
        self._barrier = barrier
        self._signature = signature
        self._begin = time.monotonic()
        self._first_seen: float | None = None  # when the loss of a rank was first seen

    def check(self) -> None:
        """Raise PeerLost if a rank is lost, or is late. Call it every `CHECK_S`."""
        barrier = self._barrier
        if barrier.closed:
            raise PeerLost(f"{self._signature}: the group was closed meanwhile")
        missing = barrier.find_missing()
        now = time.monotonic()
        first_seen = self._first_seen
        if missing.ended or missing.gave_up or missing.left:
            self._first_seen = first_seen or now
        if missing.ended and first_seen is not None:
            # The second check: all that the lost rank had sent has arrived by now.
            raise barrier.give_up(self._signature, missing.ended, barrier.how_lost(missing.ended))
        # A rank that gave up may have detected an exit before this rank: wait for that heartbeat.
        confirmed = first_seen is not None and now - first_seen > _HEARTBEAT_DELAY_S
        if missing.left and confirmed:
            raise barrier.give_up(self._signature, missing.left, "has left")
        if (missing.gave_up and confirmed) or now - self._begin > barrier.timeout_s:
            # Peers that gave up because of the late ranks raise the same error for them.
            if missing.late or not missing.gave_up:
                why = f"did not arrive within {barrier.timeout_s:g} s"
                raise barrier.give_up(self._signature, missing.late, why)
            raise barrier.give_up(self._signature, missing.gave_up, "has given up")


def _may_enter(seen: RankStatus, barrier: int) -> bool:
    """Return whether a rank has entered a barrier, or still may, according to its own state.

    A rank that gave up did not complete the last barrier that it entered.
    """
    if seen.state == LEFT:
        return seen.entered >= barrier
    return seen.state == HERE or seen.entered > barrier


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


# Rendezvous: which ranks share memory

_APART = "they exchange messages as ranks of two hosts do"


def say_slower(why: str, what: str) -> None:
    """Print that an operation takes longer than it should, and why."""
    print(f"hvdtrain: {why}: {what}, which is slower", file=sys.stderr, flush=True)


def group_by_host(
    store: Store, rank: int, size: int, num_bytes: int, timeout_s: float
) -> tuple[list[list[int]], list[RankMemory]]:
    """Return the ranks grouped by host, and the memories of this host's ranks. Collective.

    Each rank's memory has `num_bytes`.
    """
    fd = create_memfd(num_bytes)
    try:
        mapping = SharedMapping(fd, num_bytes)
        mine = RankMemory(mapping, os.getpid())
        mine.init()
        secret = secrets.token_bytes(16)
        mine.staging[:16].copy_(torch.frombuffer(bytearray(secret), dtype=torch.uint8))
        host = host_identity("net", "pid")  # ranks that share both can share memory, too
        own = {"pid": os.getpid(), "fd": fd, "secret": secret.hex(), "host": host}
        process_info = exchange(store, "process", rank, size, own, timeout_s)
        memories = {rank: mine}
        for r, other in enumerate(process_info):
            if r != rank and other["host"] == own["host"]:
                try:
                    peer = RankMemory(map_peer(other["pid"], other["fd"], num_bytes), other["pid"])
                except (OSError, ValueError) as error:
                    say_slower(f"rank {rank} cannot map the memory of rank {r} ({error})", _APART)
                    continue
                if bytes(peer.staging[:16].tolist()).hex() == other["secret"]:
                    memories[r] = peer
        mine.put_tokens(len(memories))
        reached = exchange(store, "reached", rank, size, sorted(memories), timeout_s)
    finally:
        os.close(fd)
    groups: list[list[int]] = []
    for r, ranks in enumerate(reached):
        if all(reached[other] == ranks for other in ranks):
            if ranks not in groups:
                groups.append(ranks)
        else:
            groups.append([r])  # a peer reached other memories: this rank counts as its own host
    groups.sort()
    here = next(group for group in groups if rank in group)
    return groups, [memories[r] for r in here]
