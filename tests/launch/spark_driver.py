"""A driver of Spark, with two executors on one machine: `python -m tests.launch.spark_driver`."""

from __future__ import annotations

import io
import os
from typing import Any

from pyspark import SparkConf, SparkContext

import hvdtrain.launch.spark as hvd_spark
from hvdtrain.hvd import alias
from tests.launch.drivers import case, digits, error_of, fail, print_cases, sums


@case
def works() -> list[Any]:
    errors = io.StringIO()
    found = hvd_spark.run(
        lambda numbers: {**sums(numbers), "x": os.environ["X"]},
        ([1.0, 2.0],),
        env={"X": "1"},
        stderr=errors,
    )
    found.append(errors.getvalue())
    return found


@case
def trains() -> list[Any]:
    return hvd_spark.run(digits, num_proc=2)


@case
def fails() -> list[Any]:
    found = []
    for how in ("raise", "kill", "kill-supervisor", "kill-guard", "kill-task"):
        for others in (
            ("sleep",) if how in ("kill-supervisor", "kill-guard") else ("train", "sleep")
        ):
            kinds, text = error_of(hvd_spark.run, fail, (1, how, others), num_proc=3)
            found.append([how, others, kinds, text])
    return found


@case
def refuses() -> list[Any]:
    return [
        error_of(hvd_spark.run, sums, **arguments)
        for arguments in ({"use_mpi": True}, {"num_proc": 99, "start_timeout": 1})
    ]


def main() -> None:
    alias.install()
    without = error_of(hvd_spark.run, sums)
    settings = SparkConf().setMaster("local-cluster[2,2,1024]").set("spark.ui.enabled", "false")
    settings.set("spark.default.parallelism", "4")
    settings.set("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
    with SparkContext(conf=settings) as context:
        context.setLogLevel("OFF")
        print_cases(without=without)


if __name__ == "__main__":
    main()
