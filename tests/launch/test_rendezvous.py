"""The rendezvous in real processes; the variables of absent launchers are set by hand."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistError

from hvdtrain.errors import LaunchError
from hvdtrain.job import addresses, rendezvous
from hvdtrain.job.world import World, detect
from tests.environments import missing, other_mpi, require
from tests.forkserver import warm
from tests.launching import Started, clean_env, run, started, wait_until
from tests.messages import Message

Env = dict[str, str]
Answer = dict[str, Any]
PROCESS = [sys.executable, "-m", "tests.rendezvous_process"]


def srun(rank: int, size: int, job: str, **more: str) -> Env:
    """What srun sets for one task, all of them on this host."""
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        **more,
    }


def torch_like(rank: int, size: int, **more: str) -> Env:
    """What torchrun's users set by hand."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        **more,
    }


def answers(output: str) -> list[Answer]:
    """The lines of JSON in an output, in rank order."""
    found = [
        json.loads(line[line.index("{") :]) for line in output.splitlines() if '"rank"' in line
    ]
    return sorted(found, key=lambda answer: answer["rank"])


def rendezvous_of(*envs: Env, timeout_s: float = 20, times: int = 1) -> list[Answer]:
    """Start one process for each environment; return their answers in rank order."""
    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-test-"))
        together = {"TEST_GATE": f"{gate}:{len(envs)}"}
        running = [
            stack.enter_context(
                started(
                    warm([*PROCESS, str(timeout_s), f"{env_id(env)}-", str(times)]),
                    env={**env, **together},
                )
            )
            for env in envs
        ]
        for process, log in running:
            process.wait(60)
            assert '"rank"' in log.read_text(), log.read_text()
        return answers("\n".join(log.read_text() for _, log in running))


def env_id(env: Env) -> str:
    return env.get("SLURM_JOB_ID", "x")


def job_id() -> str:
    return uuid.uuid4().hex[:8]


def first_port(job: str) -> int:
    return rendezvous._job_ports(f"{job}.0")[0]


def free_port() -> int:
    with listening() as port:
        return port


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """A server that accepts connections and never replies."""
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("::", port))
        server.listen()
        yield server.getsockname()[1]


# All ranks come


def step(size: int) -> list[Env]:
    """What srun sets for the tasks of a step."""
    job = job_id()
    return [srun(rank, size, job) for rank in range(size)]


def given(port: object = None, host: str = "localhost") -> list[Env]:
    """Two ranks with an address; a free port of this host, unless told otherwise."""
    address = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port() if port is None else port)}
    return [torch_like(rank, 2, **address) for rank in range(2)]


def pods(size: int, *more: str) -> list[Env]:
    """What a launcher sets that does not say which ranks share a host, but a given address."""
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [{**shared, **dict.fromkeys(("RANK", *more), str(rank))} for rank in range(size)]


