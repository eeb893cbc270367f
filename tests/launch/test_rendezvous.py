"""The rendezvous in real processes; the variables of absent launchers are set by hand."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from hvdtrain.errors import LaunchError, WorldError
from hvdtrain.job import addresses, rendezvous
from hvdtrain.job.world import World, detect
from tests.environments import other_mpi, require, rest, rows
from tests.forkserver import warm
from tests.launch.hosts import ip, namespace
from tests.launching import (
    Started,
    clean_env,
    free_address,
    free_ports,
    run,
    run_all,
    started_ranks,
    variables,
    wait_until,
)
from tests.messages import Message
from tests.runs import run_json
from tests.transports.jobs import ADDRESS, Answer, on_hosts

Env = dict[str, str]
PROCESS = [sys.executable, "-m", "tests.rendezvous_process"]


def srun(rank: int, size: int, job: str, **more: str) -> Env:
    """What srun sets for one task, all of them on this host."""
    return (
        variables(
            f"SLURM_JOB_ID={job} SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_LOCALID={rank} "
            f"SLURM_NODEID=0 SLURM_STEP_NUM_TASKS={size} SLURM_STEP_TASKS_PER_NODE={size} "
            "SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=localhost"
        )
        | more
    )


def answers(output: str) -> list[Answer]:
    """The lines of JSON in an output, in rank order."""
    found = map(json.loads, re.findall(r'\{"rank".*\}', output))
    return sorted(found, key=lambda answer: answer["rank"])


def rendezvous_of(
    *envs: Env, hosts: Sequence[str] = (), timeout_s: float = 20, times: int = 1
) -> list[Answer]:
    """Start one process for each environment, on these hosts or on this one; return their answers
    in rank order.
    """
    commands = []
    for number, env in enumerate(envs):
        on_host = ["ip", "netns", "exec", hosts[number]] if hosts else []
        line = [*on_host, *PROCESS, str(timeout_s), f"{env_id(env)}-", str(times)]
        commands.append((warm(line), env))
    output = run_all(*commands)
    got = answers(output)
    assert len(got) == len(envs), output
    return got


def check_met(got: list[Answer], value: str, *places: list[int]) -> None:
    """Each rank is in its place, and has read this value of every rank."""
    met = [(answer.get("place"), answer.get("read")) for answer in got]
    assert met == [(place, [value] * len(places)) for place in places], got


def env_id(env: Env) -> str:
    return env.get("SLURM_JOB_ID", "x")


def job_id() -> str:
    return uuid.uuid4().hex[:8]


def first_port(job: str) -> int:
    return rendezvous._job_ports(f"{job}.0")[0]


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """A server that accepts connections and never replies."""
    place = "::", port
    with socket.create_server(place, family=socket.AF_INET6, dualstack_ipv6=True) as server:
        yield server.getsockname()[1]


# All ranks come


def step(size: int) -> list[Env]:
    """What srun sets for the tasks of a step."""
    job = job_id()
    return [srun(rank, size, job) for rank in range(size)]


def at_address(host: str = "localhost", port: object = "") -> list[Env]:
    """Two ranks with an address; a free port of this host, unless told otherwise."""
    address = {"MASTER_ADDR": host, "MASTER_PORT": str(port)} if port != "" else free_address()
    place = "RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
    return [variables(place.format(rank)) | address for rank in range(2)]


def pods(size: int, *more: str) -> list[Env]:
    """What a launcher sets that does not say which ranks share a host, but a given address."""
    shared = {**free_address(), "WORLD_SIZE": str(size)}
    return [{**shared, **dict.fromkeys(("RANK", *more), str(rank))} for rank in range(size)]


@pytest.mark.parametrize("make", [lambda: step(2), at_address, lambda: pods(3, "LOCAL_RANK")])
def test_all_ranks_meet(make: Callable[[], list[Env]]) -> None:
    """More than once in one process."""
    envs = make()
    n = len(envs)
    places = [[rank, n, 0, 1] for rank in range(n)]
    check_met(rendezvous_of(*envs, times=5), f"{env_id(envs[0])}-4", *places)


# Ports of srun


def test_srun_when_a_stranger_and_another_job_have_its_ports() -> None:
    mine = job_id()
    other = next(job for job in iter(job_id, mine) if first_port(job) == first_port(mine))
    with listening(first_port(mine)):
        got = rendezvous_of(*(srun(rank, 2, job) for rank in range(2) for job in (mine, other)))
    reads = [answer.get("read") for answer in got]
    for job in (mine, other):
        assert reads.count([f"{job}-0"] * 2) == 2, got


# Somebody does not come


@pytest.mark.parametrize(
    ("make", "came", "said"),
    [
        (pods, [0, 2], "waiting for rank 1 (1 of 3 ranks missing)"),
        rest(step, [0, 2], "waiting for rank 1 (1 of 3 ranks missing)"),
        rest(step, [1], "could not reach rank 0's store"),
    ],
)
def test_a_missing_rank_is_named(
    make: Callable[[int], list[Env]], came: list[int], said: str
) -> None:
    envs = make(3)
    got = rendezvous_of(*(envs[rank] for rank in came), timeout_s=4)
    assert said in got[0]["error"], got
    assert all("WorldError" in answer["error"] for answer in got), got


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
    agent += f" --rdzv-endpoint localhost:{free_ports(1)[0]} --rdzv-id test"
    line = warm([*agent.split(), script, tmp_path / "mark"])
    output = run_all((line, {}), (line, {}), seconds=100)
    assert output.count("ended after a restart: True") == 2, output


# Addresses and ports that cannot be


def error_of(env: Env) -> LaunchError:
    """Open the store in this process, as the rank of this environment; return the error."""
    with patch.dict(os.environ, clean_env(env), clear=True), pytest.raises(LaunchError) as caught:
        rendezvous.open_store(rendezvous.complete_world(detect(), 1), 1)
    return caught.value


@pytest.mark.parametrize(
    "envs",
    [
        at_address("no-such-host.invalid", 29500),
        rest(at_address("a" * 70 + ".invalid", 29500)),
        *(at_address(port=port) for port in ("http", 70000, 0)),
        [srun(0, 2, "1", MASTER_ADDR="localhost")],
        [srun(0, 2, "1", MASTER_PORT="1")],
        [srun(1, 2, "1", SLURM_STEP_NODELIST="gpu[")],
    ],
    ids=lambda envs: " ".join(envs[0].get(name, "none") for name in ("MASTER_ADDR", "MASTER_PORT")),
)
def test_an_address_that_is_none(envs: list[Env], message: Message) -> None:
    """Each rank says the same."""
    (said,) = {str(error_of(env)) for env in envs}
    message(said.partition(": [Errno")[0])  # the rest is the system's


@pytest.mark.exhaustive
def test_srun_with_no_port_left() -> None:
    job = job_id()
    with ExitStack() as taken:
        for port in rendezvous._job_ports(f"{job}.0"):
            taken.enter_context(listening(port))
        (got,) = rendezvous_of(srun(0, 2, job))
    assert "no free port in " in got["error"]


@pytest.mark.exhaustive
def test_a_busy_port() -> None:
    with listening() as port:
        zero, one = rendezvous_of(*at_address(port=port), timeout_s=5)
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


@pytest.mark.parametrize(
    ("library", "shell"),
    [("", 'exec "$@"'), rest("", JSRUN), rest("mpich", PALS)],
    ids=["as it is", "jsrun", "pals"],
)
def test_mpirun_as_it_is_and_as_another_launcher(library: str, shell: str) -> None:
    folder, env = other_mpi(library) if library else (Path(), {})
    start = f"{folder / 'mpirun'} -n 2 sh -c".split()
    process = [str(folder / "python"), *PROCESS[1:], "30", "v", "2"]
    output = run(warm([*start, shell, "sh", *process]), env=env).output
    check_met(answers(output), "v1", [0, 2, 0, 1], [1, 2, 0, 1])


@pytest.mark.parametrize(
    ("option", "of_rank0"), [("backend", "compat"), ("transport", "ddp over gloo")]
)
def test_ranks_of_unlike_engines_are_named(option: str, of_rank0: str) -> None:
    """Each waits for the other by a protocol of its own."""
    value = of_rank0.split()[-1]
    shell = f'exec hvdtrain --backend ddp $(test "$RANK" = 0 && echo --{option} {value})'
    line = ["torchrun", "--no-python", "--nproc-per-node", "2", "sh", "-c", shell]
    done = run(warm(line), timeout=90)
    assert done.code != 0
    text = (
        f"error: rank 0 opens {of_rank0}, but rank 1 opens ddp over shm; give every rank the same"
    )
    assert text in done.output, done.output


SECRETS = """
from hvdtrain import hvd
from hvdtrain.job.job_secret import secret

