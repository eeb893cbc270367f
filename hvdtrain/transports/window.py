"""Shared memory between the processes of one host, and a barrier in it with liveness checks.

`shm` is built on it. A window is an anonymous file (memfd) that its owner keeps open, and that its
peers open as /proc/PID/fd/N of the owner. It has no name, so nothing of it remains, not even after
kill -9, and it does not count against the size of /dev/shm. A peer that can read a secret in it is
on the same host.

A rank waits on semaphores in its own window. Every 0.2 s it checks its peers: their state (HERE,
GAVE_UP, LEFT) from their windows, their life (ALIVE, ENDED, STOPPED) from the kernel, and both from
the heartbeat table for ranks of other hosts.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import struct
import time
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from hvdtrain.transports.carrier import PeerLost
from hvdtrain.transports.hosts import (
    ALIVE,
    ENDED,
    GAVE_UP,
    HERE,
    LEFT,
    LOST,
    STOPPED,
    UNREACHABLE,
    Far,
    Seen,
)

_SEM_BYTES = 64  # a sem_t has 32 bytes; one per cache line
_ROUNDS = 16  # of the dissemination barrier: enough for 65,536 ranks
_WORDS = struct.Struct("<QQ")  # barriers entered, state
_SEMS = 64
_SLOTS = _SEMS + _ROUNDS * _SEM_BYTES
SLOT_BYTES = 768
HEADER_BYTES = 4096
assert _SLOTS + 2 * SLOT_BYTES <= HEADER_BYTES

_GONE = -2  # instead of a pidfd: the process had exited already
_NEWS_S = 1.0  # the longest delay of a heartbeat between hosts
LOOK_S = 0.2  # interval of the liveness checks of a waiting rank
# Sleeping and waking up takes as long as this many polls; more would take CPU time from the peers.
_TRIES = 30
_libc = ctypes.CDLL(None, use_errno=True)
for _name, _types in {
    "sem_init": [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint],
    "sem_post": [ctypes.c_void_p],
    "sem_trywait": [ctypes.c_void_p],
    "sem_timedwait": [ctypes.c_void_p, ctypes.c_void_p],
    "sem_clockwait": [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p],
}.items():
    if hasattr(_libc, _name):
        getattr(_libc, _name).argtypes = _types
# From glibc 2.30 a wait can use the monotonic clock. Otherwise setting the clock back prolongs it.
_BY_MONOTONIC_CLOCK = hasattr(_libc, "sem_clockwait")


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class Mapping:
    """Shared bytes as a tensor, `.bytes`. They stay mapped as long as a view of them exists."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.map = mmap.mmap(fd, num_bytes)
        self.bytes: Tensor = torch.frombuffer(self.map, dtype=torch.uint8)


