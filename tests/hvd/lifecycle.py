"""One rank of a job that begins or ends as the test wants: see test_lifecycle.py.

`python -m tests.hvd.lifecycle SCENARIO FOLDER ARGUMENTS` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvdtrain.hvd as hvd
from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine import batch as batches
from tests.hvd.behaviour import one_parameter, step_with
from tests.launching import wait_until

Report = dict[str, Any]
MIB = 1 << 18  # floats


def end_of(folder: Path, operation: Callable[[], object]) -> Report:
    """Run an operation that must fail, then shut down.

    Return how it failed, and what of the engine is left.
    """
    try:
        operation()
        return {"kind": "", "text": "the operation came to its end"}
    except Exception as error:
        report: Report = {"kind": type(error).__name__, "text": str(error)}
        (folder / f"failed-{os.environ['RANK']}").touch()
    wait_until((folder / "died").exists, "died")
    for name in ("next", "and the one after"):
        try:
            hvd.allreduce(torch.ones(1), name=name)
        except hvd.HorovodInternalError as error:
            report["next"] = str(error)
    hvd.shutdown()
    report["threads"] = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    return report


def with_a_batch_that_fails_on_one_rank(folder: Path, victim: int) -> Report:
    """The victim has no memory for its part of a collective, and the others wait for it there.

    The second one must not be taken for the first: its call is the same, and its data are others.
    """
    hvd.allreduce(torch.ones(MIB), name="warm")
    run = batches.RUN["allreduce"]

    def fail_once(batch: batches.Batch) -> None:
        batches.RUN["allreduce"] = run
        (folder / "died").touch()
        raise MemoryError("injected")

    if hvd.rank() == victim:
        batches.RUN["allreduce"] = fail_once
    handles = [hvd.allreduce_async(torch.full((MIB,), i), name=f"big.{i}") for i in (1.0, 2.0)]
    texts = []
    for handle in handles:
        try:
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            texts.append(str(error))

    def fail() -> None:
        raise hvd.HorovodInternalError(texts[0])

    return {**end_of(folder, fail), "texts": texts}


def without_shutdown(folder: Path) -> Report:
    """The script just ends, and has waited for neither an operation nor an optimizer."""
    parameter, optimizer = one_parameter(hvd)
    for step in range(3):
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        if step < 2:
            optimizer.step()
    hvd.allreduce_async(torch.ones(1000), name="x")
    hvd.allreduce(torch.ones(3), name="y")
    return {}


def with_children(folder: Path) -> Report:
    """Children forked in the middle: workers of a loader, and one that ends as a script does."""
    parameter, optimizer = one_parameter(hvd)
    squares: Any = [torch.full((4,), float(i) ** 2) for i in range(64)]
    total = 0.0
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            squares, batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        for data in loader:
            step_with(data.mean(0) * (hvd.rank() + 1), parameter, optimizer)
            total += data.mean().item() * (hvd.size() + 1) / 2
        hvd.allreduce(torch.ones(100_000), name="before")  # too large to go with its request
        for end in (hvd.shutdown, sys.exit):  # which runs what is registered for the exit
            child = os.fork()
            if child == 0:
                end()
                os._exit(0)
            os.waitpid(child, 0)
        for count in (1, 100_000):
            sums = hvd.allreduce(torch.ones(count), name="alive", op=hvd.Sum)
            assert sums.sum().item() == hvd.size() * count
    return {"value": parameter.tolist(), "expected": [-total] * 4}


def with_a_rank_that_never_comes(folder: Path) -> Report:
    """The last rank does other things for long, and then finds the job over."""
    parameter, optimizer = one_parameter(hvd)
    for _ in range(3):
        step_with(1, parameter, optimizer)
    (folder / f"ready-{hvd.rank()}").touch()
    # No barrier: who is late for it ends the job, too.
    for rank in range(hvd.size()):
        wait_until((folder / f"ready-{rank}").exists, f"ready-{rank}")
    if hvd.rank() == hvd.size() - 1:
        (folder / "died").touch()
        while basics.engine.shutdown_reason is None:
            time.sleep(0.01)
        return end_of(folder, lambda: hvd.allreduce(torch.ones(1), name="beta"))
    wait_until((folder / "died").exists, "died")
    return end_of(folder, lambda: step_with(1, parameter, optimizer))


def with_a_failing_thread(folder: Path, victim: int, thread: str) -> Report:
    """A thread of the victim's engine raises, where stderr is closed on the last rank."""

    def fail() -> None:
        (folder / "died").touch()
        raise ArithmeticError("injected")

    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        os.close(2)
    if hvd.rank() == victim:
        if thread == "control":
            basics.engine.control._on_tick = fail
        else:
            basics.engine.executor.put(fail)

    def operation() -> None:
        while True:
            hvd.allreduce(torch.ones(2), name="alpha")

    return end_of(folder, operation)


def with_an_unreachable_host(folder: Path) -> Report:
    """The link between two hosts goes down while data, and messages of the engine, are in flight.

    The test writes "died" then.
    """
    tensors = [torch.ones(MIB) for _ in range(4)]

    def operation() -> None:
        while True:
            handles = [hvd.allreduce_async_(t, name=f"big.{i}") for i, t in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)
            (folder / f"ready-{hvd.rank()}").touch()

    return end_of(folder, operation)


def main() -> None:
    scenario, folder, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    report = globals()[scenario](Path(folder), *(int(a) if a.isdigit() else a for a in arguments))
    rank = int(os.environ["RANK"])
    # In one write: what other threads print goes to the same file.
    os.write(1, f"{json.dumps({'rank': rank, **report})}\n".encode())


if __name__ == "__main__":
    main()