own = secret().hex()
hvd.init()
print(f"secrets {own} {secret().hex()};")
"""


def test_mpi_does_not_send_the_users_own_secret() -> None:
    """Who reads the network of one job learns nothing of the next."""
    done = run(warm(["mpirun", "-np", "2", sys.executable, "-c", SECRETS]))
    first, second = re.findall(r"secrets (\w{64}) (\w{64});", done.output)
    assert first == second, "the ranks have one secret"
    assert first[0] != first[1]


TRAIN = "-m hvdtrain --task digits --epochs 1 --threads 1 --run-dir".split()


def run_in_pods(*command: str | Path) -> str:
    """Run a command in two pods; return the output of both."""
    line = warm([sys.executable, *command])
    return run_all(*((line, env) for env in pods(2)))


def test_training_in_the_pods_of_a_cluster(tmp_path: Path) -> None:
    """Threads, device and transport are chosen from the hosts that the ranks have found."""
    output = run_in_pods(*TRAIN, tmp_path / "run")
    record = run_json(tmp_path / "run")
    world, backend = record["world"], record["backend"]
    assert (world["launcher"], world["local_size"]) == ("env://", 2)
    assert (backend["name"], backend["transport"]) == ("ddp", "shm")
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


# Addresses


def test_several_hosts_never_get_a_loopback_address() -> None:
    world = World(0, 4, 0, 2, 0, 2, "openmpi")
    found = addresses.own_addresses(world)
    assert found
    assert not any(a.startswith(("127.", "localhost", "::1", "fe80")) for a in found)
    assert len(json.dumps([found, 65535, "0" * 32])) <= rendezvous._MESSAGE_BYTES


OF_THIS_HOST = "127.0.1.1 ::1 0.0.0.0 fe80::1 fe80::1%eth0 localhost.localdomain localhost"
OF_ANOTHER_HOST = "localhost6 gpu01 10.0.0.1 fd00::1"


@pytest.mark.parametrize("address", f"{OF_THIS_HOST} {OF_ANOTHER_HOST}".split())
def test_what_means_another_host_elsewhere(address: str) -> None:
    assert addresses.is_local(address) == (address in OF_THIS_HOST.split())


def test_a_world_without_a_launcher_needs_an_address() -> None:
    with pytest.raises(LaunchError, match="set MASTER_ADDR and MASTER_PORT"):
        rendezvous.open_store(World(1, 2, 1, 2), 1)


# Connecting to rank 0's store: which it is, and what the error says of unresolved names


WORLD = World(1, 2, 0, 1, 1, 2, "srun", "by hand")
UNKNOWN = socket.gaierror(-2, "Name or service not known")
REFUSED = ConnectionRefusedError(111, "Connection refused")


# In which round of three the names of two hosts resolve, and how the error ends
ROUNDS = """
2 2 | node0:1, 10.0.0.1:1: [Errno 111] Connection refused  # as a container that has just started
4 1 | 10.0.0.1:1: [Errno 111] Connection refused
4 4 | node0, 10.0.0.1 does not resolve; set MASTER_ADDR and MASTER_PORT
"""


@pytest.mark.parametrize(("rounds", "end"), rows(ROUNDS))
def test_a_host_that_does_not_resolve(
    rounds: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolves = dict(zip(("node0", "10.0.0.1"), map(int, rounds.split()), strict=True))
    tries: Counter[str] = Counter()

    def connect(address: tuple[str, int], timeout: float) -> None:
        host = address[0]
        tries[host] += 1
        raise UNKNOWN if tries[host] < resolves[host] else REFUSED

    monkeypatch.setattr(rendezvous, "poll_until", lambda deadline, pause_s: range(3))
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.0)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(WorldError, match=f"{re.escape(end)}$"):
        rendezvous._connect(WORLD, [(host, 1) for host in resolves], "", time.monotonic())
    assert tries == dict.fromkeys(resolves, 3)


def test_the_store_of_another_job_is_passed_over() -> None:
    deadline = time.monotonic() + 60
    theirs, mine = (rendezvous._serve(0, deadline) for _ in range(2))
    rendezvous._put_proof(theirs, "theirs")
    rendezvous._put_proof(mine, "mine")
    places = [("localhost", store.port) for store in (theirs, mine)]
    assert rendezvous._connect(WORLD, places, "mine", deadline).port == mine.port


# Two hosts, which are two network namespaces


LINKED = """
link add {link}a netns {0} type veth peer {link}b netns {1}
-n {0} addr add 10.77.0.1/24 dev {link}a
-n {1} addr add 10.77.0.2/24 dev {link}b
-n {0} link set {link}a up
-n {1} link set {link}b up
-n {0} link set lo up
-n {1} link set lo up
-n {0} route add default dev {link}a
-n {1} route add default dev {link}b
"""


@contextlib.contextmanager
def namespaces(more: str = "") -> Iterator[tuple[str, str]]:
    """Make two namespaces with the addresses 10.77.0.1 and 10.77.0.2, and run `more` of `ip`.

    In these, {0} and {1} are the names of the namespaces; their interfaces are {link}a and {link}b.
    """
    require("ip", root=True)
    one, other = f"hvdtrain-{os.getpid()}-1", f"hvdtrain-{os.getpid()}-2"
    with namespace(one), namespace(other):
        ip((LINKED + more).format(one, other, link=f"hv{os.getpid()}"))
        yield one, other


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, with the addresses 10.77.0.1 and 10.77.0.2."""
    with namespaces() as names:
        yield names


