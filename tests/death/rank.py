"""One rank of a job that loses a rank: see test_death.py.

`python -m tests.death.rank LAYER TRANSPORT WHERE FOLDER VICTIM FAULT SEED` leaves an answer,
JSON, in the folder. The files there are the events:

    victim                          others
      |                               | ready-R   they wait for the victim, or move data
      | died                          |
      | fault                         | failed-R  the operation has failed
                                      | answer-R.json
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdtrain.hvd as hvd
from hvdtrain import detect
from hvdtrain.hvd.basics import basics
from tests.launch.failing import fail
from tests.launching import wait_until
from tests.transports.collectives import operations
from tests.transports.collectives.operations import Call
from tests.transports.jobs import Answer, write_answer
from tests.transports.lifecycle import MIB, open_group

if os.environ.get("TEST_OLD_PYTHON"):
    del os.pidfd_open, os.memfd_create

# A thread inflicts these while the main thread is in an operation; the others are its own acts.
BY_THREAD = ("kill", "stop")


def wait_for(folder: Path, pattern: str, count: int = 1) -> None:
    wait_until(lambda: len(list(folder.glob(pattern))) >= count, f"{count} files {pattern}")


class Job:
    """A rank's part in the job: which one fails, how, and when."""

    errors: type[Exception]
    again: Callable[[], object]
    """Call a collective, which must fail once a rank is lost. Raises one of `errors`."""
    open: Callable[[str], object]
    """Join the job, on a transport."""
    close: Callable[[], object]

    def __init__(self, transport: str, folder: Path, victim: int, fault: str, seed: int) -> None:
        self.folder, self.fault, self.seed = folder, fault, seed
        world = detect()
        self.rank, self.size = world.rank, world.size
        self.is_victim = self.rank == victim
        self.open(transport)

    def mark(self, event: str) -> None:
        """Tell the other ranks of an event."""
        (self.folder / f"{event}-{self.rank}").touch()

    def strike(self) -> None:
        """Inflict the fault on this rank."""
        died = self.folder / "died"
        if self.fault not in ("leave", "exit"):
            fail(self.fault, str(died))
        died.touch()
        if self.fault == "leave":
            self.close()
            # The others fail by what has been sent to them, not by the end of the process.
            wait_for(self.folder, "failed-*", self.size - 1)
        sys.exit(0)

    def outcome(self, operation: Callable[[], object]) -> Answer:
        """Run an operation that must fail. Return how it failed, and what is left then."""
        try:
            operation()
            return {"kind": "", "text": "the operation came to its end"}
        except self.errors as error:
            answer: Answer = {"kind": type(error).__name__, "text": str(error)}
        self.mark("failed")
        wait_for(self.folder, "died")
        for _ in range(2):
            try:
                self.again()
                answer["next"] = "it works again"
            except self.errors as error:
                answer["next"] = str(error)
        self.close()
        threads = (t for t in threading.enumerate() if t is not threading.main_thread())
        answer["threads"] = [t.name for t in threads]
        return answer

    def waiting(self, operation: Callable[[], object]) -> Answer:
        """The others submit an operation; the victim, which never does, fails after that."""
        if self.is_victim:
            wait_for(self.folder, "ready-*", self.size - 1)  # its own is not among them
            self.strike()
        return self.outcome(operation)

    def moving(self, operation: Callable[[], object]) -> Answer:
        """All are in one operation after the other when the victim fails."""

        def strike() -> None:
            wait_for(self.folder, "ready-*", self.size)
            self.strike()

        def run() -> None:
            operation()
            operation()
            self.mark("ready")
            if self.is_victim and self.fault in BY_THREAD:
                threading.Thread(target=strike, daemon=True).start()
            elif self.is_victim:
                strike()
            while True:
                operation()

        return self.outcome(run)


