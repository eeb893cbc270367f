"""`hvdtrain.launch.ray` and `.spark` on a real Ray and Spark, on two nodes or executors of one
machine, each with daemons of its own: the tests are in ray_driver.py and spark_driver.py.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import hvdtrain.launch
from tests.environments import environment, require
from tests.forkserver import warm
from tests.launching import ROOT, run, succeed
from tests.runs import run_json

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(480)]
PYTEST = "-m pytest -s --noconftest -p no:cacheprovider -o filterwarnings=default".split()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in ("ray", "spark")]
)
def test_the_driver(kind: str, tmp_path: Path) -> None:
    """All tests of a driver in one process: Ray and Spark take long to start."""
    if kind == "spark":
        require("java")
    folder, packages = environment(kind, {"ray": "ray", "spark": "spark-submit"}[kind])
    train = "-m hvdtrain --task digits --backend ddp --epochs 2 --threads 1".split()
    line = ["torchrun", "--nproc-per-node", "2", *train, "--run-dir", str(tmp_path / "run")]
    succeed(run(warm(line)))
    packages["TEST_DIGEST"] = run_json(tmp_path / "run")["params_sha256"]
    line = [f"{folder}/python", *PYTEST, f"tests/launch/{kind}_driver.py"]
    output = succeed(run(line, env=packages, timeout=440))
    # What the driver prints of its ranks.
    if kind == "spark":
        for rank in range(4):
            assert f"[{rank}]<stdout>:node has rank {rank}" in output, output
    else:
        ranks = re.findall(r"\(rank (\d) pid=\d+.*\).* node has rank (\d)", output)
        assert ranks, output
        assert ranks[0][0] == ranks[0][1]


# Horovod's own


@pytest.mark.parametrize(("kind", "name"), [("ray", "RayExecutor"), ("spark", "run")])
def test_the_signatures_are_horovods(kind: str, name: str) -> None:
    horovods = Path(sys.prefix, "lib").glob(f"python3.*/site-packages/horovod/{kind}/runner.py")
    ours = Path(hvdtrain.launch.__file__).with_name(f"{kind}.py")
    assert signatures(ours, name) == signatures(next(horovods), name)


def signatures(file: Path, name: str) -> dict[str, str]:
    """Return the names and defaults of the parameters of a function, or of a class's public
    methods.
    """
    nodes = ast.parse(file.read_text()).body
    (node,) = [each for each in nodes if getattr(each, "name", "") == name]
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            each.annotation = None
    return {
        function.name: ast.unparse(function.args)
        for function in (node.body if isinstance(node, ast.ClassDef) else [node])
        if isinstance(function, ast.FunctionDef) and re.match("__init__|[^_]", function.name)
    }


@pytest.mark.parametrize("kind", ["ray", "spark"])
def test_without_the_package_the_extra_is_named(kind: str) -> None:
    code = f"import hvdtrain.hvd.alias as a; a.install(); import horovod.{kind}"
    finished = run(warm([sys.executable, "-c", code]), cwd=ROOT)
    assert finished.code == 1
    needs = f"ImportError: horovod.{kind} needs {kind.title()}: pip install 'hvdtrain[{kind}]'"
    assert needs in finished.output
