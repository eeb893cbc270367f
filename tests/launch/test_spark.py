"""`hvdtrain.launch.spark` on a real Spark: two executors of one machine, in barrier mode."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import hvdtrain.launch
from tests.environments import environment, require
from tests.forkserver import warm
from tests.launching import ROOT, run, succeed

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(480),
]
Driver = tuple[dict[str, Any], str]


@pytest.fixture(scope="module")
def driver() -> Driver:
    """What each case of the driver has found, and its output: Spark takes long to start."""
    folder, packages = environment("spark", "spark-submit")
    require("java")
    line: list[str | Path] = [folder / "python", "-m", "tests.launch.spark_driver"]
    finished = run(line, env=packages, timeout=440)
    (text,) = re.findall(r"found (\{.*)$", succeed(finished), re.MULTILINE)
    found: dict[str, Any] = json.loads(text)
    return found, finished.output


def test_functions_run_in_the_order_of_the_ranks(driver: Driver) -> None:
    (*ranks, errors), output = driver[0]["works"], driver[1]
    expected = [{"rank": r, "size": 4, "sum": [10.0, 20.0], "x": "1"} for r in range(4)]
    assert ranks == expected
    for rank in range(4):
        assert f"[{rank}]<stdout>:node has rank {rank}" in output
        assert f"[{rank}]<stderr>:ends without a newline\n" in errors


def test_the_digits_end_as_under_torchrun(driver: Driver, tmp_path: Path) -> None:
    train = "-m hvdtrain --task digits --backend ddp --epochs 2 --threads 1".split()
    line = ["torchrun", "--nproc-per-node", "2", *train, "--run-dir", str(tmp_path / "run")]
    succeed(run(warm(line)))
    (theirs,) = {json.loads((tmp_path / "run" / "run.json").read_text())["params_sha256"]}
    assert driver[0]["trains"] == [theirs] * 2


def test_the_rank_that_fails_is_named(driver: Driver) -> None:
    """Whether the others wait for it, or do something else, and end when they are ended."""
    for how, others, kinds, text, _seconds in driver[0]["fails"]:
        if how == "raise":
            assert text.startswith("rank 1 failed:\nTraceback"), text
            assert text.endswith("ArithmeticError: as asked\n"), text
        elif how in ("kill", "kill-worker"):
            assert "RankFailed" in kinds
            assert re.fullmatch(r"rank 1 on \S+ was killed by SIGKILL", text), text
        elif others == "sleep":
            assert "WorldError" in kinds
            assert re.match(r"rank 1 on \S+ died: .*Python worker exited unexpectedly", text), text
        else:  # Spark reports it, or another rank that has lost it: which comes first varies
            assert re.search(r"^rank 1 on \S+ died|Rank 1 \(process \d+ on \S+\) has ended", text)
    assert len(driver[0]["fails"]) == 7


def test_what_is_refused(driver: Driver) -> None:
    by_mpi, slots = driver[0]["refuses"]
    assert by_mpi.startswith("InputError: use_mpi=True: ")
    assert slots.startswith("LaunchError: 0 of 99 tasks have started within 1 s; the ranks need 99")
    assert driver[0]["without"].startswith("no SparkContext is active")


def test_the_signature_is_horovods() -> None:
    def signature(file: Path) -> str:
        (function,) = [
            node
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name == "run"
        ]
        for argument in function.args.args:
            argument.annotation = None
        return ast.unparse(function.args)

    horovods = Path(sys.prefix, "lib").glob("python3.*/site-packages/horovod/spark/runner.py")
    ours = Path(hvdtrain.launch.__file__).with_name("spark.py")
    assert signature(ours) == signature(next(horovods))


def test_without_spark_the_extra_is_named() -> None:
    code = "import hvdtrain.hvd.alias as a; a.install(); import horovod.spark"
    finished = run(warm([sys.executable, "-c", code]), cwd=ROOT)
    assert finished.code == 1
    assert "ImportError: horovod.spark needs Spark: pip install 'hvdtrain[spark]'" in (
        finished.output
    )