def step_on_two_hosts(rank: int, job: str, **more: str) -> Env:
    """What srun sets for a step of one task on each of two hosts."""
    hosts = "SLURM_STEP_NODELIST=10.77.0.1,10.77.0.2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
    place = f"SLURM_LOCALID=0 SLURM_NODEID={rank} SLURM_STEP_NUM_NODES=2"
    return srun(rank, 2, job, **{**variables(f"{hosts} {place}"), **more})


@pytest.mark.parametrize(("given", "third"), [("0021", 2), rest("", 1)])
def test_hosts_with_unequal_numbers_of_ranks_in_any_order(
    two_hosts: tuple[str, str], given: str, third: int
) -> None:
    """With the local ranks that the launcher has given, if it has."""
    address = "MASTER_ADDR=10.77.0.2 MASTER_PORT=29571 WORLD_SIZE=4"
    envs = [variables(f"RANK={rank} {address}") for rank in range(4)]
    for env, local_rank in zip(envs, given, strict=False):
        env["LOCAL_RANK"] = local_rank
    one, other = two_hosts
    got = rendezvous_of(*envs, hosts=[other, one, other, other])
    check_met(got, "x-0", [0, 3, 0, 2], [0, 1, 1, 2], [third, 3, 0, 2], [3 - third, 3, 0, 2])


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
    wait_until(lambda: threading.active_count() == threads, "the end of the thread")
    del rendezvous._attempts["localhost", port]


