"""`hvdtrain launch` on one host: hosts and slots, command lines, output, signals and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdtrain.cli.launch import _command
from hvdtrain.errors import InputError
from hvdtrain.job.addresses import own_addresses
from hvdtrain.job.world import World
from hvdtrain.launch import remote
from hvdtrain.launch.host_list import (
    Host,
    choose_slots,
    hosts_of_scheduler,
    parse_host_list,
    read_host_file,
)
from hvdtrain.launch.placement import PORTS, free_port
from tests.environments import EXHAUSTIVE, rows
from tests.launching import (
    BIN,
    Started,
    clean_env,
    first_on_path,
    members,
    program,
    run,
    started,
    succeed,
    wait_for,
    wait_until,
)
from tests.messages import Message

HVDRUN = [sys.executable, "-m", "hvdtrain", "launch"]
# One rank of a fixed job, and one of an elastic one: the options.
FIXED = "-np 1 -x RANK=0"
ELASTIC = "--host-discovery-script 'echo localhost:1' -x RANK=0"


def text_of(hosts: list[Host]) -> str:
    return ",".join(map(str, hosts))


# Hosts and slots


def hosts_of(kind: str, text: str, folder: Path) -> list[Host]:
    """Return the hosts of -H, of a hostfile, or of a Slurm job: nodes, and tasks if given."""
    if kind == "-H":
        hosts = parse_host_list(text)
        assert parse_host_list(text_of(hosts)) == hosts
    elif kind == "slurm":
        names = ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")
        hosts = hosts_of_scheduler(dict(zip(names, text.split(";"), strict=False)))
    else:
        (folder / "hosts").write_text(text.replace("/", "\n"))
        hosts = read_host_file(folder / "hosts")
        for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"):
            assert hosts_of_scheduler({name: f"{folder}/hosts"}) == hosts
    return hosts


# A hostfile's lines end with a /.
HOSTS = """
-H      | a, b,a:2                         | a:3,b:1
-H      | me@node-1.x:2,10.0.0.1:3         | me@node-1.x:2,10.0.0.1:3
-H      | me@[fd00::1]:2,fd00::2,[fd00::3] | me@[fd00::1]:2,[fd00::2]:1,[fd00::3]:1
openmpi | # ours/a slots=4//b slots=2 max_slots=4 # half/           | a:4,b:2
mpich   | a:4/b/                                                    | a:4,b:1
pbs     | n1/n1/n2/n1/                                              | n1:3,n2:1
sge     | n1 4 all.q@n1 UNDEFINED/n2 2 all.q@n2 UNDEFINED/          | n1:4,n2:2
slurm   | gpu[1-2];4(x2)         | gpu1:4,gpu2:4
slurm   | gpu[09-10],login;2,1,3 | gpu09:2,gpu10:1,login:3
slurm   | r[1-2]n[1,3]           | r1n1:1,r1n3:1,r2n1:1,r2n3:1
slurm   | one                    | one:1
slurm   | gpu[7,9]               | gpu7:1,gpu9:1
slurm   | a,b[1-2],10.0.0.1      | a:1,b1:1,b2:1,10.0.0.1:1
slurm   | gpu[01-02]-ib          | gpu01-ib:1,gpu02-ib:1
"""


@pytest.mark.parametrize(("kind", "text", "hosts"), rows(HOSTS))
def test_hosts(kind: str, text: str, hosts: str, tmp_path: Path) -> None:
    assert text_of(hosts_of(kind, text, tmp_path)) == hosts


NO_HOSTS = """
-H |
-H | a:
-H | a:0
-H | a:x
-H | a:-1
-H | -oProxyCommand=x:1
-H | [-F/tmp/x]:1
-H | a b:2
hostfile | # none/
hostfile | a/b slots=many/
slurm |
slurm | a[1-
slurm | a[x]
slurm | a]
slurm | a b
slurm | a,b;1
slurm | ,a
slurm | [
slurm | gpu[]
"""


@pytest.mark.parametrize(("kind", "text"), rows(NO_HOSTS))
def test_hosts_that_are_none(kind: str, text: str, tmp_path: Path, message: Message) -> None:
    with message.raises(InputError):
        hosts_of(kind, text, tmp_path)


def test_slots_are_filled_in_order() -> None:
    hosts = parse_host_list("a:4,b:2,c:2")
    assert choose_slots(hosts, None, None, None) == hosts
    assert text_of(choose_slots(hosts, 5, None, None)) == "a:4,b:1"
    assert text_of(choose_slots(hosts, None, 2, 8)) == "a:8,b:8"


# Command lines


@pytest.mark.parametrize(
    ("shell", "begin"),
    [
        (
            remote.RemoteShell("ssh", 2222, "key", 40),
            "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=40 "
            "-o ServerAliveInterval=10 -p 2222 -i key 10.1.2.3",
        ),
        (
            remote.RemoteShell("srun"),
            "srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --nodelist=10.1.2.3 sh -c",
        ),
        (remote.RemoteShell("kubectl"), "kubectl exec --stdin 10 -- sh -c"),
        (remote.RemoteShell("reach -x {host} --"), "reach -x 10.1.2.3 -- sh -c"),
    ],
)
def test_the_command_line_that_reaches_a_host(
    shell: remote.RemoteShell, begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh passes a line to a shell; srun, kubectl, or any program, do not. It has no secret: that
    goes through stdin, with all else that travels.
    """
    program(tmp_path / shell.name)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command = ["python", "a b"]
    assert shell.line("localhost", command, {}) == command
    env = {"HVDTRAIN_JOB_SECRET": "not on a command line", "HF_TOKEN": "nor this", "A": "b c"}
    env |= {"HVDTRAIN_LR": "0.5", "CUDA_VISIBLE_DEVICES": "1", "PATH": f"{BIN}:/bin"}
    secret = {"HVDTRAIN_JOB_SECRET": env["HVDTRAIN_JOB_SECRET"]}
    assert {**remote.travelling({**env, "B": "c"}, ["A"]), **secret} == env
    assert "HVDTRAIN_JOB_SECRET" not in remote.travelling(env, ["A"])
    inner = f"cd {os.getcwd()} && exec env PATH={BIN}:/bin python 'a b'"
    assert shell.line("10.1.2.3", command, env) == [*begin.split(), inner]


def test_another_user_and_an_alias_of_ssh_are_not_this_host() -> None:
    """An alias whose HostName is loopback may lead to a container behind a port of this host."""
    for host in ("nobody@localhost", "alias.invalid"):
        assert not remote.is_this_host(host)
    assert remote.is_this_host("localhost")
    assert remote.is_this_host("127.0.0.1")


def test_other_hosts_get_no_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """`me@here` and an alias may be this host, whose name is loopback on Debian."""
    own = own_addresses(World(0, 2, 0, 1, 0, 2, "openmpi"))[0]
    addresses = {"me@here": ["127.0.1.1"], "alias": ["::1"], "far": [own]}
    monkeypatch.setattr(remote, "_resolve", addresses.__getitem__)
    monkeypatch.setattr(remote, "is_this_host", lambda name: name == "here")
    for names in ("me@here far", "here me@here far", "alias me@here far"):
        assert remote.master_address(names.split()) == own
    assert remote.master_address(["me@here", "here"]) == "127.0.0.1"


COMMANDS = """
python t.py     | {bin}/python t.py
t.py --np 3     | {python} t.py --np 3
-m hvdtrain -x  | {python} -m hvdtrain -x
hvdtrain --help | {bin}/hvdtrain --help
sh -c true      | /usr/bin/sh -c true
"""


@pytest.mark.parametrize(("given", "taken"), rows(COMMANDS))
def test_the_command_of_a_rank(
    given: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    words = tuple(given.removeprefix("-m ").split())
    assert _command(words, given[:2] == "-m", clean_env()["PATH"]) == (
        taken.format(bin=BIN, python=sys.executable).split()
    )


# Ranks on this host. Their commands do not import torch, which takes seconds.


def line(options: str, code: str) -> list[str]:
    return [*HVDRUN, *shlex.split(options), sys.executable, "-c", code]


@contextlib.contextmanager
def running(options: str, code: str, *wrapper: str) -> Iterator[tuple[Started, Path]]:
    """Run a code that prints "ready" on its ranks, which both have begun; nothing is left of it."""
    with started([*wrapper, *line(options, code)]) as (process, log):
        wait_for(log, "ready", 2 if "-np 2" in options else 1)
        yield process, log
        assert not members(process.marker)


def test_output(tmp_path: Path) -> None:
    """Lines in the order of each rank, with its number; without it in the files."""
    code = (
        "import os, sys; r = os.environ['RANK']; sys.stderr.write(f'late {r}\\n'); "
        "print('1%', end='\\r'); print('2%', end='\\r'); print('done', r, end='\\r\\n'); "
        "print('ä' * 70000); "
        "os.write(1, b'\\xff\\n[9]<exit>:1\\n'); print(end='no newline'); sys.stdin.read()"
    )
    output = succeed(run(line(f"-np 2 --output-filename {tmp_path}/out", code)))
    assert "<stdout>:\n" not in output
    for rank in "01":
        assert output.count(f"[{rank}]<stderr>:late {rank}\n") == 1
        assert f"[{rank}]<stdout>:[9]<exit>:1\n" in output
        folder = tmp_path / "out" / f"rank.{rank}"
        assert (folder / "stderr").read_text() == f"late {rank}\n"
        text = f"1%\r2%\rdone {rank}\r\n{'ä' * 70000}\n".encode()
        assert (folder / "stdout").read_bytes() == text + b"\xff\n[9]<exit>:1\nno newline"


RECORDED = """
import os
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["HOROVOD_RANK" if "HOROVOD_RANK" in os.environ else "RANK"] == "1":
        raise ArithmeticError("as asked")

main()
"""


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ("", "rank.1"),
        # An elastic job fails if rank 0 has ended before, and else goes on with rank 0.
        ("--host-discovery-script 'echo localhost:2' --min-np 2 --reset-limit 0", "localhost.1"),
    ],
)
def test_errors_that_torch_records_are_kept(options: str, folder: str, tmp_path: Path) -> None:
    finished = run(line(f"-np 2 {options} --output-filename {tmp_path}/out", RECORDED))
    assert finished.code == 1 or options, finished.output
    (file,) = (tmp_path / "out").glob("*/error.json")
    assert file.parent.name == folder
    assert "ArithmeticError: as asked" in json.loads(file.read_text())["message"]["message"]