# How the ranks find each other, and how often in one process.
MEETINGS: dict[str, tuple[Callable[[], list[Env]], int]] = {
    "srun, five times": (lambda: step(2), 5),
    "an address, five times": (given, 5),
    "processes of AzureML": (lambda: pods(3, "LOCAL_RANK"), 2),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_all_ranks_meet(name: str) -> None:
    make, times = MEETINGS[name]
    envs = make()
    n = len(envs)
    got = rendezvous_of(*envs, times=times)
    value = f"{env_id(envs[0])}-{times - 1}"
    assert [answer.get("read") for answer in got] == [[value] * n] * n, got
    assert [answer.get("place") for answer in got] == [[rank, n, 0, 1] for rank in range(n)], got


# Ports of srun


def test_srun_when_a_stranger_and_another_job_have_its_ports() -> None:
    mine = job_id()
    other = next(job for job in iter(job_id, mine) if first_port(job) == first_port(mine))
    with listening(first_port(mine)):
        got = rendezvous_of(*(srun(rank, 2, job) for rank in range(2) for job in (mine, other)))
    reads = [answer.get("read") for answer in got]
    for job in (mine, other):
        assert reads.count([f"{job}-0"] * 2) == 2, got


@pytest.mark.exhaustive
def test_two_processes_of_one_rank() -> None:
    job = job_id()
    got = rendezvous_of(*(srun(rank, 3, job) for rank in (0, 1, 1)), timeout_s=12)
    said = [a for a in got if a.get("error", "").startswith("LaunchError: two processes")]
    assert [answer["rank"] for answer in said] == [1], got


# Somebody does not come


@pytest.mark.parametrize("make", [pods, pytest.param(step, marks=pytest.mark.exhaustive)])
def test_a_missing_rank_is_named(make: Callable[[int], list[Env]]) -> None:
    """Where the launcher names the hosts, and before the ranks have found these."""
    zero, _, two = make(3)
    got = rendezvous_of(zero, two, timeout_s=4)
    assert "waiting for rank 1 (1 of 3 ranks missing)" in got[0]["error"], got
    assert all("WorldError" in answer["error"] for answer in got), got


@pytest.mark.exhaustive
def test_without_rank_0_there_is_no_store() -> None:
    (got,) = rendezvous_of(step(2)[1], timeout_s=4)
    assert "could not reach rank 0's store" in got["error"]


RESTARTED = """
import os, pathlib, sys
from hvdtrain import open_backend
mark = pathlib.Path(sys.argv[1])
with open_backend("ddp") as backend:
    backend.barrier()
    if not mark.exists() and backend.world.rank == 1:
        mark.touch()
        os._exit(1)
    backend.barrier()
print(f"{backend.world} ended after a restart: {mark.exists()}\\n", end="")
"""


@pytest.mark.exhaustive
def test_ranks_that_torchrun_starts_again_on_two_hosts(tmp_path: Path) -> None:
    """Its agents keep their store, and each counts its own restarts only."""
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    agent = "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d"
    agent += f" --rdzv-endpoint localhost:{free_port()} --rdzv-id test"
    line = warm([*agent.split(), script, tmp_path / "mark"])
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(started(line)) for _ in range(2)]
        codes = [process.wait(100) for process, _ in agents]
        output = "".join(log.read_text() for _, log in agents)
    assert codes == [0, 0], output
    assert output.count("ended after a restart: True") == 2, output


# Addresses and ports that cannot be


def error_of(env: Env, monkeypatch: pytest.MonkeyPatch) -> LaunchError:
    """Open the store in this process, as the rank of this environment; return the error."""
    clean = clean_env(env)
    for name in {*os.environ} - {*clean}:
        monkeypatch.delenv(name)
    for name, value in clean.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        rendezvous.open_store(rendezvous.complete_world(detect(), 1), 1)
    return caught.value


HOST_AND_PORT = [
    ("no-such-host.invalid", 29500),
    pytest.param("a" * 70 + ".invalid", 29500, marks=pytest.mark.exhaustive),
    ("localhost", "http"),
    ("localhost", 70000),
    ("localhost", 0),
]


