"""Tasks, and a loop of its own, that fail as told: see test_failure.py and tests/death."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain import Backend, BackendOptions, detect, open_backend
from hvdtrain.backends.c10d import C10d
from hvdtrain.errors import InputError
from hvdtrain.tasks.mlp import MLP
from hvdtrain.training.run_dir import RunDirectory


def fail(how: str, mark: str) -> None:
    """Write this rank and its process to the file `mark`, and fail."""
    with open(mark, "a") as file:
        file.write(f"{detect().rank} {os.getpid()}\n")
    match how:
        case "raise":
            raise ArithmeticError("as told")
        case "refuse":
            raise InputError("refused as told")
        case "exit":
            sys.exit(3)
        case "_exit":
            os._exit(3)
        case "leave":
            os._exit(0)
        case "kill":
            signal.raise_signal(signal.SIGKILL)
        case "stop":
            signal.raise_signal(signal.SIGSTOP)
        case "wait":
            wait()


def wait() -> None:
    time.sleep(600)  # for a signal; the other ranks find this line in this one's stack


class Failing(MLP):
    """Fails on `rank` (-1: on all), in `where`: "data" is in the fifth batch of 8.

    `terminated_in`: rank 0 receives SIGTERM as it begins to record the end of the run in run.json
    (`record`), or to close the backend (`close`).
    """

    def __init__(
        self,
        where: str = "",
        how: str = "",
        rank: int = -1,
        mark: str = "",
        samples: int = 4096,
        terminated_in: str = "",
    ) -> None:
        super().__init__(width=2, depth=1, features=2, samples=samples)
        if terminated_in and detect().rank == 0:
            terminate_in(*ENDS[terminated_in])
        self.where, self.how, self.mark = where, how, mark
        self.mine = rank in (-1, detect().rank)
        self.steps = 0

    def _maybe(self, where: str) -> None:
        if self.mine and where == self.where:
            fail(self.how, self.mark)

    def model(self) -> nn.Module:
        self._maybe("model")
        return super().model()

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        train, test = super().datasets()
        return (Samples(self, train), test) if self.where == "data" else (train, test)

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        if self.steps == 4:
            self._maybe("loop")
        loss = super().loss(net, batch)
        if self.how == "diverge" and self.steps == 4:
            return loss * float("nan")
        if self.how == "train":  # until a signal comes
            time.sleep(0.01)
        if self.steps == 4 and self.mine and self.where == "backward":
            return self._interrupt_backward(loss)
        return loss

    def _interrupt_backward(self, loss: Tensor) -> Tensor:
        """Let a second Ctrl-C come while backward is in C++, so that what it calls next in Python
        gets it: the process group.
        """
        signal.raise_signal(signal.SIGINT)  # asks for a checkpoint
        time.sleep(0.3)  # one that comes sooner counts as the same
        begun = threading.Event()

        def interrupt() -> None:
            begun.wait()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        big = torch.ones(2500, 2500)  # for half a second and more
        product = (loss * big) @ big
        product.register_hook(lambda grad: begun.set())  # type: ignore[no-untyped-call]
        return product.sum()


ENDS = {"record": (RunDirectory, "finish"), "close": (C10d, "close")}


def terminate_in(owner: type, name: str) -> None:
    """Let a method send SIGTERM to this process before it does its work."""
    method = getattr(owner, name)

    def terminated(*args: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return method(*args, **more)

    setattr(owner, name, terminated)


class Samples(Dataset[Any]):
    def __init__(self, task: Failing, data: Any) -> None:
        self.task, self.data, self.num_read = task, data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        if self.num_read == 4 * 8 + 1:
            self.task._maybe("data")
        return self.data[index]


def main() -> None:
    """Fail in step 5 on one rank. "other": call another collective; "link": go on, until the
    network ends it.
    """
    backend_name, how, rank, mark, *more = sys.argv[1:]
    transport, timeout_s = more or ("auto", "300")
    options = BackendOptions(transport=transport, timeout_s=float(timeout_s))
    with open_backend(backend_name, options=options) as backend:
        for step in range(1, 1_000_000):
            backend.progress.step = step
            if step == 4 and how == "link":
                await_heartbeat(backend)
            if step == 5 and backend.world.rank == int(rank):
                if how == "other":
                    Path(mark).touch()
                    backend.broadcast_(torch.ones(70))
                fail(how, mark)
            backend.all_reduce(torch.ones(3))


def await_heartbeat(backend: Backend) -> None:
    """Wait for a heartbeat of the peer that has its step."""
    assert backend.hang_watch is not None
    monitor, deadline = backend.hang_watch.monitor, time.monotonic() + 60
    while monitor.progress(1 - backend.world.rank).step is None:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
