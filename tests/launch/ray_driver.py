"""A driver of Ray, on two nodes of one machine: `python -m tests.launch.ray_driver` runs all."""

from __future__ import annotations

import json
import os
import signal
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

CASES: dict[str, Any] = {}


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


def executor(**arguments: Any) -> hvd_ray.RayExecutor:
    settings = hvd_ray.RayExecutor.create_settings(timeout_s=60)
    made = hvd_ray.RayExecutor(settings, **arguments)
    made.start(Counter if "num_hosts" in arguments else None)
    return made


class Counter:
    """What `execute` gives to functions."""

    def __init__(self) -> None:
        self.count = 0


def sums(numbers: list[float]) -> dict[str, Any]:
    import horovod.torch as hvd  # an alias, as in the driver
    import torch

    assert hvd.__name__ == "hvdtrain.hvd"
    hvd.init()
    print(f"node has rank {hvd.rank()}")
    total = hvd.allreduce(torch.tensor(numbers) * (hvd.rank() + 1), op=hvd.Sum)
    node = ray.get_runtime_context().get_node_id()
    found = {"rank": hvd.rank(), "size": hvd.size(), "sum": total.tolist(), "node": node}
    hvd.shutdown()
    return found


def digits() -> str:
    from hvdtrain import TrainConfig, Trainer, open_backend
    from hvdtrain.training.task import load_task

    config = TrainConfig(task="digits", backend="ddp", epochs=2, threads=1)
    with open_backend("ddp", options=config.backend_options(), agree_on=config.agreed()) as backend:
        return Trainer(load_task("digits", ()), backend, config).fit().params_sha256


def fail(rank: int, how: str) -> None:
    import torch

    import hvdtrain.hvd as hvd

    hvd.init()
    if hvd.rank() == rank and how == "raise":
        raise ArithmeticError("as asked")
    if hvd.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        hvd.allreduce(torch.ones(3))


@case
def works() -> dict[str, Any]:
    """Two nodes with two ranks each: numbered node by node, with what each has."""
    alias.install()
    ranks = executor(num_hosts=2, num_workers_per_host=2)
    found = {"sums": ranks.run(sums, args=[[1.0, 2.0]])}

    def count(counter: Counter) -> int:
        counter.count += 1
        return counter.count

    found["counts"] = [ranks.execute(count), ranks.execute(count), ranks.execute_single(count)]
    found["remote"] = ray.get(ranks.run_remote(sums, kwargs={"numbers": [1.0]}))
    ranks.shutdown()
    ranks.shutdown()
    return found


@case
def trains() -> dict[str, Any]:
    ranks = executor(num_workers=2)
    found = ranks.run(digits)
    ranks.shutdown()
    return {"params_sha256": found}


@case
def fails() -> dict[str, Any]:
    """The rank that fails is named, whichever error arrives first; all CPUs are free again."""
    found: dict[str, Any] = {"errors": []}
    for how, rank in (("raise", 0), ("raise", 1), ("kill", 0), ("kill", 1)):
        ranks = executor(num_workers=2)
        begin = time.monotonic()
        try:
            ranks.run(fail, args=[rank, how])
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            seconds = time.monotonic() - begin
            found["errors"].append([how, rank, kinds, str(error), seconds])
    while ray.available_resources().get("CPU") != 4:  # Ray counts them a moment later
        time.sleep(0.1)
    return found


def train_elastically(folder: str) -> tuple[int, int, float, int]:
    """Rank 1 of three dies after its second step; all end once it has been replaced."""
    import torch

    import hvdtrain.hvd as hvd

    state: Any = hvd.elastic.TorchState(steps=0, total=0.0, is_done=False)
    mark = Path(folder, "died")

    @hvd.elastic.run
    def train(state: Any) -> None:
        Path(folder, f"{os.getpid()}-{hvd.size()}").touch()
        while not state.is_done:
            total = hvd.allreduce(torch.tensor([1.0, mark.exists()]), name="x", op=hvd.Sum)
            state.total += float(total[0])
            state.steps += 1
            state.is_done = hvd.size() == 3 and bool(total[1])
            state.commit()
            if state.steps == 2 and hvd.rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)

    hvd.init()
    train(state)
    return hvd.rank(), hvd.size(), state.total, os.getpid()


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
    try:
        elastic.run(fail, args=[0, "raise"])
    except RuntimeError as error:
        found["error"] = str(error)
    return found


def hang(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(300)


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
            driver.kill()
            driver.wait()
            deadline = time.monotonic() + 60
            while (left := [p for p in ranks if is_running(p)]) and time.monotonic() < deadline:
                time.sleep(0.1)
            found[kind] = left
    return found


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@case
def refuses() -> dict[str, Any]:
    found = []
    for arguments in (
        {"min_workers": 3, "max_workers": 2},
        {"min_workers": 1, "override_discovery": False},
        {},
        {"num_workers": 2, "num_hosts": 1},
    ):
        try:
            hvd_ray.RayExecutor(hvd_ray.MiniSettings(), **arguments)  # type: ignore[arg-type]
        except ValueError as error:
            found.append(str(error))
    try:
        settings = hvd_ray.MiniSettings(placement_group_timeout_s=1)
        hvd_ray.RayExecutor(settings, num_workers=99).start()
    except TimeoutError as error:
        found.append(str(error))
    return {"errors": found}


def main() -> None:
    if sys.argv[1:2] == ["hangs"]:
        hangs(*sys.argv[2:])
    node = {"num_cpus": 2, "object_store_memory": 100 << 20}
    head = {**node, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node)
    ray.init(address=cluster.address)
    try:
        print(
            "found " + json.dumps({name: CASES[name]() for name in sys.argv[1:] or CASES}),
            flush=True,
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
