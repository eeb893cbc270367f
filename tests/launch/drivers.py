"""What tests run on the ranks of `hvdtrain.run`, Ray and Spark."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def sums(numbers: list[float]) -> dict[str, Any]:
    import horovod.torch as hvd  # an alias, as in the driver
    import torch

    assert hvd.__name__ == "hvdtrain.hvd"
    hvd.init()
    print(f"node has rank {hvd.rank()}")
    print("ends without a newline", end="", file=sys.stderr)
    total = hvd.allreduce(torch.tensor(numbers) * (hvd.rank() + 1), op=hvd.Sum)
    found = {"rank": hvd.rank(), "size": hvd.size(), "sum": total.tolist()}
    hvd.shutdown()
    return found


def digits() -> str:
    from hvdtrain import TrainConfig, Trainer, open_backend
    from hvdtrain.training.task import load_task

    config = TrainConfig(task="digits", backend="ddp", epochs=2, threads=1)
    with open_backend("ddp", options=config.backend_options(), agree_on=config.agreed()) as backend:
        return Trainer(load_task("digits", ()), backend, config).fit().params_sha256


def fail(rank: int, how: str, others: str = "train") -> None:
    """One rank raises or dies; `others`: whether these wait for it, or do something else."""
    import psutil
    import torch

    import hvdtrain.hvd as hvd

    hvd.init()
    if hvd.rank() == rank:
        if how == "raise":
            raise ArithmeticError("as asked")
        killed = psutil.Process()
        for _ in range(["kill", "kill-supervisor", "kill-guard", "kill-task"].index(how)):
            killed = killed.parent()
        killed.kill()
    while True:
        if others == "train":
            hvd.allreduce(torch.ones(3))
        time.sleep(0.1)


def hang(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(300)


def train_elastically(mark: str) -> tuple[int, int, float]:
    """Rank 1 of three dies once, and leaves the file `mark`; all end when it has been replaced."""
    import torch

    import hvdtrain.hvd as hvd

    state: Any = hvd.elastic.TorchState(total=0.0, is_done=False)
    died = Path(mark)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while not state.is_done:
            total = hvd.allreduce(torch.tensor([1.0, died.exists()]), name="x", op=hvd.Sum)
            state.total += float(total[0])
            state.is_done = hvd.size() == 3 and bool(total[1])
            state.commit()
            if hvd.rank() == 1 and not died.exists():
                died.touch()
                signal.raise_signal(signal.SIGKILL)
            time.sleep(0.05)

    hvd.init()
    train(state)
    return hvd.rank(), hvd.size(), state.total
