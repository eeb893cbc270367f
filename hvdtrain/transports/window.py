"""Memory that the processes of one host share, and how they wait for each other in it.

A window is an anonymous file (memfd) that its owner keeps open and its peers reach by the owner's
descriptor, /proc/PID/fd/N. It has no name, so nothing of it can stay behind, not even after
kill -9, and it does not count against the size of /dev/shm. That a peer can read a secret there is
the proof that it is on the same host.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import struct
import time
from typing import NoReturn

import torch
from torch import Tensor

from hvdtrain.transports.carrier import PeerLost

_SEM_BYTES = 64  # a sem_t is 32; one to a cache line
_ROUNDS = 16  # of a dissemination barrier: 65,536 ranks
_WORDS = struct.Struct("<QQ")  # barriers entered; one of:
_HERE, _GAVE_UP, _LEFT = range(3)
_SEMS = 64
_SLOTS = _SEMS + _ROUNDS * _SEM_BYTES
SLOT_BYTES = 768
HEADER_BYTES = 4096
assert _SLOTS + 2 * SLOT_BYTES <= HEADER_BYTES

_LOOK_S = 0.2  # how often whoever waits looks whether the others are alive
# To sleep and be woken takes as long as this many looks; more would take time from ranks at work.
_TRIES = 30
_libc = ctypes.CDLL(None, use_errno=True)
for _name, _types in {
    "sem_init": [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint],
    "sem_post": [ctypes.c_void_p],
    "sem_trywait": [ctypes.c_void_p],
    "sem_timedwait": [ctypes.c_void_p, ctypes.c_void_p],
}.items():
    getattr(_libc, _name).argtypes = _types


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class Mapping:
    """Shared bytes as a tensor, `.bytes`. They stay mapped as long as a view of them lives."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.map = mmap.mmap(fd, num_bytes)
        self.bytes: Tensor = torch.frombuffer(self.map, dtype=torch.uint8)


