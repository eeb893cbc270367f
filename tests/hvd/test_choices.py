"""Scripts on `hvdtrain.hvd` and `--backend compat`: they choose alike and share no settings."""

from __future__ import annotations

import os
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hvdtrain import BackendOptions, detect, open_backend
from hvdtrain.hvd.basics import basics
from tests.hvd.conftest import OUR_TORCHRUN
from tests.hvd.pool import HvdRanks


def transports_chosen(hvd: Any, has_proc: bool) -> list[str]:
    """Return the transport that a script gets and the one that `compat` gets, without /proc, too,
    by which ranks map each other's memory.
    """
    hvd.shutdown()
    is_dir = os.path.isdir
    with patch(
        "os.path.isdir", lambda path: is_dir(path) and (has_proc or path != "/proc/self/fd")
    ):
        hvd.init()
        chosen = [basics.engine.process_groups.transport]
        hvd.shutdown()
        with open_backend("compat", detect(), BackendOptions(device="cpu")) as backend:
            chosen += [basics.engine.process_groups.transport, backend.describe()["transport"]]
    hvd.init()
    return chosen


@pytest.mark.parametrize("hvd_ranks", OUR_TORCHRUN, indirect=True)
@pytest.mark.parametrize(("has_proc", "expected"), [(True, "shm"), (False, "gloo")])
def test_the_same_transport(hvd_ranks: HvdRanks, has_proc: bool, expected: str) -> None:
    found = hvd_ranks.run(transports_chosen, has_proc)
    assert found == [[expected] * 3] * hvd_ranks.n


def limits_of_two_backends(hvd: Any) -> tuple[list[tuple[float, float]], bool]:
    """Return the limits of two backends in one process, and whether os.environ is as before."""
    hvd.shutdown()
    before, limits = dict(os.environ), []
    for timeout_s in (21.0, 23.0):
        options = BackendOptions(device="cpu", timeout_s=timeout_s)
        with open_backend("compat", detect(), options):
            in_force = basics.engine.settings
            limits.append((in_force.gloo_timeout_s, in_force.peer_limit_s))
    unchanged = dict(os.environ) == before
    hvd.init()
    return limits, unchanged


@pytest.mark.parametrize("hvd_ranks", [("hvd-torchrun", 2)], indirect=True)
def test_a_second_backend_has_its_own_limits(hvd_ranks: HvdRanks) -> None:
    found = hvd_ranks.run(limits_of_two_backends)
    assert found == [([(21.0, 21.0), (23.0, 23.0)], True)] * 2


def checks_of_peers(hvd: Any) -> int:
    """Return how often rank 0 checks its peers, which it does twice a second, while it sends 200
    operations, each right after one that its caller has waited for.
    """
    control, checks = basics.engine.control, set()
    if hvd.rank() == 0:  # an operation that is alone is sent at once: keep one waiting
        waiting = hvd.allreduce_async(torch.ones(1), name="waiting")
    for _ in range(200):
        hvd.allreduce(torch.ones(1), name="before")
        handle = hvd.allreduce_async(torch.ones(1), name="after")
        while hvd.rank() == 0 and not hvd.poll(handle):  # without waiting, which would send it
            time.sleep(0.0001)
        hvd.synchronize(handle)
        checks.add(control._last_check)
    if hvd.rank():
        waiting = hvd.allreduce_async(torch.ones(1), name="waiting")
    hvd.synchronize(waiting)
    return len(checks)


@pytest.mark.parametrize("hvd_ranks", [("hvd-torchrun", 2)], indirect=True)
def test_an_operation_is_not_sent_with_the_next_check(hvd_ranks: HvdRanks) -> None:
    assert hvd_ranks.run(checks_of_peers)[0] < 10


def remove_sets_while_channels_come(hvd: Any) -> int:
    """Remove process sets, which reads the channels, while another thread adds some."""
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
    return len(names)


@pytest.mark.parametrize("hvd_ranks", [("hvd-torchrun", 2)], indirect=True)
def test_sets_are_removed_while_channels_are_added(hvd_ranks: HvdRanks) -> None:
    assert min(hvd_ranks.run(remove_sets_while_channels_come)) >= 60


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


def submit_while_another_thread_sends(hvd: Any, name: str | None) -> bool:
    """Return whether a thread that has submitted an operation, and one that sends it meanwhile, as
    the control thread may, both go on.
    """
    engine: Any = basics.engine
    handles: list[int] = []
    submitting = threading.Thread(
        target=lambda: handles.append(hvd.allreduce_async(torch.ones(1), name=name)), daemon=True
    )
    gate = engine._send_lock = Gate(engine._send_lock, submitting)
    sending = threading.Thread(target=engine.send_submitted, daemon=True)
    submitting.start()
    gate.reached.wait(20)
    sending.start()
    for thread in (submitting, sending):
        thread.join(20)
    engine._send_lock = gate.lock
    return bool(handles) and hvd.synchronize(handles[0]).item() == 1.0


@pytest.mark.parametrize("name", ["x", None])
@pytest.mark.parametrize("hvd_ranks", [("hvd-torchrun", 2)], indirect=True)
def test_a_thread_submits_while_another_one_sends(hvd_ranks: HvdRanks, name: str | None) -> None:
    assert all(hvd_ranks.run(submit_while_another_thread_sends, name))
