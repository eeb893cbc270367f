"""Several hosts, each with an sshd: `hvdrun`, torchrun, mpirun and horovodrun. See hosts.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.launch.host_list import parse_host_list
from hvdtrain.launch.real_launchers import command_line
from tests.environments import rows
from tests.launch.host_training import CASE
from tests.launch.hosts import Hosts, running_hosts
from tests.launch.test_launch import HVDRUN, supervisor_of
from tests.launch.test_restart import resumed, training
from tests.launching import BIN, descendants, run, run_all, started, succeed, wait_for
from tests.methods.test_sharded_training import assert_same_files
from tests.parity.reference import reference
from tests.runs import run_json

# They need root and an sshd: not in `make test`.
pytestmark = [pytest.mark.xdist_group("hosts"), pytest.mark.timeout(240), pytest.mark.exhaustive]

TRAINING = Path(__file__).with_name("host_training.py")
DIGITS = "--seed 1 --max-steps 10 --global-batch-size 64 --transport gloo --threads 1".split()
# What each rank runs, with its number as the argument.
# Ends at SIGTERM, and starts a process that is in no group or session of its rank.
RANK = """
import subprocess, time
subprocess.Popen(["sleep", "301"], start_new_session=True)
print("ready")
time.sleep(300)
"""
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{RANK}"  # inherited
# The others exit with 1 when the connection closes, on the other host, too.
TALKING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("ready")
while True:
    dist.all_reduce(torch.ones(1000))
"""
# Rank 0 waits on a, and fails if the connection to rank 3, on b, closes.
CONNECTED = """
import os, signal, socket, sys, time
place = os.environ["MASTER_ADDR"], 29541
rank = os.environ["RANK"]
if rank == "0":
    peer, _ = socket.create_server(place).accept()
    print("ready")
    peer.recv(1)
    sys.exit("lost contact with rank 3")
while rank == "3":
    try:
        peer = socket.create_connection(place)
        break
    except OSError:
        time.sleep(0.05)
def end(number, frame):
    if rank == "3":
        peer.close()
        time.sleep(3)  # as one that saves its state
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready")
time.sleep(300)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """a, b and c."""
    with running_hosts(3) as hosts:
        yield hosts


# hvdrun


def test_ranks_are_numbered_in_the_order_of_the_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """With another number of them on each, from a host that has some itself, and from one of none.
    Working folder and variables travel; output goes to the files of the host of `hvdrun`.
    """
    code = (
        "import os, socket, sys; e = os.environ; print(socket.gethostname(), e['LOCAL_RANK'], "
        "e['WORLD_SIZE'], os.getcwd(), e['HVDTRAIN_X'], e['MINE'], e['YOURS'], sys.executable)"
    )
    options = ["-np", 3, "-H", "b:1,a:2", "-x", "MINE=1", "-x", "YOURS"]
    options += ["--output-filename", tmp_path / "out"]
    line = hosts.on("a", *HVDRUN, *options, sys.executable, "-c", code)
    output = succeed(run(line, cwd=tmp_path, env={"HVDTRAIN_X": "a b'c", "YOURS": "2"}))
    for rank, place in enumerate(["b 0", "a 0", "a 1"]):
        text = f"{place} 3 {tmp_path} a b'c 1 2 {sys.executable}\n"
        assert f"[{rank}]<stdout>:{text}" in output
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == text
    hosts.wait_until_gone()


CALL = """
import hvdtrain
def work(start, failing):
    import os, socket, torch, hvdtrain.hvd as hvd
    hvd.init()
    total = hvd.allreduce(torch.tensor([start + hvd.rank()]), op=hvd.Sum).tolist()
    if hvd.rank() == failing:
        raise KeyError("gone")
    return hvd.rank(), socket.gethostname(), total, os.getcwd()
for failing in (-1, 2):
    options = {"hosts": "a:2,b:1", "output_filename": f"out{failing}"}
    print("results", hvdtrain.run(work, (1.0, failing), **options))