def one_rank_each(
    hosts: tuple[str, str], *command: object, **more: str
) -> AbstractContextManager[list[tuple[Started, Path]]]:
    """One rank on each of two hosts, running Python with these arguments."""
    inside = on_hosts(hosts, [[0], [1]])
    lines = [warm([*prefix, sys.executable, *map(str, command)]) for prefix in inside]
    return started_ranks(lines, **ADDRESS, **more)


def cut_link(hosts: tuple[str, str]) -> None:
    """Take down the only link between the hosts."""
    ip(f"-n {hosts[1]} link set hv{os.getpid()}b down")


@pytest.mark.exhaustive
def test_a_link_that_goes_down(two_hosts: tuple[str, str], tmp_path: Path) -> None:
    """While data are in flight."""
    command = ("-m", "tests.hvd.lifecycle", "with_an_unreachable_host", tmp_path)
    with one_rank_each(two_hosts, *command, HVDTRAIN_TRANSPORT="shm") as running:
        log = running[0][1]
        wait_until(lambda: len([*tmp_path.glob("ready-*")]) == 2, "both ranks", 90, log)
        cut_link(two_hosts)
        (tmp_path / "died").touch()
        got = answers("".join(process.ends(0) for process, _ in running))
    for rank, answer in enumerate(got):
        assert answer["kind"] == "HorovodInternalError", answer
        assert re.search(rf"ank {1 - rank} \(.*\) is unreachable", answer["text"]), answer
