"""MPI's progress: a thread that calls MPI while this process has no other reason to.

`mpi_channel` starts it with the first channel. MPI moves messages during its own calls only, and a
complete send is no proof that its message has left the process. Open MPI between hosts, above
64 KB:

    sender                                   receiver
      |---- request ------------------------->|
      |<--- where the data belong ------------|
      |==== data, which fill the socket =====>|   the sender's MPI_Testall: complete
      |     end of message: EAGAIN, queued    |   the receiver's MPI_Testall: not complete
      |---- end of message: in the next call->|

A rank that now waits for anything but MPI, for example the coordinator of `hvd`, would never make
that next call, and its peer would wait until the timeout.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from contextlib import suppress
from typing import Any

# The pauses between two polls: the first after data have been sent, then growing. The first gives
# the receiver time to empty its socket, and outlasts most operations: to take turns with a thread
# after each of them made large ones 1.4 times as long. The last costs an idle rank some 0.2 % of a
# core.
_SHORTEST_S, _LONGEST_S = 5e-3, 50e-3
_END_S = 1.0

_lock = threading.Lock()


def progress_thread(mpi: Any) -> ProgressThread:
    """Return the progress thread of this process, which the first call starts."""
    with _lock:
        return _start(mpi)


class ProgressThread:
    """Polls MPI until the process exits, soon after the last `poll_soon` and seldom otherwise.

    It outlives the groups: a rank may have closed its group before its peer has received the last
    message. From MPI_Finalize on, MPI itself makes progress until all ranks are there.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._wanted = threading.Event()
        self._is_waiting = False  # for `_wanted`
        self._has_sent = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
        self._thread.start()
        # No call of MPI may follow MPI_Finalize. mpi4py calls that when Python has ended its
        # threads; a program may call it before, and MPI then deletes this attribute first.
        atexit.register(self._end)
        keyval = mpi.Comm.Create_keyval(delete_fn=lambda *_: self._end())
        mpi.COMM_SELF.Set_attr(keyval, self)

    def poll_soon(self) -> None:
        """Poll in a moment: this process has sent data, and may not call MPI for a while."""
        self._has_sent = True
        if self._is_waiting:
            self._wanted.set()

    def _run(self) -> None:
        pause_s = _LONGEST_S
        while not self._ended:
            # In this order, as `poll_soon` has the other one: one of the two sees what is new.
            self._is_waiting = True
            if not self._has_sent:
                self._wanted.wait(pause_s)
            self._is_waiting = False
            self._wanted.clear()
            while self._has_sent:  # operations that follow each other call MPI themselves
                self._has_sent = False
                pause_s = _SHORTEST_S
                time.sleep(pause_s)
            if self._ended:
                return
            with suppress(self._mpi.Exception):  # the operation that it concerns raises it, too
                self._mpi.COMM_WORLD.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def _end(self) -> None:
        """End the thread. Twice is safe."""
        self._ended = True
        self._wanted.set()
        self._thread.join(_END_S)


_start = functools.cache(ProgressThread)
