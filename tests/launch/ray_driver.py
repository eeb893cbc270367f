"""What pytest runs in the environment of Ray, on two nodes of one machine: see test_drivers.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

import hvdtrain.launch.ray as hvd_ray
from hvdtrain.errors import WorldError
from hvdtrain.hvd import alias
from hvdtrain.system.processes import is_running
from tests.launch.drivers import digits, fail, hang, sums, train_elastically
from tests.launching import wait_until


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    node = {"num_cpus": 2, "object_store_memory": 100 << 20}
    head = {**node, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node)
    ray.init(address=cluster.address)
    yield
    ray.shutdown()
    cluster.shutdown()


def executor(**arguments: Any) -> hvd_ray.RayExecutor:
    settings = hvd_ray.RayExecutor.create_settings(timeout_s=60)
    made = hvd_ray.RayExecutor(settings, **arguments)
    made.start(Counter if "num_hosts" in arguments else None)
    return made


class Counter:
    """What `execute` gives to functions."""

    def __init__(self) -> None:
        self.count = 0


def sums_on_node(numbers: list[float]) -> dict[str, Any]:
    return {**sums(numbers), "node": ray.get_runtime_context().get_node_id()}


def test_functions_run_on_the_ranks_of_two_nodes() -> None:
    """Two ranks on each: numbered node by node, with what each has."""
    alias.install()
    ranks = executor(num_hosts=2, num_workers_per_host=2)
    sums_of_two = ranks.run(sums_on_node, args=[[1.0, 2.0]])
    sums_of_one = ray.get(ranks.run_remote(sums_on_node, kwargs={"numbers": [1.0]}))
    for found, total in ((sums_of_two, [10.0, 20.0]), (sums_of_one, [10.0])):
        nodes = [one.pop("node") for one in found]
        assert found == [{"rank": rank, "size": 4, "sum": total} for rank in range(4)]
        assert nodes == [nodes[0]] * 2 + [nodes[2]] * 2
        assert nodes[0] != nodes[2]

    def count(counter: Counter) -> int:
        counter.count += 1
        return counter.count

    assert [ranks.execute(count), ranks.execute(count)] == [[1] * 4, [2] * 4]
    assert ranks.execute_single(count) == 3
    ranks.shutdown()
    ranks.shutdown()


class InTurn(hvd_ray.RayExecutor):
    """Its actors are on two nodes in turn, as in a placement group of the user's own."""

    def _start_actors(self) -> list[Any]:
        actors = super()._start_actors()
        return actors[::2] + actors[1::2]


def test_actors_on_two_nodes_in_turn_are_numbered_node_by_node() -> None:
    alias.install()
    settings = hvd_ray.RayExecutor.create_settings(timeout_s=60)
    ranks = InTurn(settings, num_hosts=2, num_workers_per_host=2)
    ranks.start()
    found = ranks.run(sums_on_node, args=[[1.0]])
    ranks.shutdown()
    assert [one["rank"] for one in found] == list(range(4))
    nodes = [one["node"] for one in found]
    assert nodes == [nodes[0]] * 2 + [nodes[2]] * 2


class Setting:
    """It becomes what the variable X is where it is unpickled, as a module reads it on import."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getenv, ("X",)


def test_the_users_object_is_made_after_the_variables_are_set() -> None:
    ranks = hvd_ray.RayExecutor(hvd_ray.RayExecutor.create_settings(timeout_s=60), num_workers=2)
    ranks.start(str, [Setting()], extra_env_vars={"X": "1"})
    assert ranks.execute(str) == ["1", "1"]
    ranks.shutdown()


def test_the_digits_end_as_under_torchrun() -> None:
    ranks = executor(num_workers=2)
    assert ranks.run(digits) == [os.environ["TEST_DIGEST"]] * 2
    ranks.shutdown()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        ("raise", 0),
        ("kill", 1),
        pytest.param("raise", 1, marks=SLOW),
        pytest.param("kill", 0, marks=SLOW),
    ],
)
def test_the_rank_that_fails_is_named(how: str, rank: int) -> None:
    """Whichever error arrives first; all CPUs are free again."""
    kind, said = {
        "raise": (ArithmeticError, rf"rank {rank}[),]"),
        "kill": (WorldError, rf"^rank {rank} on \S+ died: "),
    }[how]
    with pytest.raises(kind, match=said):
        executor(num_workers=2).run(fail, [rank, how])
    while ray.available_resources().get("CPU") != 4:  # Ray counts them a moment later
        time.sleep(0.1)


def test_a_dead_rank_of_an_elastic_job_is_replaced(tmp_path: Path) -> None:
    """One of three ranks dies: the others go on in their processes, with the state of their last
    commit, and a new one joins them.
    """
    settings = hvd_ray.ElasticRayExecutor.create_settings(
        min_num_proc=2, max_num_proc=3, cooldown_range=[1, 2]
    )
    ranks = hvd_ray.ElasticRayExecutor(settings, env_vars={"X": "1"})
    ranks.start()
    results = ranks.run(lambda: train_elastically(str(tmp_path)))
    assert results == [(rank, 3, results[0][2]) for rank in range(3)]
    worlds = [path.name.split("-") for path in tmp_path.glob("*-*")]
    assert len({pid for pid, _ in worlds}) == 4
    # Each process in each world but once.
    assert sorted(size for _, size in worlds) == ["2", "2", "3", "3", "3", "3"]


def test_an_executor_without_a_number_of_workers_is_elastic() -> None:
    elastic = hvd_ray.RayExecutor(hvd_ray.MiniSettings(), min_workers=1, max_workers=2)
    elastic.start(Counter, extra_env_vars={"X": "1"})
    found = elastic.execute(lambda counter: [counter.count, os.environ["X"]])
    assert found == [[0, "1"]] * 2
    with pytest.raises(RuntimeError, match=r"^rank 0 failed:\nTraceback(.|\n)*ArithmeticError: as"):
        elastic.run(fail, [0, "raise"])


def hangs(kind: str, folder: str) -> None:
    """A driver of its own, with two ranks."""
    ray.init()
    arguments = {"elastic": {"min_workers": 2, "max_workers": 2}, "static": {"num_workers": 2}}
    executor(**arguments[kind]).run(hang, args=[folder])


@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_no_rank_outlives_a_driver_that_dies(kind: str, tmp_path: Path) -> None:
    code = f"from {__name__} import hangs; hangs({kind!r}, {str(tmp_path)!r})"
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    driver = subprocess.Popen([sys.executable, "-c", code], env=env)
    while len(ranks := [int(path.name) for path in tmp_path.iterdir()]) < 2:
        assert driver.poll() is None
        time.sleep(0.1)
    processes = [psutil.Process(rank) for rank in ranks]
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(map(is_running, processes)), "the end of the ranks")


def test_what_ray_refuses() -> None:
    settings = hvd_ray.MiniSettings(placement_group_timeout_s=1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"min_workers": 3, "max_workers": 2}, "max_workers=2 is less than min_workers=3"),
        (
            {"min_workers": 1, "override_discovery": False},
            "override_discovery=False: the nodes are",
        ),
        ({"num_workers": 2, "num_hosts": 1}, "give exactly one of num_workers, num_hosts and min_"),
        ({"num_workers": 99}, r"Ray has not provided 99 times \{'CPU': 1\} \(PACK\) within 1 s"),
    ]
    for arguments, said in refused:
        with pytest.raises((ValueError, TimeoutError), match=f"^{said}"):
            hvd_ray.RayExecutor(settings, **arguments).start()