def create(num_bytes: int) -> int:
    """Return the descriptor of a new anonymous file of zeros; pages are allocated on first use."""
    fd = os.memfd_create("hvdtrain", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def reach(pid: int, fd: int, num_bytes: int) -> Mapping:
    """Map a file that another process of this host has open. Raises OSError."""
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return Mapping(mine, num_bytes)
    finally:
        os.close(mine)


class Window:
    """One rank's shared memory, mapped by its local peers: a header and `.stage`, staging buffers.

    The header holds the owner's barrier count and state, the semaphores that the owner waits on,
    and two slots for its calls: one is written while peers still read the other.
    """

    def __init__(self, mapping: Mapping, pid: int) -> None:
        self.pid = pid
        self.memory = memoryview(mapping.map)
        self.stage = mapping.bytes[HEADER_BYTES:]
        self._keep = mapping
        base = mapping.bytes.data_ptr()
        self.sems = [ctypes.c_void_p(base + _SEMS + k * _SEM_BYTES) for k in range(_ROUNDS)]

    def init(self) -> None:
        """Initialise the semaphores. Called by the owner before any peer maps the window."""
        for sem in self.sems:
            if _libc.sem_init(sem, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init")

    def said(self) -> Seen:
        """Return the owner's barrier count and state."""
        return Seen(*_WORDS.unpack_from(self.memory))

    def say(self, entered: int, state: int = HERE) -> None:
        """Store the owner's barrier count and state."""
        _WORDS.pack_into(self.memory, 0, entered, state)

    def slot(self, number: int) -> memoryview:
        """Return the slot of operation `number`; two slots alternate."""
        begin = _SLOTS + number % 2 * SLOT_BYTES
        return self.memory[begin : begin + SLOT_BYTES]


class Host:
    """The windows of one host's ranks, by local rank, and the barrier over them.

    It is a dissemination barrier (Hensgen, Finkel and Manber, 1988): in round k each rank posts the
    semaphore of the rank 2^k places after it. A rank that completes log2(n) rounds has an indirect
    signal from every other.
    """

    def __init__(self, windows: list[Window], me: int, ranks: list[int], timeout_s: float) -> None:
        self.windows = windows
        self.me = me
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.entered = 0
        self.far: Far | None = None  # the ranks of other hosts, if any
        self._closed = self._gave_up = False
        self._pidfds = {i: _pidfd(w.pid) for i, w in enumerate(windows) if i != me}
        n = len(windows)
        rounds = range((n - 1).bit_length())
        self._steps = [(windows[(me + (1 << k)) % n].sems[k], windows[me].sems[k]) for k in rounds]
        self._soon = _Timespec()

    def meet(self, what: str) -> None:
        """Wait for all local ranks. Raises PeerLost with the missing ranks and the call `what`."""
        if self._closed:
            raise PeerLost(f"{what}: the group was closed meanwhile")
        self.entered += 1
        self.windows[self.me].say(self.entered)
        if self._closed:  # closed between the check and `say`, which has overwritten its state
            self.leave(failed=True)
            raise PeerLost(f"{what}: the group was closed meanwhile")
        for theirs, mine in self._steps:
            _libc.sem_post(theirs)
            for _ in range(_TRIES):
                if _libc.sem_trywait(mine) == 0:
                    break
                os.sched_yield()
            else:
                self._wait(mine, what)

    def _wait(self, sem: ctypes.c_void_p, what: str) -> None:
        wait = Wait(self, what)
        while True:
            if self._wait_shortly(sem):
                return
            wait.look()

    def _wait_shortly(self, sem: ctypes.c_void_p) -> bool:
        """Wait up to `LOOK_S` for a semaphore; return whether it was posted."""
        until = (time.monotonic() if _BY_MONOTONIC_CLOCK else time.time()) + LOOK_S
        self._soon.sec, self._soon.nsec = int(until), int(until % 1 * 1e9)
        soon = ctypes.byref(self._soon)
        if _BY_MONOTONIC_CLOCK:
            failed = _libc.sem_clockwait(sem, time.CLOCK_MONOTONIC, soon)
        else:
            failed = _libc.sem_timedwait(sem, soon)
        if failed and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "waiting for a semaphore")
        return not failed

    def near(self) -> list[Seen]:
        """Return the status of this host's ranks, this one included."""
        found = []
        for i, w in enumerate(self.windows):
            life = ENDED if self._has_ended(i) else STOPPED if _stopped(w.pid) else ALIVE
            found.append(replace(w.said(), life=life))
        return found

    def _others(self) -> dict[int, Seen]:
        """Return the status of all other ranks of the group, by rank."""
        found = self.far.look() if self.far is not None else {}
        found |= zip(self.ranks, self.near(), strict=True)
        del found[self.ranks[self.me]]
        return found

    def missing(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return four lists for the current barrier: ranks that exited, are late, gave up, left.

        A rank can enter the barrier and exit or hang before it posts its peers' semaphores, so a
        rank that has entered it can still be late. Of the late ranks only the stopped ones are
        returned, else those furthest behind: the others may just be waiting for these.
        """
        others = self._others()
        left = [r for r, seen in others.items() if not _comes_to(seen, self.entered)]
        near = [
            r for r, seen in others.items() if seen.entered <= self.entered and seen.state != LEFT
        ]
        awaited = [r for r in near if r not in left]
        first = min((others[r].entered for r in awaited), default=0)
        absent = [r for r in awaited if others[r].entered == first]
        stopped = [r for r in awaited if others[r].life == STOPPED]
        # A rank that gave up may exit afterwards; its exit is not the cause.
        ended = [r for r in near if others[r].life in LOST and others[r].state == HERE]
        gave_up = [r for r in left if others[r].state != LEFT]
        return ended, stopped or absent, gave_up, [r for r in left if r not in gave_up]

    def end_of(self, ranks: list[int]) -> str:
        """Return how ranks were lost, in words for an error message."""
        others = self._others()
        lives = [others[rank].life for rank in ranks if rank in others]
        return "is unreachable" if UNREACHABLE in lives else "has ended"

    def give_up(self, what: str, missing: list[int], why: str) -> NoReturn:
        """Mark this rank as having given up, which its waiting peers read, and raise PeerLost."""
        self._gave_up = True
        self.windows[self.me].say(self.entered, GAVE_UP)
        who = ", ".join(map(self._name, missing)) or "a peer"
        raise PeerLost(f"{what}: {who} {why}; rank {self.ranks[self.me]} waited")

    def _name(self, rank: int) -> str:
        if rank not in self.ranks:
            return f"rank {rank} (on another host)"
        return f"rank {rank} (process {self.windows[self.ranks.index(rank)].pid})"

    @property
    def closed(self) -> bool:
        """Whether `leave` or `close` has been called."""
        return self._closed

    def _has_ended(self, i: int) -> bool:
        fd = self._pidfds.get(i, -1)
        if fd < 0:
            return fd == _GONE
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(0))

    def leave(self, failed: bool = False) -> None:
        """Mark this rank as having left, which its waiting peers read. Twice is safe.

        `failed`: it does not complete the barrier that it has entered, either.
        """
        self._gave_up = self._gave_up or failed
        self._closed = True
        self.windows[self.me].say(self.entered, GAVE_UP if self._gave_up else LEFT)

    def close(self) -> None:
        """Leave, and close the descriptors. Twice is safe."""
        self.leave()
        fds, self._pidfds = self._pidfds, {}
        for fd in fds.values():
            if fd >= 0:
                os.close(fd)


class Wait:
    """One wait of this rank in an operation, with the liveness checks that can end it."""

    def __init__(self, host: Host, what: str) -> None:
        self._host = host
        self._what = what
        self._begin = time.monotonic()
        self._noticed: float | None = None  # when a lost rank was first seen

    def look(self) -> None:
        """Raise PeerLost if a rank is lost, or is late. Call it every `LOOK_S`."""
        host = self._host
        if host.closed:
            raise PeerLost(f"{self._what}: the group was closed meanwhile")
        ended, absent, gave_up, left = host.missing()
        now = time.monotonic()
        noticed = self._noticed
        if ended or gave_up or left:
            self._noticed = noticed or now
        if ended and noticed is not None:  # the second check: what it had sent has arrived by now
            host.give_up(self._what, ended, host.end_of(ended))
        # A rank that gave up may have detected an exit before this rank: wait for that news.
        known = noticed is not None and now - noticed > _NEWS_S
        if left and known:
            host.give_up(self._what, left, "has left")
        if (gave_up and known) or now - self._begin > host.timeout_s:
            # If peers gave up because of the late ranks, they report the same words.
            late = f"did not come within {host.timeout_s:g} s"
            why = late if absent or not gave_up else "has given up"
            host.give_up(self._what, absent or gave_up, why)


def _comes_to(seen: Seen, barrier: int) -> bool:
    """Return whether a rank has entered a barrier, or still may, according to its own state.

    A rank that gave up did not complete the last barrier that it entered.
    """
    if seen.state == LEFT:
        return seen.entered >= barrier
    return seen.state == HERE or seen.entered > barrier


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return _GONE
    except (AttributeError, OSError):
        return -1  # an old kernel: only the timeout detects the exit


def _stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
