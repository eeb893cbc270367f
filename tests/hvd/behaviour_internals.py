"""What only ours has inside: choices shared with `--backend compat`, and threads of the engine that
meet; see behaviour.py.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from hvdtrain import BackendOptions, detect, open_backend
from hvdtrain.hvd.basics import basics
from tests.hvd.behaviour import Hvd, case, raises

on_two = partial(case, arms=["hvd-torchrun"], sizes=(2,))


@case(arms=["hvd-torchrun"])
def compat_chooses_the_transport_that_a_script_gets(hvd: Hvd) -> None:
    """Without /proc, too, by which ranks map each other's memory."""
    is_dir = os.path.isdir
    for hidden, expected in (("", "shm"), ("/proc/self/fd", "gloo")):
        hvd.shutdown()
        with patch("os.path.isdir", lambda path, but=hidden: is_dir(path) and path != but):
            hvd.init()
            chosen = [basics.engine.process_groups.transport]
            hvd.shutdown()
            with open_backend("compat", detect(), BackendOptions(device="cpu")) as backend:
                chosen.append(basics.engine.process_groups.transport)
                chosen.append(backend.describe()["transport"])
        hvd.init()
        assert chosen == [expected] * 3


@on_two()
def each_backend_has_its_own_limits(hvd: Hvd) -> None:
    hvd.shutdown()
    before, limits = dict(os.environ), []
    for timeout_s in (21.0, 23.0):
        options = BackendOptions(device="cpu", timeout_s=timeout_s)
        with open_backend("compat", detect(), options):
            in_force = basics.engine.settings
            limits += [in_force.gloo_timeout_s, in_force.peer_limit_s]
    assert dict(os.environ) == before
    hvd.init()
    assert limits == [21.0, 21.0, 23.0, 23.0]


@case(arms=["exact"], exact=True)
def all_ranks_are_exact_or_none(hvd: Hvd) -> None:
    rank = hvd.rank()
    hvd.shutdown()
    with patch.dict(os.environ, HVDTRAIN_EXACT_HOROVOD=str(rank)):
        with raises(ValueError, "HVDTRAIN_EXACT_HOROVOD is set on some ranks only"):
            hvd.init()
    hvd.init()
    assert hvd.rank() == rank


@on_two()
def operations_do_not_wait_for_the_check_of_peers(hvd: Hvd) -> None:
    """Rank 0 checks its peers twice a second: it must not send operations only then. Each comes
    right after one that its caller has waited for.
    """
    checks = set()
    if hvd.rank() == 0:  # an operation that is alone is sent at once: keep one waiting
        waiting = hvd.allreduce_async(torch.ones(1), name="waiting")
    for _ in range(20):
        hvd.allreduce(torch.ones(1), name="before")
        handle = hvd.allreduce_async(torch.ones(1), name="x")
        while not hvd.poll(handle):  # without waiting, which would send it
            time.sleep(0.001)
        hvd.synchronize(handle)
        checks.add(basics.engine.control._last_check)
    if hvd.rank():
        waiting = hvd.allreduce_async(torch.ones(1), name="waiting")
    hvd.synchronize(waiting)
    assert hvd.rank() or len(checks) < 10


@on_two()
def sets_are_removed_while_channels_are_added(hvd: Hvd) -> None:
    """To remove a process set reads the channels."""
    engine, stop = basics.engine, threading.Event()
    names: list[str] = []

    def add() -> None:
        while not stop.is_set():
            names.append(f"of the test.{len(names)}")
            engine.channels.claim(f"kind {len(names)}", 0, 0)

    adding = threading.Thread(target=add)
    adding.start()
    try:
        for added in range(0, 60, 20):
            while len(names) < added + 20 and adding.is_alive():
                time.sleep(0.001)
            hvd.remove_process_set(hvd.add_process_set([0]))
    finally:
        stop.set()
        adding.join()
    engine.channels.remove(lambda name, set_id: name.startswith("kind "))
    hvd.barrier()
    assert len(names) >= 60


class Gate:
    """A lock that one thread takes only once another one has it."""

    def __init__(self, lock: Any, late: threading.Thread) -> None:
        self.lock, self.late = lock, late
        self.reached, self.taken = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is self.late:
            self.reached.set()
            self.taken.wait(20)
        self.lock.acquire()
        self.taken.set()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


@on_two()
def a_thread_submits_while_another_one_sends(hvd: Hvd) -> None:
    """The other one may be the control thread: both go on."""
    engine: Any = basics.engine
    for name in ("x", None):
        handles: list[int] = []

        def submit(name: str | None = name, handles: list[int] = handles) -> None:
            handles.append(hvd.allreduce_async(torch.ones(1), name=name))

        submitting = threading.Thread(target=submit, daemon=True)
        gate = engine._send_lock = Gate(engine._send_lock, submitting)
        sending = threading.Thread(target=engine.send_submitted, daemon=True)
        submitting.start()
        gate.reached.wait(20)
        sending.start()
        for thread in (submitting, sending):
            thread.join(20)
        engine._send_lock = gate.lock
        assert hvd.synchronize(handles[0]).item() == 1.0
