"""A driver of Ray, on two nodes of one machine: `python -m tests.launch.ray_driver` runs all."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

import hvdtrain.launch.ray as hvd_ray
from hvdtrain.hvd import alias
from hvdtrain.system.processes import is_running
from tests.launch.drivers import (
    case,
    digits,
    error_of,
    fail,
    hang,
    print_cases,
    slow_case,
    sums,
    train_elastically,
)


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


@case
def works() -> dict[str, Any]:
    """Two nodes with two ranks each: numbered node by node, with what each has."""
    alias.install()
    ranks = executor(num_hosts=2, num_workers_per_host=2)
    found = {"sums": ranks.run(sums_on_node, args=[[1.0, 2.0]])}

    def count(counter: Counter) -> int:
        counter.count += 1
        return counter.count

    found["counts"] = [ranks.execute(count), ranks.execute(count), ranks.execute_single(count)]
    found["remote"] = ray.get(ranks.run_remote(sums_on_node, kwargs={"numbers": [1.0]}))
    ranks.shutdown()
    ranks.shutdown()
    return found


@case
def trains() -> list[Any]:
    ranks = executor(num_workers=2)
    found = ranks.run(digits)
    ranks.shutdown()
    return found


@case
def fails() -> list[Any]:
    return failures(("raise", 0), ("kill", 1))


@slow_case
def fails_otherwise() -> list[Any]:
    return failures(("raise", 1), ("kill", 0))


def failures(*ways: tuple[str, int]) -> list[Any]:
    """The rank that fails is named, whichever error arrives first; all CPUs are free again."""
    found = []
    for how, rank in ways:
        found.append([how, rank, *error_of(executor(num_workers=2).run, fail, [rank, how])])
    while ray.available_resources().get("CPU") != 4:  # Ray counts them a moment later
        time.sleep(0.1)
    return found


@case
def grows_again() -> dict[str, Any]:
    """One of three ranks dies: the others go on in their processes, and a new one joins them."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = hvd_ray.ElasticRayExecutor.create_settings(
            min_num_proc=2, max_num_proc=3, cooldown_range=[1, 2]
        )
        ranks = hvd_ray.ElasticRayExecutor(settings, env_vars={"X": "1"})
        ranks.start()
        found["results"] = ranks.run(lambda: train_elastically(folder))
        worlds = [path.name.split("-") for path in Path(folder).glob("*-*")]
        found["sizes"] = sorted(int(size) for _, size in worlds)
        found["processes"] = len({pid for pid, _ in worlds})
    elastic = hvd_ray.RayExecutor(hvd_ray.MiniSettings(), min_workers=1, max_workers=2)
    elastic.start(Counter, extra_env_vars={"X": "1"})
    found["variables"] = elastic.execute(lambda counter: [counter.count, os.environ["X"]])
    _, found["error"] = error_of(elastic.run, fail, [0, "raise"])
    return found


def hangs(kind: str, folder: str) -> None:
    """A driver of its own, with two ranks."""
    ray.init()
    arguments = {"elastic": {"min_workers": 2, "max_workers": 2}, "static": {"num_workers": 2}}
    executor(**arguments[kind]).run(hang, args=[folder])


@case
def drivers_die() -> dict[str, list[int]]:
    """All ranks of a killed driver end."""
    found = {}
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    for kind in ("static", "elastic"):
        with tempfile.TemporaryDirectory() as folder:
            line = [sys.executable, "-m", "tests.launch.ray_driver", "hangs", kind, folder]
            driver = subprocess.Popen(line, env=env)
            while len(ranks := [int(path.name) for path in Path(folder).iterdir()]) < 2:
                assert driver.poll() is None
                time.sleep(0.1)
            processes = [psutil.Process(rank) for rank in ranks]
            driver.kill()
            driver.wait()
            deadline = time.monotonic() + 60
            while any(map(is_running, processes)) and time.monotonic() < deadline:
                time.sleep(0.1)
            found[kind] = [process.pid for process in processes if is_running(process)]
    return found


@case
def refuses() -> list[Any]:
    make, settings = hvd_ray.RayExecutor, hvd_ray.MiniSettings(placement_group_timeout_s=1)
    return [
        error_of(make, settings, min_workers=3, max_workers=2),
        error_of(make, settings, min_workers=1, override_discovery=False),
        error_of(make, settings, num_workers=2, num_hosts=1),
        error_of(make(settings, num_workers=99).start),
    ]


def main() -> None:
    if sys.argv[1:2] == ["hangs"]:
        hangs(*sys.argv[2:])
    node = {"num_cpus": 2, "object_store_memory": 100 << 20}
    head = {**node, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node)
    ray.init(address=cluster.address)
    try:
        print_cases()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