HALF = """
import os, sys, time
rank, mark = int(os.environ["RANK"]), {mark!r}
while rank == 2 or rank and not os.path.exists(mark):  # a rank that fails ends the others
    time.sleep(0.01)
sys.stderr.write(f"half {{rank}}")
sys.stderr.flush()
open(mark, "w").close()
sys.exit(3 * rank)
"""


def test_an_unfinished_line_is_ended_before_another_one(tmp_path: Path) -> None:
    """That of a rank, before another rank's and before the error: of the rank that failed first."""
    finished = run(line("-np 3", HALF.format(mark=str(tmp_path / "mark"))))
    *lines, last = finished.output.splitlines()
    assert sorted(lines) == ["[0]<stderr>:half 0", "[1]<stderr>:half 1"], finished.output
    assert (finished.code, last) == (3, "error: rank 1 on localhost exited with code 3")


@pytest.mark.parametrize("hosts", ["-H a.invalid:4", "-H a.invalid:2,b.invalid:2"])
def test_an_ssh_that_runs_no_command_is_an_error(tmp_path: Path, hosts: str) -> None:
    """The last line of its stderr needs no newline."""
    program(tmp_path / "ssh", "printf half >&2; sleep 0.3; exec printf done >&2")
    finished = run(line(hosts, ""), env=first_on_path(tmp_path))
    assert finished.lines(": halfdone"), finished.output
    assert finished.code == 2, finished.output
    (said,) = finished.lines("error: ")
    assert ".invalid exited with code 0 before its ranks started" in said
    assert said.endswith("or check that its shell runs commands")


