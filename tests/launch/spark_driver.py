"""A driver of Spark, with two executors on one machine: `python -m tests.launch.spark_driver`."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext

import hvdtrain.launch.spark as hvd_spark

CASES: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


def sums(numbers: list[float]) -> dict[str, Any]:
    import torch

    import hvdtrain.hvd as hvd

    hvd.init()
    print(f"node has rank {hvd.rank()}")
    print("ends without a newline", end="", file=sys.stderr)
    total = hvd.allreduce(torch.tensor(numbers) * (hvd.rank() + 1), op=hvd.Sum)
    return {"rank": hvd.rank(), "size": hvd.size(), "sum": total.tolist(), "x": os.environ["X"]}


def digits() -> str:
    from hvdtrain import TrainConfig, Trainer, open_backend
    from hvdtrain.training.task import load_task

    config = TrainConfig(task="digits", backend="ddp", epochs=2, threads=1)
    with open_backend("ddp", options=config.backend_options(), agree_on=config.agreed()) as backend:
        return Trainer(load_task("digits", ()), backend, config).fit().params_sha256


def fail(how: str, others: str, file: str) -> None:
    import psutil
    import torch

    import hvdtrain.hvd as hvd

    hvd.init()
    if hvd.rank() == 1:
        Path(file).write_text(str(time.time()))
    if hvd.rank() == 1 and how == "raise":
        raise ArithmeticError("as asked")
    if hvd.rank() == 1:
        killed = psutil.Process()
        for _ in range({"kill": 0, "kill-worker": 1, "kill-task": 2}[how]):
            killed = killed.parent()
        killed.kill()
    while True:
        if others == "train":
            hvd.allreduce(torch.ones(3))
        time.sleep(0.1)


@case
def works() -> list[Any]:
    errors = io.StringIO()
    found = hvd_spark.run(sums, ([1.0, 2.0],), env={"X": "1"}, stderr=errors)
    found.append(errors.getvalue())
    return found


@case
def trains() -> list[Any]:
    return hvd_spark.run(digits, num_proc=2)


@case
def fails() -> list[Any]:
    found = []
    for how in ("raise", "kill", "kill-worker", "kill-task"):
        for others in ("train", "sleep") if how != "kill-worker" else ("sleep",):
            with tempfile.NamedTemporaryFile() as file:
                try:
                    hvd_spark.run(fail, (how, others, file.name), num_proc=3)
                except Exception as error:
                    kinds = [kind.__name__ for kind in type(error).__mro__]
                    seconds = time.time() - float(Path(file.name).read_text())
                    found.append([how, others, kinds, str(error), seconds])
    return found


@case
def refuses() -> list[str]:
    found = []
    for arguments in ({"use_mpi": True}, {"num_proc": 99, "start_timeout": 1}):
        try:
            hvd_spark.run(sums, **arguments)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def main() -> None:
    try:
        hvd_spark.run(sums)
    except Exception as error:
        without = str(error)
    settings = SparkConf().setMaster("local-cluster[2,2,1024]").set("spark.ui.enabled", "false")
    settings.set("spark.default.parallelism", "4")
    settings.set("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
    with SparkContext(conf=settings) as context:
        context.setLogLevel("OFF")
        found = {name: CASES[name]() for name in sys.argv[1:] or CASES}
    print("found " + json.dumps({**found, "without": without}), flush=True)


if __name__ == "__main__":
    main()
