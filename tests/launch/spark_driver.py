"""A driver of Spark, with two executors on one machine: `python -m tests.launch.spark_driver`."""

from __future__ import annotations

import io
import os
from typing import Any

from pyspark import SparkConf, SparkContext

import hvdtrain.launch.spark as hvd_spark
from hvdtrain.hvd import alias
from tests.launch.drivers import case, digits, error_of, fail, print_cases, slow_case, sums


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


def failures(*ways: str) -> list[Any]:
    """Let rank 1 fail in each way, while the others train or do something else."""
    found = []
    for way in ways:
        how, others = way.split()
        found.append([how, others, *error_of(hvd_spark.run, fail, (1, how, others), num_proc=3)])
    return found


@case
def fails() -> list[Any]:
    return failures("raise train", "kill sleep", "kill-supervisor sleep", "kill-task sleep")


@slow_case
def fails_otherwise() -> list[Any]:
    return failures("raise sleep", "kill train", "kill-guard sleep", "kill-task train")


@case
def refuses() -> list[Any]:
    mpi = error_of(hvd_spark.run, sums, use_mpi=True)
    return [mpi, error_of(hvd_spark.run, sums, num_proc=99, start_timeout=1)]


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
