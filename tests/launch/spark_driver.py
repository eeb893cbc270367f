"""What pytest runs in the environment of Spark, with two executors: see test_drivers.py."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from pyspark import SparkConf, SparkContext

import hvdtrain.launch.spark as hvd_spark
from hvdtrain.errors import InputError, LaunchError, WorldError
from hvdtrain.hvd import alias
from hvdtrain.launch.event_loop import RankFailed
from tests.launch.drivers import digits, fail, sums


@pytest.fixture(scope="module", autouse=True)
def _context() -> Iterator[None]:
    alias.install()
    with pytest.raises(InputError, match="^no SparkContext is active"):
        hvd_spark.run(sums)
    settings = SparkConf().setMaster("local-cluster[2,2,1024]").set("spark.ui.enabled", "false")
    settings.set("spark.default.parallelism", "4")
    settings.set("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
    with SparkContext(conf=settings) as context:
        context.setLogLevel("OFF")
        yield


def test_functions_run_in_the_order_of_the_ranks() -> None:
    errors = io.StringIO()
    found = hvd_spark.run(
        lambda numbers: {**sums(numbers), "x": os.environ["X"]},
        ([1.0, 2.0],),
        env={"X": "1"},
        stderr=errors,
    )
    assert found == [{"rank": r, "size": 4, "sum": [10.0, 20.0], "x": "1"} for r in range(4)]
    for rank in range(4):
        assert f"[{rank}]<stderr>:ends without a newline\n" in errors.getvalue()


def test_the_digits_end_as_under_torchrun() -> None:
    assert hvd_spark.run(digits, num_proc=2) == [os.environ["TEST_DIGEST"]] * 2


RAISED = RuntimeError, r"^rank 1 failed:\nTraceback(.|\n)*ArithmeticError: as asked\n$"
KILLED = RankFailed, r"^rank 1 on \S+ was killed by SIGKILL$"
WORKER_EXITED = WorldError, r"^rank 1 on \S+ died: .*Python worker exited unexpectedly"


@pytest.mark.parametrize(
    ("how", "others", "error"),
    [
        ("raise", "train", RAISED),
        ("kill", "sleep", KILLED),
        ("kill", "train", KILLED),
        ("kill-guard", "sleep", KILLED),
        ("kill-supervisor", "sleep", KILLED),
        ("kill-task", "sleep", WORKER_EXITED),
    ],
)
def test_the_task_that_fails_is_named(
    how: str, others: str, error: tuple[type[Exception], str]
) -> None:
    """Whether the others wait for it, or do something else, and end when they are ended."""
    kind, said = error
    with pytest.raises(kind, match=said):
        hvd_spark.run(fail, (1, how, others), num_proc=3)


def test_what_spark_refuses() -> None:
    with pytest.raises(InputError, match="^use_mpi=True: "):
        hvd_spark.run(sums, use_mpi=True)
    said = "^0 of 99 tasks have started within 1 s; the ranks need 99"
    with pytest.raises(LaunchError, match=said):
        hvd_spark.run(sums, num_proc=99, start_timeout=1)
