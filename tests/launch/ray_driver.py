"""What pytest runs in the environment of Ray, on two nodes of one machine: see test_drivers.py."""

from __future__ import annotations

import os
import re
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
from tests.launch.drivers import digits, fail, hang, sums
from tests.launch.test_elastic import COLD, SCRIPT, Job, check_training
from tests.launching import started, wait_for, wait_until


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    node = {"num_cpus": 2, "object_store_memory": 100 << 20}
    head = {**node, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node)
    os.environ["RAY_ADDRESS"] = cluster.address  # of other drivers, too
    ray.init()
    yield
    ray.shutdown()
    cluster.shutdown()


class InTurn(hvd_ray.RayExecutor):
    """Its actors are on two nodes in turn, as in a placement group of the user's own."""

    def _start_actors(self) -> list[Any]:
        actors = super()._start_actors()
        return actors[::2] + actors[1::2]


def executor(
    kind: type[hvd_ray.RayExecutor] = hvd_ray.RayExecutor, **arguments: Any
) -> hvd_ray.RayExecutor:
    made = kind(kind.create_settings(timeout_s=60), **arguments)
    counter = Counter if "num_hosts" in arguments else None
    made.start(counter, [Setting()], extra_env_vars={"X": "5"})
    return made


class Setting:
    """It becomes what the variable X is where it is unpickled, as a module reads it on import."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getenv, ("X",)


class Counter:
    """What `execute` gives to functions. It is made after the variables are set."""

    def __init__(self, start: str) -> None:
        self.count = int(start)


def sums_on_node(numbers: list[float]) -> dict[str, Any]:
    return {**sums(numbers), "node": ray.get_runtime_context().get_node_id()}


@pytest.mark.parametrize("kind", [hvd_ray.RayExecutor, InTurn])
def test_functions_run_on_the_ranks_of_two_nodes(kind: type[hvd_ray.RayExecutor]) -> None:
    """Two ranks on each: numbered node by node, with what each has."""
    alias.install()
    ranks = executor(kind, num_hosts=2, num_workers_per_host=2)
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

    assert [ranks.execute(count), ranks.execute(count)] == [[6] * 4, [7] * 4]
    assert ranks.execute_single(count) == 8
    ranks.shutdown()
    ranks.shutdown()


def test_the_digits_end_as_under_torchrun() -> None:
    ranks = executor(num_workers=2)
    assert ranks.run(digits) == [os.environ["TEST_DIGEST"]] * 2
    ranks.shutdown()


@pytest.mark.parametrize(("how", "rank"), [("raise", 0), ("kill", 1)])
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


CLUSTER = f"{sys.executable} examples/ray_cluster.py"


def test_an_elastic_job_on_the_nodes_of_a_cluster(tmp_path: Path) -> None:
    """A rank on one of two nodes dies: the others go on in their processes, and a new one joins.

    Both nodes have the address of this host, which --master-addr names.
    """
    address = ray.util.get_node_ip_address()
    options = f"--verbose --max-np 3 --min-np 2 --master-addr {address}"
    options += " --blacklist-cooldown-range 0.5 5"
    hosts = ["--host-discovery-script", f"{CLUSTER} hosts", "--rsh", f"{CLUSTER} exec {{host}}"]
    line = [*COLD, *options.split(), *hosts, *SCRIPT, f"{tmp_path}/finish", "0.05"]
    with started(line) as (process, _):
        job = Job(tmp_path, process)
        first = job.pids(3)
        job.kill(first[2])
        grown = job.pids(3, times=2)
        assert [grown[0], grown[1]] == [first[0], first[1]]
        assert len(set(re.findall(rf"^{address}-\w{{8}}: ", job.text, re.MULTILINE))) == 2
        job.finish()
        check_training(job)


def test_a_command_on_a_node_has_our_stdin_and_ends_with_us() -> None:
    _, host = subprocess.check_output([*CLUSTER.split(), "hosts"], text=True).split()
    line = [*CLUSTER.split(), "exec", host.removesuffix(":2"), "sh", "-c"]
    copied = subprocess.run(
        [*line, "cat; echo why >&2; exit 3"], input=b"\0\xff", capture_output=True
    )
    assert (copied.stdout, copied.stderr, copied.returncode) == (b"\0\xff", b"why\n", 3)
    with started([*line, "echo $$; exec sleep 300"]) as (process, log):
        wait_for(log, "\n")
        command = psutil.Process(int(process.text))
        process.kill()
    wait_until(lambda: not is_running(command), "the end of the command")


def hangs(folder: str) -> None:
    """A driver of its own, with two ranks."""
    ray.init()
    executor(num_workers=2).run(hang, args=[folder])


def test_no_rank_outlives_a_driver_that_dies(tmp_path: Path) -> None:
    code = f"from {__name__} import hangs; hangs({str(tmp_path)!r})"
    driver = subprocess.Popen([sys.executable, "-c", code])
    while len(ranks := [int(path.name) for path in tmp_path.iterdir()]) < 2:
        assert driver.poll() is None
        time.sleep(0.1)
    processes = [psutil.Process(rank) for rank in ranks]
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(map(is_running, processes)), "the end of the ranks")


ELASTIC = "horovod.ray runs a fixed number of ranks.* examples/ray_cluster.py"


def test_what_ray_refuses() -> None:
    settings = hvd_ray.MiniSettings(placement_group_timeout_s=1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"min_workers": 1}, ELASTIC),
        ({"num_workers": 2, "override_discovery": False}, ELASTIC),
        ({"num_workers": 2, "num_hosts": 1}, "give exactly one of num_workers and num_hosts"),
        ({"num_workers": 99}, r"Ray has not provided 99 times \{'CPU': 1\} \(PACK\) within 1 s"),
    ]
    for arguments, said in refused:
        with pytest.raises((ValueError, TimeoutError), match=f"^{said}"):
            hvd_ray.RayExecutor(settings, **arguments).start()
    for name in ("ElasticRayExecutor", "ElasticSettings"):
        with pytest.raises(ImportError, match=ELASTIC):
            exec(f"from {hvd_ray.__name__} import {name}")
