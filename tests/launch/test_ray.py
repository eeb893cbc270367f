"""`hvdtrain.launch.ray` on a real Ray: two nodes of one machine, each with daemons of its own."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import hvdtrain.launch
from tests.environments import environment
from tests.forkserver import warm
from tests.launching import ROOT, run, succeed

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(480),
]
Driver = tuple[dict[str, Any], str]


@pytest.fixture(scope="module")
def driver() -> Driver:
    """What each case of the driver has found, and its output: Ray takes long to start."""
    folder, packages = environment("ray", "ray")
    line: list[str | Path] = [folder / "python", "-m", "tests.launch.ray_driver"]
    finished = run(line, env=packages, timeout=440)
    (text,) = re.findall(r"^found (.*)$", succeed(finished), re.MULTILINE)
    found: dict[str, Any] = json.loads(text)
    return found, finished.output


def test_functions_run_on_the_ranks_of_two_nodes(driver: Driver) -> None:
    found, output = driver[0]["works"], driver[1]
    for numbers, ranks in (([10.0, 20.0], found["sums"]), ([10.0], found["remote"])):
        assert [(one["rank"], one["size"]) for one in ranks] == [(r, 4) for r in range(4)]
        assert all(one["sum"] == numbers for one in ranks)
        nodes = [one["node"] for one in ranks]
        assert nodes == [nodes[0]] * 2 + [nodes[2]] * 2
        assert nodes[0] != nodes[2]
    assert found["counts"] == [[1] * 4, [2] * 4, 3]
    (rank, said), *_ = re.findall(r"\(rank (\d) pid=\d+.*\).* node has rank (\d)", output)
    assert rank == said


def test_the_digits_end_as_under_torchrun(driver: Driver, tmp_path: Path) -> None:
    ours = driver[0]["trains"]
    train = "-m hvdtrain --task digits --backend ddp --epochs 2 --threads 1".split()
    line = ["torchrun", "--nproc-per-node", "2", *train, "--run-dir", str(tmp_path / "run")]
    succeed(run(warm(line)))
    (theirs,) = {json.loads((tmp_path / "run" / "run.json").read_text())["params_sha256"]}
    assert ours["params_sha256"] == [theirs] * 2


def test_the_rank_that_fails_is_named(driver: Driver) -> None:
    found = driver[0]["fails"]
    for how, rank, kinds, text, _seconds in found["errors"]:
        if how == "raise":
            assert "ArithmeticError" in kinds
            assert f"rank {rank})" in text or f"rank {rank}," in text, text
        else:
            assert "WorldError" in kinds, text
            assert re.match(rf"rank {rank} on \S+ died: ", text), text
    assert len(found["errors"]) == 4


def test_a_dead_rank_of_an_elastic_job_is_replaced(driver: Driver) -> None:
    """The others go on in their processes, with the state of their last commit."""
    found, output = driver[0]["grows_again"], driver[1]
    ranks = found["results"]
    assert [rank[:2] for rank in ranks] == [[0, 3], [1, 3], [2, 3]]
    assert len({rank[2] for rank in ranks}) == 1
    assert found["processes"] == 4
    assert found["sizes"] == [2, 2, 3, 3, 3, 3]  # each process in each world but once
    assert re.search(r"rank 1 on \S+ died \(SIGKILL\); world 3 -> 2 ranks, generation 2", output)
    assert re.search(r"1 rank joined on \S+; world 2 -> 3 ranks, generation 3", output)
    assert found["variables"] == [[0, "1"]] * 2
    assert found["error"].startswith("rank 0 failed:\nTraceback")
    assert found["error"].endswith("ArithmeticError: as asked\n")


def test_no_rank_outlives_a_driver_that_dies(driver: Driver) -> None:
    assert driver[0]["drivers_die"] == {"static": [], "elastic": []}


def test_what_is_refused(driver: Driver) -> None:
    found = driver[0]["refuses"]
    numbers, discovery, nothing, both, resources = found["errors"]
    assert numbers == "max_workers=2 is less than min_workers=3"
    assert discovery.startswith("override_discovery=False: the nodes are those that Ray has")
    assert nothing == both
    assert nothing.startswith("give exactly one of num_workers, num_hosts and min_workers")
    assert resources.startswith("Ray has not provided 99 times {'CPU': 1} (PACK) within 1 s")


# Horovod's own


@pytest.mark.parametrize(
    ("name", "home"), [("RayExecutor", "runner"), ("ElasticRayExecutor", "elastic")]
)
def test_the_signatures_are_horovods(name: str, home: str) -> None:
    (horovods,) = Path(sys.prefix, "lib").glob(f"python3.*/site-packages/horovod/ray/{home}.py")
    ours = Path(hvdtrain.launch.__file__).with_name("ray.py")
    assert signatures(ours, name) == signatures(horovods, name)


def signatures(file: Path, name: str) -> dict[str, str]:
    """Return the names and defaults of the parameters of a class's public methods."""
    (executor,) = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    found = {}
    for node in executor.body:
        if isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name == "__init__"):
            for argument in (*node.args.args, *filter(None, [node.args.kwarg])):
                argument.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def test_without_ray_the_extra_is_named() -> None:
    code = "import hvdtrain.hvd.alias as a; a.install(); import horovod.ray"
    finished = run(warm([sys.executable, "-c", code]), cwd=ROOT)
    assert finished.code == 1
    assert "ImportError: horovod.ray needs Ray: pip install 'hvdtrain[ray]'" in finished.output