@pytest.mark.parametrize(("host", "port"), HOST_AND_PORT)
def test_an_address_that_is_none(
    host: str, port: object, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = (str(error_of(env, monkeypatch)) for env in given(port, host))
    assert zero == one
    message(zero.partition(" no host: ")[0])  # the rest is the system's


@pytest.mark.parametrize("more", [{"MASTER_ADDR": "localhost"}, {"MASTER_PORT": "1"}], ids=str)
def test_variables_of_an_address_that_are_none(
    more: Env, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    message(error_of(srun(0, 2, "1", **more), monkeypatch))


def test_srun_with_no_port_left() -> None:
    job = job_id()
    with ExitStack() as taken:
        for port in rendezvous._job_ports(f"{job}.0"):
            taken.enter_context(listening(port))
        (got,) = rendezvous_of(srun(0, 2, job))
    assert "all taken; set MASTER_ADDR" in got["error"]


@pytest.mark.exhaustive
def test_a_busy_port() -> None:
    with listening() as port:
        zero, one = rendezvous_of(*given(port), timeout_s=5)
    assert f"LaunchError: rank 0 cannot serve at MASTER_PORT={port}" in zero["error"]
    assert "does not answer as a store" in one["error"]


# Real MPI launchers, whose variables are replaced by those of another that starts the same MPI
JSRUN = """
export JSM_NAMESPACE_RANK=$OMPI_COMM_WORLD_RANK JSM_NAMESPACE_SIZE=$OMPI_COMM_WORLD_SIZE
export JSM_NAMESPACE_LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK
unset OMPI_COMM_WORLD_LOCAL_SIZE
exec "$@"
"""
PALS = """
export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID PALS_LOCAL_SIZE=$MPI_LOCALNRANKS
unset MPI_LOCALRANKID MPI_LOCALNRANKS
exec "$@"
"""


@pytest.mark.parametrize("other", ["none", pytest.param("jsrun", marks=pytest.mark.exhaustive)])
def test_mpirun_as_it_is_and_as_another_launcher(other: str) -> None:
    shell = ["sh", "-c", JSRUN, "sh"] if other == "jsrun" else []
    command = ["mpirun", "-np", "2", *shell, *PROCESS, "30", "v", "2"]
    check_places(run(warm(command)).output)


@pytest.mark.parametrize(
    ("option", "of_rank0", "of_rank1"),
    [("backend", "compat", "ddp over shm"), ("transport", "ddp over gloo", "ddp over shm")],
)
def test_ranks_of_unlike_engines_are_named(option: str, of_rank0: str, of_rank1: str) -> None:
    """Each waits for the other by a protocol of its own."""
    value = of_rank0.split()[-1]
    shell = f'exec hvdtrain --backend ddp $(test "$RANK" = 0 && echo --{option} {value})'
    line = ["torchrun", "--no-python", "--nproc-per-node", "2", "sh", "-c", shell]
    done = run(warm(line), timeout=90)
    assert done.code != 0
    text = f"error: rank 0 opens {of_rank0}, but rank 1 {of_rank1}; give every rank the same"
    assert text in done.output, done.output


SECRETS = """
from hvdtrain import hvd
from hvdtrain.job.job_secret import secret

own = secret().hex()
hvd.init()
print(f"secrets {own} {secret().hex()};")
"""


def test_mpi_does_not_send_the_users_own_secret(tmp_path: Path) -> None:
    """Who reads the network of one job learns nothing of the next."""
    (tmp_path / "ranks.py").write_text(SECRETS)
    done = run(warm(["mpirun", "-np", "2", sys.executable, tmp_path / "ranks.py"]))
    first, second = re.findall(r"secrets (\w{64}) (\w{64});", done.output)
    assert first == second, "the ranks have one secret"
    assert first[0] != first[1]


@pytest.mark.exhaustive
def test_pals_over_mpi() -> None:
    folder, packages = other_mpi("mpich")
    process = [str(folder / "python"), *PROCESS[1:]]
    command: list[str | Path] = [folder / "mpiexec", "-n", "2", "sh", "-c", PALS, "sh", *process]
    check_places(run([*command, "30", "v", "2"], env=packages).output)


def check_places(output: str) -> None:
    """Two ranks on one host have met twice."""
    got = answers(output)
    assert [answer.get("place") for answer in got] == [[r, 2, 0, 1] for r in range(2)], got
    assert [answer.get("read") for answer in got] == [["v1", "v1"]] * 2, got


def flux(rank: int, size: int, job: str, folder: Path, hosts: str) -> Env:
    """What Flux sets for a task of a job on two hosts, and a `flux` that names these."""
    program = folder / "flux"
    program.write_text(f'#!/bin/sh\n[ "$*" = "hostlist {job}" ] && echo "{hosts}"\n')
    program.chmod(0o755)
    return {
        "FLUX_TASK_RANK": str(rank),
        "FLUX_JOB_SIZE": str(size),
        "FLUX_TASK_LOCAL_ID": "0",
        "FLUX_JOB_NNODES": "2",
        "FLUX_JOB_ID": job,
        "PATH": f"{folder}:{clean_env()['PATH']}",
    }


def test_a_flux_that_names_no_host(
    tmp_path: Path, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {**flux(1, 2, "f1", tmp_path, ""), "FLUX_JOB_ID": "f2"}
    message(error_of(env, monkeypatch))


TRAIN = "-m hvdtrain --task digits --epochs 1 --threads 1 --run-dir".split()


def run_in_pods(*command: str | Path) -> str:
    """Run a command in two pods; return the output of both."""
    line = warm([sys.executable, *command])
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(started(line, env=env)) for env in pods(2)]
        codes = [process.wait(60) for process, _ in ranks]
        output = "".join(log.read_text() for _, log in ranks)
    assert codes == [0, 0], output
    return output


def test_training_in_the_pods_of_a_cluster(tmp_path: Path) -> None:
    """Threads, device and transport are chosen from the hosts that the ranks have found."""
    output = run_in_pods(*TRAIN, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["world"]["launcher"], record["world"]["local_size"]) == ("env://", 2)
    assert record["backend"]["name"] == "ddp"
    assert record["backend"]["transport"] == "shm"
    assert "started by the variables RANK and WORLD_SIZE" in output


OWN_GROUP = """
import torch
torch.distributed.init_process_group("gloo")
from hvdtrain import open_backend
with open_backend("ddp") as backend:
    print("sum", backend.all_reduce(torch.ones(1), "sum").item(), backend.world.local_size)
"""


def test_the_hosts_are_found_over_the_store_of_the_programs_own_group() -> None:
    """The address is then in use by torch's store."""
    output = run_in_pods("-c", OWN_GROUP)
    assert output.count("sum 2.0 2") == 2, output


# Real launchers


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "launcher", ["mpirun -np 2", "horovodrun -np 2 --gloo"], ids=lambda line: line.split()[0]
)
def test_two_jobs_at_once(launcher: str, tmp_path: Path) -> None:
    command = [*launcher.split(), *PROCESS]
    # Two mpiruns of one user that start at once may fail at making the folder of both.
    one, other = ({"OMPI_MCA_orte_tmpdir_base": str(tmp_path / name)} for name in "ab")
    with started(warm([*command, "30", "a", "3"]), env=one) as (process, log):
        second = run(warm([*command, "30", "b", "3"]), env=other)
        assert process.wait(60) == 0, log.read_text()
        first = log.read_text()
    assert [answer.get("read") for answer in answers(first)] == [["a2", "a2"]] * 2, first
    assert [answer.get("read") for answer in answers(second.output)] == [["b2", "b2"]] * 2


# Addresses


def test_several_hosts_never_get_a_loopback_address() -> None:
    world = World(0, 4, 0, 2, 0, 2, "openmpi")
    found = addresses.own_addresses(world)
    assert found
    assert not any(a.startswith(("127.", "localhost", "::1", "fe80")) for a in found)
    assert len(json.dumps([found, 65535, "0" * 32])) <= rendezvous._MESSAGE_BYTES


OF_THIS_HOST = ("127.0.1.1", "::1", "0.0.0.0", "fe80::1", "fe80::1%eth0", "localhost.localdomain")
OF_ANOTHER_HOST = ("localhost6", "gpu01", "10.0.0.1", "fd00::1")


@pytest.mark.parametrize("address", [*OF_THIS_HOST, *OF_ANOTHER_HOST, "localhost"])
def test_what_means_another_host_elsewhere(address: str) -> None:
    assert addresses.is_local(address) == (address not in OF_ANOTHER_HOST)


def test_a_world_without_a_launcher_needs_an_address() -> None:
    with pytest.raises(LaunchError, match="set MASTER_ADDR and MASTER_PORT"):
        rendezvous.open_store(World(1, 2, 1, 2), 1)


# Two hosts, which are two network namespaces


@contextlib.contextmanager
def namespaces(more: str = "") -> Iterator[tuple[str, str]]:
    """Make two namespaces with the addresses 10.77.0.1 and 10.77.0.2, and run `more` commands.

    In these, {0} and {1} are the names of the namespaces; their interfaces are {link}a and {link}b.
    """
    require("ip", root=True)
    names = f"hvdtrain-{os.getpid()}-1", f"hvdtrain-{os.getpid()}-2"
    link = f"hv{os.getpid()}"
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add {link}a netns {names[0]} type veth peer {link}b netns {names[1]}"]
    for host, (name, end) in enumerate(zip(names, "ab", strict=True), start=1):
        commands += [
            f"ip -n {name} addr add 10.77.0.{host}/24 dev {link}{end}",
            f"ip -n {name} link set {link}{end} up",
            f"ip -n {name} link set lo up",
            f"ip -n {name} route add default dev {link}{end}",
        ]
    commands += [line for line in more.format(*names, link=link).splitlines() if line]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True)
            if made.returncode:
                missing(f"no network namespaces here: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, with the addresses 10.77.0.1 and 10.77.0.2."""
    with namespaces() as names:
        yield names


def rendezvous_on(*places: tuple[str, Env], timeout_s: float = 20, value: str) -> list[Answer]:
    """Start one process on each of these hosts, which have these variables; return the answers."""
    with contextlib.ExitStack() as stack:
        running = []
        for host, env in places:
            line = warm(["ip", "netns", "exec", host, *PROCESS, str(timeout_s), value])
            running.append(stack.enter_context(started(line, env=env)))
        for process, _ in running:
            process.wait(60)
        return answers("\n".join(log.read_text() for _, log in running))


def step_on_two_hosts(rank: int, job: str, **more: str) -> Env:
    """What srun sets for a step of one task on each of two hosts."""
    hosts = {"SLURM_STEP_NODELIST": "10.77.0.1,10.77.0.2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    place = {"SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_STEP_NUM_NODES": "2"}
    return srun(rank, 2, job, **{**hosts, **place, **more})


@pytest.mark.parametrize("launcher", ["srun", "flux"])
@pytest.mark.exhaustive
def test_two_hosts(two_hosts: tuple[str, str], launcher: str, tmp_path: Path) -> None:
    job = job_id()
    if launcher == "srun":
        envs = [step_on_two_hosts(rank, job) for rank in range(2)]
    else:
        envs = [flux(rank, 2, job, tmp_path, "10.77.0.[1-2]") for rank in range(2)]
    got = rendezvous_on(*zip(two_hosts, envs, strict=True), value=f"{job}-")
    assert [answer.get("read") for answer in got] == [[f"{job}-0"] * 2] * 2, got
    assert [answer.get("place") for answer in got] == [[0, 1, 0, 2], [0, 1, 1, 2]], got


@pytest.mark.parametrize(
    ("given", "local"),
    [("0021", [0, 0, 2, 1]), pytest.param("", [0, 0, 1, 2], marks=pytest.mark.exhaustive)],
    ids=["by the launcher", "by the rank"],
)
def test_hosts_with_unequal_numbers_of_ranks_in_any_order(
    two_hosts: tuple[str, str], given: str, local: list[int]
) -> None:
    """With the local ranks that the launcher has given, if it has."""
    address = {"MASTER_ADDR": "10.77.0.2", "MASTER_PORT": "29571", "WORLD_SIZE": "4"}
    hosts = [two_hosts[host] for host in (1, 0, 1, 1)]
    envs = [{"RANK": str(rank), **address} for rank in range(4)]
    for env, local_rank in zip(envs, given, strict=False):
        env["LOCAL_RANK"] = local_rank
    got = rendezvous_on(*zip(hosts, envs, strict=True), value="v")
    places = [[local[0], 3, 0, 2], [local[1], 1, 1, 2], [local[2], 3, 0, 2], [local[3], 3, 0, 2]]
    assert [answer.get("place") for answer in got] == places, got


def test_a_silent_server_costs_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is tried; it ends when the server does."""
    monkeypatch.setattr(rendezvous, "_REPLY_S", 0.3)
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 1.0)
    threads = threading.active_count()
    with listening() as port:
        for _ in range(3):
            with pytest.raises(TimeoutError, match="does not answer as a store"):
                rendezvous._connect_once("localhost", port)
        assert threading.active_count() == threads + 1
    with pytest.raises(DistError):
        rendezvous._attempts.pop(("localhost", port)).result(20)
    wait_until(lambda: threading.active_count() == threads, "the end of the thread")


@contextlib.contextmanager
def one_rank_each(
    hosts: tuple[str, str], *command: object, **more: str
) -> Iterator[list[tuple[Started, Path]]]:
    """One rank on each of two hosts, running Python with these arguments."""
    with contextlib.ExitStack() as stack:
        running = []
        for rank, host in enumerate(hosts):
            env = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            env |= {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": 2, "MASTER_PORT": 29555}
            texts = {name: str(value) for name, value in env.items()}
            texts |= {"MASTER_ADDR": "10.77.0.1", **more}
            texts |= {"GLOO_SOCKET_IFNAME": f"hv{os.getpid()}{'ab'[rank]}"}
            line = warm(["ip", "netns", "exec", host, sys.executable, *map(str, command)])
            running.append(stack.enter_context(started(line, env=texts)))
        yield running


def cut_link(hosts: tuple[str, str]) -> None:
    """Take down the only link between the hosts."""
    link = ["ip", "-n", hosts[1], "link", "set", f"hv{os.getpid()}b", "down"]
    subprocess.run(link, check=True)


@pytest.mark.exhaustive
def test_a_link_that_goes_down(two_hosts: tuple[str, str], tmp_path: Path) -> None:
    """While data are in flight."""
    command = ("-m", "tests.hvd.lifecycle", "with_an_unreachable_host", tmp_path)
    with one_rank_each(two_hosts, *command, HVDTRAIN_TRANSPORT="shm") as running:
        ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in ready), "both ranks", 90, running[0][1])
        cut_link(two_hosts)
        (tmp_path / "died").touch()
        for process, log in running:
            assert process.wait(60) == 0, log.read_text()
        got = answers("\n".join(log.read_text() for _, log in running))
    for rank, answer in enumerate(got):
        assert answer["kind"] == "HorovodInternalError", answer
        assert re.search(rf"ank {1 - rank} \(.*\) is unreachable", answer["text"]), answer