def test_a_busy_port_is_never_taken_and_named() -> None:
    """Given by the user it is an error; else another one is taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert free_port(port) == 0
        finished = run(line(f"-np 1 --master-port {port}", "print('never')"))
    assert finished.code == 2
    assert finished.lines("error: ") == [
        f"error: port {port} of localhost is in use; give another --master-port"
    ]
    assert "never" not in finished.output
    assert free_port(port) == port
    assert free_port() in PORTS


VARIABLES = """
import os
names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR"
print(*(os.environ[name] for name in (names + " OMP_NUM_THREADS").split()))
"""


def test_the_ranks_of_hosts_with_different_slots() -> None:
    """Nor does hvdrun leave open what it should close."""
    env = {"PYTHONWARNINGS": "error::ResourceWarning", "OMP_NUM_THREADS": "3"}
    command = line("-H localhost:2,127.0.0.1:1 --master-addr 127.0.0.2", VARIABLES)
    assert sorted(succeed(run(command, env=env)).splitlines()) == [
        "[0]<stdout>:0 0 2 3 0 2 127.0.0.2 3",
        "[1]<stdout>:1 1 2 3 0 2 127.0.0.2 3",
        "[2]<stdout>:2 0 1 3 1 2 127.0.0.2 3",
    ]


GROUPS = """
import torch, torch.distributed as dist, hvdtrain.hvd as hvd
hvd.init()
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()
print("total", total.item(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
"""


def test_process_groups_and_hvd_share_the_port_of_rank_0() -> None:
    output = succeed(run(line("-np 2", GROUPS)))
    assert output.count("total 2.0 2.0") == 2, output


WAIT = """
import os, signal, sys, time
def count(number, frame):
    print(f"rank {os.environ['RANK']} got {signal.Signals(number).name}", flush=True)
    leave.append(time.monotonic() + 0.5)  # a second signal would arrive meanwhile
leave = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, count)
print("ready", flush=True)
while not leave or time.monotonic() < leave[0]:
    time.sleep(0.05)
"""


CLOSED = "error: ended by SIGHUP: the terminal has closed; nohup keeps a job running"
SIGNALS = """
-np 2                                                | group    | SIGINT
-np 2                                                | launcher | SIGTERM | rest
-np 2                                                | launcher | SIGINT  | rest
--host-discovery-script 'echo localhost:1' -x RANK=0 | launcher | SIGTERM
--host-discovery-script 'echo localhost:1' -x RANK=0 | launcher | SIGINT  | rest
-np 1 -x RANK=0                                      | launcher | SIGHUP
--host-discovery-script 'echo localhost:1' -x RANK=0 | launcher | SIGHUP  | rest
-np 1 -x RANK=0                                      | nohup    | SIGTERM
--host-discovery-script 'echo localhost:1' -x RANK=0 | nohup    | SIGTERM | rest
"""


@pytest.mark.parametrize(("options", "whom", "name"), rows(SIGNALS))
def test_a_signal_reaches_each_rank_once(options: str, whom: str, name: str) -> None:
    """To the process group, as Ctrl-C in a terminal, or to the launcher alone. A terminal that
    closes ends the job as SIGTERM does, and says so in what may be a log; `nohup` keeps the job.
    """
    number = signal.Signals[name]
    got, said = {
        "SIGINT": ("SIGINT", "interrupted"),
        "SIGTERM": ("SIGTERM", "error: ended by SIGTERM"),
        "SIGHUP": ("SIGTERM", CLOSED),
    }[name]
    with running(options, WAIT, *["nohup"] * (whom == "nohup")) as (process, _):
        if whom == "nohup":
            process.send_signal(signal.SIGHUP)
        if whom == "group":
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output = process.ends(128 + number)
        ranks = "01" if "-np 2" in options else "0"
        assert sorted(re.findall(r"rank (\d) got (\w+)\n", output)) == [(r, got) for r in ranks]
        assert output.splitlines()[-1] == said, output


@pytest.mark.parametrize("hosts", [FIXED, ELASTIC])
def test_ranks_end_with_a_killed_launcher(hosts: str) -> None:
    with running(hosts, WAIT) as (process, _):
        process.kill()
        wait_until(lambda: not members(process.marker), "the end of all processes")


TALKS_ON = """
import signal, sys, time
def end(number, frame):
    for number in range(20):
        print("saving", number, flush=True)
        time.sleep(0.05)
    open(sys.argv[1], "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""


@EXHAUSTIVE
@pytest.mark.parametrize("hosts", [FIXED, ELASTIC])
def test_ranks_save_after_their_terminal_has_closed(hosts: str, tmp_path: Path) -> None:
    """Output to it fails then; that must not end them earlier."""
    command = ["setsid", "--ctty", *line(hosts, TALKS_ON), str(tmp_path / "saved")]
    terminal, end = os.openpty()
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=clean_env())
    os.close(end)
    text = b""
    while b"ready" not in text:
        text += os.read(terminal, 1 << 16)
    os.close(terminal)
    assert process.wait(60) == 129
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("killed", [0, 1], ids=["guard", "inner"])
def test_ranks_end_with_their_supervisor(killed: int) -> None:
    """And so does what they have started, in a session of its own, too."""
    code = (
        "import subprocess as s; s.Popen(['sleep', '300'], start_new_session=True); print('ready')"
    )
    code += "; s.run(['sleep', '300'])"
    with running("-np 2", code) as (process, _):
        os.kill(supervisor_of(members(process.marker))[killed], signal.SIGKILL)
        said = process.ends(4, 20).splitlines()[-1]
        assert said == "error: the supervisor on localhost was killed"


def supervisor_of(commands: dict[int, str]) -> list[int]:
    """Return the guard of a host's supervisor, and its inner process, of the processes there."""
    found = [pid for pid, command in commands.items() if "hvdtrain.launch.supervisor" in command]
    return sorted(found, key=lambda pid: psutil.Process(pid).ppid() in found)


@EXHAUSTIVE
def test_a_second_signal_ends_ranks_that_ignore_the_first() -> None:
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); print('ready'); time.sleep(300)"
    with running("-np 2", code) as (process, _):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # as a user would
        process.send_signal(signal.SIGINT)
        process.ends(130)


@EXHAUSTIVE
def test_a_reader_that_ends() -> None:
    """`hvdrun ... | head -1` ends the ranks, too."""
    code = "import time\nfor _ in range(1000): print('x' * 1000); time.sleep(0.01)"
    command = f"{shlex.join(line('-np 1', code))} | head -1; echo ${{PIPESTATUS[0]}}"
    with started(["bash", "-c", command]) as (process, _):
        assert process.ends(0).splitlines()[-1] == "141", process.text
        assert not members(process.marker)