"""


@pytest.mark.parametrize("start", ["login", "b"])
def test_a_function_runs_on_the_ranks_of_several_hosts(
    hosts: Hosts, start: str, tmp_path: Path
) -> None:
    """From a host that has some itself, and from one of none; then an error of a rank of b."""
    command = [sys.executable, "-c", CALL]
    line = hosts.on_login(*command) if start == "login" else hosts.on(start, *command)
    finished = run(line, cwd=tmp_path)
    hosts.wait_until_gone()
    expected = [(r, h, [6.0], str(tmp_path)) for r, h in enumerate("aab")]
    assert f"results {expected}" in finished.output, finished.output
    assert finished.code == 1
    assert "RuntimeError: rank 2 failed:\nTraceback" in finished.output, finished.output
    assert finished.output.rstrip().endswith("KeyError: 'gone'"), finished.output


STARTED = "import os, time; print('ready', os.environ['HOROVOD_LOCAL_RANK']); time.sleep(300)"


def test_one_ssh_to_a_host_with_many_elastic_ranks(hosts: Hosts) -> None:
    """By default sshd drops some of more than ten connections that begin at the same time."""
    line = [*HVDRUN, "--host-discovery-script", "echo b:16", sys.executable, "-c", STARTED]
    with started(hosts.on_login(*line)) as (process, log):
        wait_for(log, "ready", 16)
        assert sum(cmd.startswith("ssh ") for cmd in descendants(process.pid).values()) == 1
        assert not lines_of(process.text, "elastic: ")
        process.terminate()
        process.ends(143)
    hosts.wait_until_gone()


VICTIMS = {
    "rank 0": ("error: rank 0 on a was killed by SIGKILL", 137),
    "rank 3": ("error: rank 3 on b was killed by SIGKILL", 137),
    "guard": ("error: the supervisor on b was killed", 4),
    "supervisor": ("error: the supervisor on b was killed", 4),
    "ssh": ("error: ssh to b was killed by SIGKILL", 4),
    "hvdrun": ("", -signal.SIGKILL),
}
NOT_RANKS = [victim for victim in VICTIMS if not victim.startswith("rank")]
KILLS = [
    *((victim, RANK) for victim in ("rank 3", *NOT_RANKS)),
    ("rank 3", STUBBORN),
    ("supervisor", CONNECTED),  # rank 0 loses its peer by it, and is not blamed
    *(pytest.param(victim, STUBBORN, marks=pytest.mark.soak) for victim in NOT_RANKS),
    ("rank 0", TALKING),
    ("rank 3", TALKING),
]
NAMES = {RANK: "", STUBBORN: "stubborn", TALKING: "talking", CONNECTED: "connected"}


def process_of(victim: str, hosts: Hosts, launcher: int) -> int:
    """Return the process to kill, on b where there are several."""
    if victim == "hvdrun":
        return launcher
    place = "a" if victim == "rank 0" else "b"
    commands = descendants(launcher) if victim == "ssh" else hosts.processes(place)
    if victim in ("guard", "supervisor"):
        return supervisor_of(commands)[victim == "supervisor"]
    text = " b cd " if victim == "ssh" else f"\n {victim[-1]}"
    (pid,) = [pid for pid, line in commands.items() if text in line]
    return pid


@pytest.mark.parametrize(("victim", "code"), KILLS, ids=lambda value: NAMES.get(value, value))
def test_kill_9(hosts: Hosts, victim: str, code: str) -> None:
    """All ends on both hosts, the cause is named, not a rank that lost its peer by it, and the exit
    code is right.
    """
    message, expected = VICTIMS[victim]
    rank = ["sh", "-c", 'exec "$0" -c "$1" "$RANK"', sys.executable, code]
    with started(hosts.on_login(*HVDRUN, "-np", 4, "-H", "a:2,b:2", *rank)) as (process, log):
        wait_for(log, "ready", 4)
        os.kill(process_of(victim, hosts, process.pid), signal.SIGKILL)
        process.ends(expected)
        hosts.wait_until_gone(10 if code == CONNECTED else 60)
        assert lines_of(process.text, "error: ") == [message] * bool(message), process.text


def lines_of(output: str, start: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(start)]


UNREACHED = """
nohost    | nohost: ssh: Could not resolve hostname
10.77.0.9 | 10.77.0.9  # an address of the bridge that nobody has
"""


@pytest.mark.parametrize(("host", "said"), rows(UNREACHED))
def test_hosts_that_cannot_be_reached(hosts: Hosts, host: str, said: str) -> None:
    """No rank starts on the others, which are connected."""
    options = ["-np", 2, "-H", f"a:1,{host}:1", "--start-timeout", 2]
    finished = run(hosts.on_login(*HVDRUN, *options, "echo", "started"))
    assert finished.code == 2
    (line,) = finished.lines("error: ")
    assert host in line
    assert finished.lines(said), finished.output
    assert "started\n" not in finished.output
    hosts.wait_until_gone()


# Training


def start_on(hosts: Hosts, launcher: str, slots: str, *command: object) -> list[list[str]]:
    """Return the command lines, to be run at once, that start a Python command on "a:2,b:2"."""
    if launcher == "torchrun":
        pairs = [part.split(":") for part in slots.split(",")]
        address = ["--master-addr", "a", "--master-port", 29533]
        line = [BIN / "torchrun", "--nnodes", len(pairs), *address]
        return [
            hosts.on(name, *line, "--node-rank", node, "--nproc-per-node", number, *command)
            for node, (name, number) in enumerate(pairs)
        ]
    words = [str(word) for word in command]
    start = [*HVDRUN, "-H", slots, sys.executable, *words]
    if launcher != "hvdrun":
        places = parse_host_list(slots)
        start = command_line(launcher, words, sum(place.slots for place in places), places)
    # horovodrun wants an interface of the same name on its own host.
    return [hosts.on("a", *start) if launcher == "horovodrun" else hosts.on_login(*start)]


def run_on(hosts: Hosts, *what: Any) -> str:
    """Start a command on a and b and return its output. Fail if it fails or leaves processes."""
    output = run_all(*((line, {}) for line in start_on(hosts, *what)), seconds=200)
    hosts.wait_until_gone()
    return output


def test_restarts_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """A rank dies on b: all ranks start again, and the run goes on. test_restart.py compares the
    parameters.
    """
    words = [sys.executable, *training(tmp_path, "1:12")]
    line = [*HVDRUN, "-H", "a:1,b:1", "--max-restarts", 1, *words]
    output = succeed(run(hosts.on_login(*line)))
    about = run_json(tmp_path / "run")
    assert (about["outcome"], about["world"]["size"]) == ("finished", 2)
    who = "rank 1 on b was killed by SIGKILL"
    assert f"restart 1 of 1: {who}; all ranks start again" in output, output
    assert resumed(output) == ["from step-00000010, step 10"]
    hosts.wait_until_gone()


def test_a_restart_leaves_out_a_lost_host(hosts: Hosts, tmp_path: Path) -> None:
    """The ranks of b go on at a, whose slots are spare until then."""
    train = [*DIGITS, "--epochs", 4000, "--checkpoint-every", 5, "--run-dir", tmp_path / "run"]
    line = [*HVDRUN, "-np", 2, "-H", "b:2,a:2", "--max-restarts", 1, "-m", "hvdtrain", *train]
    with started(hosts.on_login(*line)) as (process, log):
        wait_for(log, "step ")
        assert not hosts.processes("a")
        os.kill(process_of("supervisor", hosts, process.pid), signal.SIGKILL)
        wait_for(log, "resume   from ")
        assert not [line for line in hosts.processes("b").values() if "hvdtrain" in line]
        process.terminate()
        (said,) = lines_of(process.ends(143), "restart 1 of 1: ")
        assert said.endswith("the supervisor on b was killed; all ranks start again on a:2")
    hosts.wait_until_gone()


def test_hosts_whose_ranks_share_parameters(hosts: Hosts, tmp_path: Path) -> None:
    """`--shard-optimizer` changes no bits, and runs are resumed with and without it."""
    output = run_on(hosts, "hvdrun", "a:2,b:2", TRAINING, "sharded", "ddp", "shm", tmp_path)
    assert "trained 3 times to 1 digest: " in output, output
    assert "ranks by host [2, 2]" in output, output
    assert_same_files(tmp_path / "False", tmp_path / "True")


# Every launcher, transport and backend, in pairs.
# Those that share launcher and transport with others are slow.
# Several ranks on a host matter to shm alone; two ranks in all have the bits of the plain loop.
# Last, what rank 0 prints: the ranks, the hosts and the transport. Open MPI's variables do not tell
# the number of hosts that are not equally filled.
PARITY_ROWS = """
hvdrun     | compat  | gloo | a:1,b:1     | 2 2 gloo | slow
hvdrun     | ddp     | shm  | a:2,b:2     | 4 2 shm
torchrun   | ddp     | gloo | a:1,b:1     | 2 2 gloo
torchrun   | compat  | shm  | a:2,b:2     | 4 2 shm  | slow
mpirun     | compat  | mpi  | a:2,b:2     | 4 2 mpi
mpirun     | horovod | auto | a:1,b:1     | 2 2      | slow
horovodrun | ddp     | gloo | a:1,b:1     | 2 2 gloo
mpirun     | ddp     | mpi  | a:1,b:2,c:1 | 4 4 mpi
"""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("launcher", "backend", "transport", "slots", "trained"), rows(PARITY_ROWS)
)
def test_parity(
    hosts: Hosts,
    launcher: str,
    backend: str,
    transport: str,
    slots: str,
    trained: str,
    tmp_path: Path,
) -> None:
    """Bitwise the hand-written loop on two ranks; on more within 1e-12 of one process."""
    output = run_on(hosts, launcher, slots, TRAINING, "parity", backend, transport, tmp_path)
    assert f"trained {trained}" in output, output
    if trained[0] == "2":
        state, expected = torch.load(tmp_path / "fp32.pt"), reference(CASE, 2, "fp32")
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    state, expected = torch.load(tmp_path / "fp64.pt"), reference(CASE, 1, "fp64")
    for name in expected:
        assert (state[name] - expected[name]).abs().max() <= 1e-12, name


@pytest.mark.soak
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("launcher", "transport"), [("hvdrun", "gloo"), ("mpirun", "mpi")])
def test_parity_with_packet_loss(launcher: str, transport: str, tmp_path: Path) -> None:
    with running_hosts(2) as hosts:
        hosts.lose_packets()
        test_parity(hosts, launcher, "ddp", transport, "a:2,b:2", f"4 2 {transport}", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["rank 3", "supervisor", "hvdrun"])
def test_kill_9_with_packet_loss(victim: str) -> None:
    with running_hosts(2) as hosts:
        hosts.lose_packets()
        test_kill_9(hosts, victim, RANK)