def create(num_bytes: int) -> int:
    """Return the descriptor of a new anonymous file of zeros, which takes memory as it is used."""
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
    """One rank's header, which all its peers on the host map, and `.stage`, bytes of its own.

    The header has a counter of barriers, semaphores on which the owner waits, and two slots in
    which it says what it is about to do: one is written while peers still read the other.
    """

    def __init__(self, mapping: Mapping, pid: int) -> None:
        self.pid = pid
        self.memory = memoryview(mapping.map)
        self.stage = mapping.bytes[HEADER_BYTES:]
        self._keep = mapping
        base = mapping.bytes.data_ptr()
        self.sems = [ctypes.c_void_p(base + _SEMS + k * _SEM_BYTES) for k in range(_ROUNDS)]

    def init(self) -> None:
        """Make the semaphores. The owner, before anybody else maps it."""
        for sem in self.sems:
            if _libc.sem_init(sem, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init")

    @property
    def entered(self) -> int:
        """How many barriers the owner has come to."""
        return int(_WORDS.unpack_from(self.memory)[0])

    def comes_to(self, barrier: int) -> bool:
        """Whether the owner has come to a barrier, or still may, as far as it says itself."""
        entered, state = _WORDS.unpack_from(self.memory)
        if state == _LEFT:
            return bool(entered >= barrier)
        return state == _HERE or bool(entered > barrier)

    def has_left(self) -> bool:
        """Whether the owner has closed it, after all that it took part in."""
        return int(_WORDS.unpack_from(self.memory)[1]) == _LEFT

    def say(self, entered: int, state: int = _HERE) -> None:
        """Say how far the owner is."""
        _WORDS.pack_into(self.memory, 0, entered, state)

    def slot(self, number: int) -> memoryview:
        """Return the slot for an operation: two take turns."""
        begin = _SLOTS + number % 2 * SLOT_BYTES
        return self.memory[begin : begin + SLOT_BYTES]


class Host:
    """The windows of the ranks on one host, by their place among them, and the barrier.

    The barrier is by dissemination (Hensgen, Finkel and Manber, 1988): in round k everybody wakes
    whoever is 2^k places on, so that after log2(n) rounds all have heard of all.
    """

    def __init__(self, windows: list[Window], me: int, ranks: list[int], timeout_s: float) -> None:
        self.windows = windows
        self.me = me
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.entered = 0
        self._closed = False
        self._pidfds = {i: _pidfd(w.pid) for i, w in enumerate(windows) if i != me}
        n = len(windows)
        rounds = range((n - 1).bit_length())
        self._steps = [(windows[(me + (1 << k)) % n].sems[k], windows[me].sems[k]) for k in rounds]
        self._soon = _Timespec()

    def meet(self, what: str) -> None:
        """Wait for all. Raises PeerLost, naming who does not come, in what."""
        self.entered += 1
        self.windows[self.me].say(self.entered)
        for theirs, mine in self._steps:
            _libc.sem_post(theirs)
            for _ in range(_TRIES):
                if _libc.sem_trywait(mine) == 0:
                    break
                os.sched_yield()
            else:
                self._wait(mine, what)

    def _wait(self, sem: ctypes.c_void_p, what: str) -> None:
        begin = time.monotonic()
        doomed = False
        while True:
            until = time.time() + _LOOK_S
            self._soon.sec, self._soon.nsec = int(until), int(until % 1 * 1e9)
            if _libc.sem_timedwait(sem, ctypes.byref(self._soon)) == 0:
                return
            if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(ctypes.get_errno(), "sem_timedwait")
            if self._closed:
                raise PeerLost(f"{what}: the group was closed meanwhile")
            ended, absent, left = self._missing()
            if ended or left:
                if doomed:  # for the second time: what was on its way has come by now
                    why = "has ended" if ended else "did not come" if absent else "has given up"
                    self.give_up(what, ended or absent or left, why)
                doomed = True
            elif time.monotonic() - begin > self.timeout_s:
                self.give_up(what, absent, f"did not come within {self.timeout_s:g} s")

    def _missing(self) -> tuple[list[int], list[int], list[int]]:
        """Return who has ended, who may still come to this barrier, and who has left before it.

        One that has come to it may have ended, or hang, before it has woken whom it should.
        """
        others = [(i, w) for i, w in enumerate(self.windows) if i != self.me]
        left = [i for i, w in others if not w.comes_to(self.entered)]
        near = [i for i, w in others if w.entered <= self.entered and not w.has_left()]
        late = [i for i in near if self.windows[i].entered < self.entered]
        here = [i for i in late or near if i not in left]
        return [i for i in near if self._has_ended(i)], here, left

    def lost(self) -> str:
        """Name the ranks that have ended or are stopped; empty where all are well."""
        told = []
        for i, w in enumerate(self.windows):
            state = "has ended" if self._has_ended(i) else "is stopped" if _stopped(w.pid) else ""
            if state:
                told.append(f"rank {self.ranks[i]} (process {w.pid}) {state}")
        return ", ".join(told)

    def give_up(self, what: str, missing: list[int], why: str) -> NoReturn:
        """Let the peers that wait know, and raise PeerLost."""
        self.windows[self.me].say(self.entered, _GAVE_UP)
        who = [f"rank {self.ranks[i]} (process {self.windows[i].pid})" for i in missing]
        raise PeerLost(
            f"{what}: {', '.join(who) or 'a peer'} {why}; rank {self.ranks[self.me]} waited"
        )

    def _has_ended(self, i: int) -> bool:
        fd = self._pidfds.get(i, -1)
        if fd < 0:
            return False
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Let the peers that wait know, and release what is not memory. Twice is safe."""
        self._closed = True
        self.windows[self.me].say(self.entered, _LEFT)
        fds, self._pidfds = self._pidfds, {}
        for fd in fds.values():
            if fd >= 0:
                os.close(fd)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1  # an old kernel: the time limit is what remains


def _stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