class TransportJob(Job):
    """torch.distributed on one of our transports."""

    errors = RuntimeError
    open = staticmethod(open_group)
    close = staticmethod(dist.destroy_process_group)

    def again(self) -> None:
        dist.all_reduce(torch.ones(1))

    def in_a_blocking_operation(self, late: int = -1) -> Answer:
        def submit() -> None:
            self.mark("ready")
            if self.rank == late:
                wait_for(self.folder, "failed-*", self.size - 2)
            dist.all_reduce(torch.ones(3))

        return self.waiting(submit)

    def with_a_late_rank(self) -> Answer:
        """The last rank comes once another has failed: it is late, and not to blame."""
        return self.in_a_blocking_operation(self.size - 1)

    def in_a_big_operation(self) -> Answer:
        t = torch.ones(64 * MIB)
        return self.moving(lambda: dist.all_reduce(t.fill_(1)))

    def with_many_in_flight(self) -> Answer:
        def operation() -> None:
            calls = [Call(dist, MIB, turns=3, is_async=True) for _ in range(40)]
            operations.complete(*map(operations.all_reduce, calls))

        return self.moving(operation)

    def in_an_operation_by_gloo(self) -> Answer:
        return self.moving(lambda: operations.complete(operations.gather(Call(dist, MIB))))

    def in_any(self) -> Answer:
        """Random collectives, the same on all ranks."""
        chance = random.Random(self.seed)

        def operation() -> None:
            count = chance.choice([1, 1_000, 30_000, 400_000, 3_000_000])
            root, is_async = chance.randrange(self.size), chance.random() < 0.3
            call = Call(dist, count, root=root, turns=3, is_async=is_async)
            operations.complete(chance.choice(operations.operations(dist))(call))

        return self.moving(operation)


class HvdJob(Job):
    """Our Horovod API. Its transport is the one of the environment."""

    errors = hvd.HorovodInternalError
    close = staticmethod(hvd.shutdown)

    def open(self, _: str) -> None:
        hvd.init()

    def again(self) -> None:
        hvd.allreduce(torch.ones(1), name="again")

    def _in(self, operation: Callable[[], object]) -> Answer:
        """The others are ready once their engines have sent the request to rank 0."""
        control = basics.engine.control
        send = control.send

        def send_and_mark(rank: int, header: list[Any], payload: bytes = b"") -> None:
            send(rank, header, payload)
            if header[0] in ("ops", "join"):
                self.mark("ready")

        if not self.is_victim:
            control.send = send_and_mark  # type: ignore[method-assign]
        return self.waiting(operation)

    def in_a_blocking_operation(self) -> Answer:
        return self._in(lambda: hvd.allreduce(torch.ones(3), name="alpha"))

    def in_join(self) -> Answer:
        return self._in(hvd.join)

    def with_pending_operations(self) -> Answer:
        """The others have asynchronous operations that the victim has not submitted."""
        if self.is_victim:
            return self.waiting(lambda: None)
        handles = [hvd.allreduce_async(torch.ones(i + 1), name=f"a.{i}") for i in range(3)]
        handles.append(hvd.allgather_async(torch.ones(2), name="b"))
        handles.append(hvd.broadcast_async_(torch.ones(1), 0))
        self.mark("ready")

        def every() -> None:
            first, *others = handles
            for handle in others:
                with pytest.raises(hvd.HorovodInternalError):
                    hvd.synchronize(handle)
            hvd.synchronize(first)

        return self.waiting(every)

    def in_a_step(self) -> Answer:
        """All are training."""
        model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(12)))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters()
        )

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(8, 500)).square().mean().backward()
            optimizer.step()

        return self.moving(step)


def main() -> None:
    layer, transport, where, folder, victim, fault, seed = sys.argv[1:]
    torch.set_num_threads(1)
    kind = HvdJob if layer == "hvd" else TransportJob
    job = kind(transport, Path(folder), int(victim), fault, int(seed))
    write_answer(job.folder, job.rank, getattr(job, where)())
    if transport == "mpi4py":  # the end of one that has lost a peer is the end of the job
        wait_for(job.folder, "answer-*.json", job.size - 1)


if __name__ == "__main__":
    main()
