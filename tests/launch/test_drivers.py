"""`hvdtrain.launch.ray` and `.spark` on a real Ray and Spark, on two nodes or executors of one
machine, each with daemons of its own.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hvdtrain.launch
from tests.environments import environment, require
from tests.forkserver import warm
from tests.launching import ROOT, run, succeed
from tests.runs import run_json

RAY, SPARK = pytest.mark.xdist_group("ray"), pytest.mark.xdist_group("spark")
BOTH = pytest.mark.parametrize(
    "kind", [pytest.param("ray", marks=RAY), pytest.param("spark", marks=SPARK)]
)
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(480)]


@cache
def driver(kind: str, *slow: str) -> tuple[dict[str, Any], str]:
    """What each case of a driver has found, and its output: both take long to start."""
    if kind == "spark":
        require("java")
    folder, packages = environment(kind, {"ray": "ray", "spark": "spark-submit"}[kind])
    line = [f"{folder}/python", "-m", f"tests.launch.{kind}_driver", *slow]
    output = succeed(run(line, env=packages, timeout=440))
    (text,) = re.findall(r"found (\{.*)$", output, re.MULTILINE)
    return json.loads(text), output


def failures(kind: str, is_slow: bool) -> list[Any]:
    """What the callers of a function got that fails on one rank, in four ways of Spark's, two of
    Ray's; the slow ones are as many more.
    """
    found = driver(kind, "slow")[0]["fails_otherwise"] if is_slow else driver(kind)[0]["fails"]
    assert len(found) == {"ray": 2, "spark": 4}[kind]
    return list(found)


BOTH_SPEEDS = pytest.mark.parametrize(
    "is_slow", [False, pytest.param(True, marks=pytest.mark.slow)]
)


@BOTH
def test_the_digits_end_as_under_torchrun(kind: str, tmp_path: Path) -> None:
    train = "-m hvdtrain --task digits --backend ddp --epochs 2 --threads 1".split()
    line = ["torchrun", "--nproc-per-node", "2", *train, "--run-dir", str(tmp_path / "run")]
    succeed(run(warm(line)))
    theirs = run_json(tmp_path / "run")["params_sha256"]
    assert driver(kind)[0]["trains"] == [theirs] * 2


# Ray


@RAY
def test_functions_run_on_the_ranks_of_two_nodes() -> None:
    found, output = driver("ray")[0]["works"], driver("ray")[1]
    for numbers, ranks in (([10.0, 20.0], found["sums"]), ([10.0], found["remote"])):
        assert [(one["rank"], one["size"]) for one in ranks] == [(r, 4) for r in range(4)]
        assert all(one["sum"] == numbers for one in ranks)
        nodes = [one["node"] for one in ranks]
        assert nodes == [nodes[0]] * 2 + [nodes[2]] * 2
        assert nodes[0] != nodes[2]
    assert found["counts"] == [[1] * 4, [2] * 4, 3]
    (rank, said), *_ = re.findall(r"\(rank (\d) pid=\d+.*\).* node has rank (\d)", output)
    assert rank == said


@RAY
@BOTH_SPEEDS
def test_the_rank_that_fails_is_named(is_slow: bool) -> None:
    for how, rank, kinds, text in failures("ray", is_slow):
        if how == "raise":
            assert "ArithmeticError" in kinds
            assert f"rank {rank})" in text or f"rank {rank}," in text, text
        else:
            assert "WorldError" in kinds, text
            assert re.match(rf"rank {rank} on \S+ died: ", text), text


@RAY
def test_a_dead_rank_of_an_elastic_job_is_replaced() -> None:
    """The others go on in their processes, with the state of their last commit."""
    found, output = driver("ray")[0]["grows_again"], driver("ray")[1]
    ranks = found["results"]
    assert [rank[:2] for rank in ranks] == [[0, 3], [1, 3], [2, 3]]
    assert len({rank[2] for rank in ranks}) == 1
    assert found["processes"] == 4
    assert found["sizes"] == [2, 2, 3, 3, 3, 3]  # each process in each world but once
    for said in (
        r"rank 1 on \S+ was killed by SIGKILL; world 3 -> 2 ranks, generation 2",
        r"1 rank joined on \S+; world 2 -> 3 ranks, generation 3",
    ):
        assert re.search(said, output)
    assert found["variables"] == [[0, "1"]] * 2
    assert found["error"].startswith("rank 0 failed:\nTraceback")
    assert found["error"].endswith("ArithmeticError: as asked\n")


@RAY
def test_no_rank_outlives_a_driver_that_dies() -> None:
    assert driver("ray")[0]["drivers_die"] == {"static": [], "elastic": []}


@RAY
def test_what_ray_refuses() -> None:
    numbers, discovery, both, resources = (text for _, text in driver("ray")[0]["refuses"])
    assert numbers == "max_workers=2 is less than min_workers=3"
    assert discovery.startswith("override_discovery=False: the nodes are those that Ray has")
    assert both.startswith("give exactly one of num_workers, num_hosts and min_workers")
    assert resources.startswith("Ray has not provided 99 times {'CPU': 1} (PACK) within 1 s")


# Spark


@SPARK
def test_functions_run_in_the_order_of_the_ranks() -> None:
    (*ranks, errors), output = driver("spark")[0]["works"], driver("spark")[1]
    assert ranks == [{"rank": r, "size": 4, "sum": [10.0, 20.0], "x": "1"} for r in range(4)]
    for rank in range(4):
        assert f"[{rank}]<stdout>:node has rank {rank}" in output
        assert f"[{rank}]<stderr>:ends without a newline\n" in errors


@SPARK
@BOTH_SPEEDS
def test_the_task_that_fails_is_named(is_slow: bool) -> None:
    """Whether the others wait for it, or do something else, and end when they are ended."""
    for how, others, kinds, text in failures("spark", is_slow):
        if how == "raise":
            assert text.startswith("rank 1 failed:\nTraceback"), text
            assert text.endswith("ArithmeticError: as asked\n"), text
        elif how in ("kill", "kill-supervisor", "kill-guard"):
            assert "RankFailed" in kinds
            assert re.fullmatch(r"rank 1 on \S+ was killed by SIGKILL", text), text
        elif others == "sleep":
            assert "WorldError" in kinds
            assert re.match(r"rank 1 on \S+ died: .*Python worker exited unexpectedly", text), text
        else:  # Spark reports it, or another rank that has lost it: which comes first varies
            assert re.search(r"^rank 1 on \S+ died|Rank 1 \(process \d+ on \S+\) has ended", text)


@SPARK
def test_what_spark_refuses() -> None:
    found = driver("spark")[0]
    (mpi, by_mpi), (late, slots) = found["refuses"]
    assert (mpi[0], late[0]) == ("InputError", "LaunchError")
    assert by_mpi.startswith("use_mpi=True: ")
    assert slots.startswith("0 of 99 tasks have started within 1 s; the ranks need 99")
    assert found["without"][1].startswith("no SparkContext is active")


# Horovod's own


@pytest.mark.parametrize(
    ("kind", "home", "name"),
    [
        ("ray", "runner", "RayExecutor"),
        ("ray", "elastic", "ElasticRayExecutor"),
        ("spark", "runner", "run"),
    ],
)
def test_the_signatures_are_horovods(kind: str, home: str, name: str) -> None:
    horovods = Path(sys.prefix, "lib").glob(f"python3.*/site-packages/horovod/{kind}/{home}.py")
    ours = Path(hvdtrain.launch.__file__).with_name(f"{kind}.py")
    assert signatures(ours, name) == signatures(next(horovods), name)


def signatures(file: Path, name: str) -> dict[str, str]:
    """Return the names and defaults of the parameters of a function, or of a class's public
    methods.
    """
    nodes = ast.parse(file.read_text()).body
    (node,) = [each for each in nodes if getattr(each, "name", "") == name]
    found = {}
    for function in node.body if isinstance(node, ast.ClassDef) else [node]:
        if isinstance(function, ast.FunctionDef) and re.match("__init__|[^_]", function.name):
            arguments = function.args
            for argument in (*arguments.args, *filter(None, [arguments.kwarg])):
                argument.annotation = None
            found[function.name] = ast.unparse(arguments)
    return found


@pytest.mark.parametrize("kind", ["ray", "spark"])
def test_without_the_package_the_extra_is_named(kind: str) -> None:
    code = f"import hvdtrain.hvd.alias as a; a.install(); import horovod.{kind}"
    finished = run(warm([sys.executable, "-c", code]), cwd=ROOT)
    assert finished.code == 1
    needs = f"ImportError: horovod.{kind} needs {kind.title()}: pip install 'hvdtrain[{kind}]'"
    assert needs in finished.output
