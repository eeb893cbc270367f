"""`hvdtrain launch` on one host: hosts and slots, command lines, output, signals and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
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
from hvdtrain.job.slurm import expand_node_list
from hvdtrain.launch import remote
from hvdtrain.launch.host_list import (
    Host,
    choose_slots,
    hosts_of_scheduler,
    parse_host_list,
    read_host_file,
)
from hvdtrain.launch.placement import PORTS, free_port
from hvdtrain.launch.remote import through_stdin
from hvdtrain.launch.supervisor import mark_lines
from tests.environments import EXHAUSTIVE, rest
from tests.forkserver import warm
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
)

HVDRUN = [sys.executable, "-m", "hvdtrain", "launch"]
SUPERVISOR = "-m hvdtrain.launch.supervisor"
# One rank of a fixed job, and one of an elastic one: the options.
EITHER_KIND = pytest.mark.parametrize(
    "hosts",
    ["-np 1", rest("--host-discovery-script 'echo localhost:1'")],
)


def text_of(hosts: list[Host]) -> str:
    return ",".join(map(str, hosts))


# Hosts and slots


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:2", "a:4,b:2"),
        ("a, b,a:2", "a:3,b:1"),
        ("me@node-1.x:2,10.0.0.1:3", "me@node-1.x:2,10.0.0.1:3"),
        ("me@[fd00::1]:2,fd00::2,[fd00::3]", "me@[fd00::1]:2,[fd00::2]:1,[fd00::3]:1"),
    ],
)
def test_host_lists(text: str, hosts: str) -> None:
    found = parse_host_list(text)
    assert text_of(found) == hosts
    assert parse_host_list(hosts) == found
    assert parse_host_list("me@[fd00::1]:2") == [Host("me@fd00::1", 2)]


@pytest.mark.parametrize(
    "text", ["", "a:", "a:0", "a:x", "a:-1", "-oProxyCommand=x:1", "[-F/tmp/x]:1", "a b:2"]
)
def test_host_lists_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="is no host; write host or host:slots"):
        parse_host_list(text)


@pytest.mark.parametrize(
    ("lines", "hosts"),
    [
        ("# ours\na slots=4\n\nb slots=2 max_slots=4 # half\n", "a:4,b:2"),
        ("a:4\nb\n", "a:4,b:1"),
        ("n1\nn1\nn2\nn1\n", "n1:3,n2:1"),
        ("n1 4 all.q@n1 UNDEFINED\nn2 2 all.q@n2 UNDEFINED\n", "n1:4,n2:2"),
    ],
    ids=["openmpi", "mpich", "pbs", "sge"],
)
def test_hostfiles(lines: str, hosts: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(lines)
    assert text_of(read_host_file(path)) == hosts
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"):
        assert hosts_of_scheduler({name: str(path)}) == (read_host_file(path), name)


def test_hostfiles_that_are_none(tmp_path: Path) -> None:
    for text, said in (("# none\n", "names no host"), ("a\nb slots=many\n", "line 2: 'b:many'")):
        (tmp_path / "hosts").write_text(text)
        with pytest.raises(InputError, match=said):
            read_host_file(tmp_path / "hosts")
    with pytest.raises(InputError, match="cannot read the hostfile"):
        read_host_file(tmp_path / "absent")


@pytest.mark.parametrize(
    ("nodes", "tasks", "hosts"),
    [
        ("gpu[1-2]", "4(x2)", "gpu1:4,gpu2:4"),
        ("gpu[09-10],login", "2,1,3", "gpu09:2,gpu10:1,login:3"),
        ("r[1-2]n[1,3]", None, "r1n1:1,r1n3:1,r2n1:1,r2n3:1"),
        ("one", None, "one:1"),
    ],
)
def test_slurm(nodes: str, tasks: str | None, hosts: str) -> None:
    env = {"SLURM_JOB_NODELIST": nodes} | ({"SLURM_TASKS_PER_NODE": tasks} if tasks else {})
    assert text_of(hosts_of_scheduler(env)[0]) == hosts


def test_slurm_lists_that_are_none() -> None:
    for text in ("", "a[1-", "a[x]", "a]", "a b"):
        with pytest.raises(ValueError, match="cannot read the list"):
            expand_node_list(text)
    with pytest.raises(InputError, match="does not fit the 2 hosts"):
        hosts_of_scheduler({"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1"})
    assert hosts_of_scheduler({}) == ([], "")


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ((5, None, None), "a:4,b:1"),
        ((None, None, None), "a:4,b:2,c:2"),
        ((None, 2, 8), "a:8,b:8"),
        ((9, None, None), "-np 9 is more than the 8 slots of a:4,b:2,c:2"),
        ((None, 4, None), "--nnodes 4 is more than the hosts"),
    ],
)
def test_slots_are_filled_in_order(asked: tuple[int | None, ...], chosen: str) -> None:
    hosts = parse_host_list("a:4,b:2,c:2")
    if " " not in chosen:
        assert text_of(choose_slots(hosts, *asked)) == chosen
        return
    with pytest.raises(InputError, match=chosen):
        choose_slots(hosts, *asked)


def test_marked_lines() -> None:
    """Whole lines after a colon, pieces of lines after a plus."""
    assert mark_lines(b"[1]", b"one\ntwo\rthree\r\nfour", False) == (
        b"[1]:one\n[1]+two\r\n[1]:three\r\n",
        b"four",
    )
    assert mark_lines(b"[1]", b"four", True) == (b"[1]+four\n", b"")
    assert mark_lines(b"[1]", b"", True) == (b"", b"")
    assert mark_lines(b"[1]", b"x" * 70000, False) == (b"[1]+" + b"x" * 70000 + b"\n", b"")


# Command lines


def test_the_command_line_that_reaches_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "ssh")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    shell = remote.RemoteShell("ssh", 2222, "key", 40)
    secret = {"HVDTRAIN_JOB_SECRET": "not on a command line", "WANDB_API_KEY": "nor this"}
    command = [sys.executable, "-m", "hvdtrain.launch.supervisor"]
    assert shell.line("localhost", command, {}) == command
    there = shell.line("10.1.2.3", command, {**secret, "PATH": f"{BIN}:/bin", "A": "b c"})
    assert there[0] == "ssh"
    assert " ".join(there).count("-o ConnectTimeout=40") == 1
    assert there[-5:-1] == ["2222", "-i", "key", "10.1.2.3"]
    folder, _, inner = there[-1].partition(" && exec env ")
    assert folder == f"cd {os.getcwd()}"
    assert shlex.split(inner) == [f"PATH={BIN}:/bin", *command]


def test_what_travels_goes_through_stdin() -> None:
    env = {"HVDTRAIN_LR": "0.5", "HF_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "1", "A": "b", "B": "c"}
    given = through_stdin(env, ["A"])
    secret = given.pop("HVDTRAIN_JOB_SECRET")
    assert len(secret) == 64
    assert given == {name: env[name] for name in env if name != "B"}


def test_another_user_and_an_alias_of_ssh_are_not_this_host() -> None:
    """An alias whose HostName is loopback may lead to a container behind a port of this host."""
    for host in ("nobody@localhost", "alias.invalid"):
        assert not remote.is_this_host(host)
    assert remote.is_this_host("localhost")
    assert remote.is_this_host("127.0.0.1")


def test_other_hosts_get_no_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """`me@here` and an alias may be this host, whose name is loopback on Debian."""
    every = [a for each in psutil.net_if_addrs().values() for a in each]
    own = next(a.address for a in every if a.family == socket.AF_INET and a.address[:4] != "127.")
    addresses = {"me@here": ["127.0.1.1"], "alias": ["::1"], "far": [own]}
    monkeypatch.setattr(remote, "_resolve", addresses.__getitem__)
    monkeypatch.setattr(remote, "is_this_host", lambda name: name == "here")
    for names in (["me@here", "far"], ["here", "me@here", "far"], ["alias", "me@here", "far"]):
        assert remote.master_address(names) == own
    assert remote.master_address(["me@here", "here"]) == "127.0.0.1"


@pytest.mark.parametrize("hosts", ["a.invalid:4", "a.invalid:2,b.invalid:2"])
def test_an_ssh_that_runs_no_command_is_an_error(tmp_path: Path, hosts: str) -> None:
    program(tmp_path / "ssh")
    env = first_on_path(tmp_path)
    finished = run([*HVDRUN, "-np", "4", "-H", hosts, "/bin/false"], env=env)
    assert finished.code == 2, finished.output
    (said,) = finished.lines("error: ")
    assert ".invalid exited with code 0 before its ranks started" in said
    assert said.endswith("or look whether its shell runs commands")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("python t.py", f"{BIN}/python t.py"),
        ("t.py --np 3", f"{sys.executable} t.py --np 3"),
        ("-m hvdtrain -x", f"{sys.executable} -m hvdtrain -x"),
        ("hvdtrain --help", f"{BIN}/hvdtrain --help"),
        ("sh -c true", "/usr/bin/sh -c true"),
    ],
)
def test_the_command_of_a_rank(
    given: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    words = tuple(given.removeprefix("-m ").split())
    assert _command(words, given[:2] == "-m", clean_env()["PATH"]) == taken.split()


def test_what_reaches_other_hosts_gets_the_command_as_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """srun, kubectl, or any program; they do not pass a line to a shell, as ssh does."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for rsh, begin in (
        ("srun", "srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --nodelist=10.1.2.3"),
        ("kubectl", "kubectl exec --stdin 10 --"),
        ("reach -x {host} --", "reach -x 10.1.2.3 --"),
    ):
        program(tmp_path / rsh.split()[0])
        there = remote.RemoteShell(rsh).line("10.1.2.3", ["python", "a b"], {})
        inner = f"cd {os.getcwd()} && exec env python 'a b'"
        assert there == [*begin.split(), "sh", "-c", inner]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("python", "how many ranks? give -np N, or hosts with -H"),
        ("-np 2", "Missing argument 'COMMAND ...'"),
        ("-np 2 absent-command", "no such command: absent-command"),
        ("-np 2 absent.py", "no such file: absent.py"),
        ("-np 3 -H a:2 python", "-np 3 is more than the 2 slots of a:2"),
        ("-H a --hostfile b python", "-H and --hostfile both name the hosts"),
        ("-np 1 -x NO_SUCH python", "-x NO_SUCH: the variable is not set"),
        ("-H nohost --rsh 'no-such {host}' python", "there is no no-such on PATH"),
        ("-H nohost --rsh rsh python", "--rsh rsh: give ssh, srun, kubectl, or a"),
        ("-H nohost --rsh 'rsh {name}' python", "--rsh rsh {name}: give ssh, srun"),
        ("-np 0 python", "'-np'"),
        ("-np 1 --min-np 1 python", "--min-np needs a --host-discovery-script"),
        ("-np 1 --reset-limit 1 python", "--reset-limit needs a --host-discovery"),
        ("-np 1 --rsh srun -p 22 python", "-p has no effect with --rsh srun"),
        ("--host-discovery-script x -H a python", "-H has no effect with --host-"),
        ("-np 1 --output-filename /dev/null/x python", "--output-filename /dev/null"),
        ("--host-discovery-script x --min-np 3 --max-np 2 python", "--max-np 2 is less than the 3"),
    ],
)
def test_bad_input_is_one_line(arguments: str, said: str) -> None:
    finished = run(warm(["hvdtrain", "launch", *shlex.split(arguments)]))
    assert finished.code == 2
    (line,) = finished.output.splitlines()
    assert line.startswith(f"error: {said}") or said in line


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


@EXHAUSTIVE
def test_output(tmp_path: Path) -> None:
    """Lines in the order of each rank, with its number; without it in the files."""
    code = (
        "import os, sys; r = os.environ['RANK']; sys.stderr.write(f'late {r}\\n'); "
        "print('1%', end='\\r'); print('2%', end='\\r'); print('done', r); print('ä' * 70000); "
        "os.write(1, b'\\xff\\n[9]<exit>:1\\n'); print(end='no newline'); sys.stdin.read()"
    )
    output = succeed(run(line(f"-np 2 --output-filename {tmp_path}/out", code)))
    for rank in "01":
        assert output.count(f"[{rank}]<stderr>:late {rank}\n") == 1
        assert f"[{rank}]<stdout>:[9]<exit>:1\n" in output
        folder = tmp_path / "out" / f"rank.{rank}"
        assert (folder / "stderr").read_text() == f"late {rank}\n"
        text = f"1%\r2%\rdone {rank}\n{'ä' * 70000}\n".encode()
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
    ("options", "codes", "folder"),
    [
        ("", [1], "rank.1"),
        # An elastic job fails if rank 0 has ended before, and else goes on with rank 0.
        (
            "--host-discovery-script 'echo localhost:2' --min-np 2 --reset-limit 0",
            [0, 1],
            "localhost.1",
        ),
    ],
)
def test_errors_that_torch_records_are_kept(
    options: str, codes: list[int], folder: str, tmp_path: Path
) -> None:
    finished = run(line(f"-np 2 {options} --output-filename {tmp_path}/out", RECORDED))
    assert finished.code in codes, finished.output
    (file,) = (tmp_path / "out").glob("*/error.json")
    assert file.parent.name == folder
    assert "ArithmeticError: as asked" in json.loads(file.read_text())["message"]["message"]


HALF = """
import os, sys, time
rank, mark = int(os.environ["RANK"]), {mark!r}
while rank and not os.path.exists(mark):  # a rank that fails ends the other one
    time.sleep(0.01)
sys.stderr.write(f"half {{rank}}")
sys.stderr.flush()
open(mark, "w").close()
sys.exit(rank)
"""


def test_an_unfinished_line_is_ended_before_another_one(tmp_path: Path) -> None:
    """That of a rank, before another rank's and before the error."""
    finished = run(line("-np 2", HALF.format(mark=str(tmp_path / "mark"))))
    *lines, last = finished.output.splitlines()
    assert sorted(lines) == ["[0]<stderr>:half 0", "[1]<stderr>:half 1"], finished.output
    assert last == "error: rank 1 on localhost exited with code 1"


@pytest.mark.parametrize(
    "hosts",
    [
        "-H me@localhost:1",
        rest("--host-discovery-script 'echo me@localhost:1' --elastic-timeout 0.1"),
    ],
)
def test_the_last_line_of_stderr_needs_no_newline(tmp_path: Path, hosts: str) -> None:
    program(tmp_path / "ssh", "printf half >&2; sleep 0.3; exec printf done >&2")
    finished = run(line(hosts, ""), env=first_on_path(tmp_path))
    assert finished.lines("me@localhost: halfdone"), finished.output


def test_the_first_failure_is_named() -> None:
    code = (
        "import os, sys, time; r = os.environ['RANK']; time.sleep(300 if r != '1' else 0); "
        "sys.exit(3)"
    )
    finished = run(line("-np 3", code))
    assert finished.code == 3
    assert finished.lines("error: ") == ["error: rank 1 on localhost exited with code 3"]


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


@pytest.mark.parametrize(
    ("number", "whom", "code"),
    [
        (signal.SIGINT, "group", 130),
        rest(signal.SIGTERM, "launcher", 143),
        rest(signal.SIGINT, "launcher", 130),
    ],
)
def test_a_signal_reaches_each_rank_once(number: signal.Signals, whom: str, code: int) -> None:
    """To the process group, as Ctrl-C in a terminal, or to the launcher alone."""
    with running("-np 2", WAIT) as (process, _):
        if whom == "group":
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output = process.ends(code)
        said = sorted(line for line in output.splitlines() if " got " in line)
        assert said == [f"[{r}]<stdout>:rank {r} got {number.name}" for r in range(2)], output


@EITHER_KIND
def test_a_terminal_that_closes_ends_the_job_as_sigterm_does(hosts: str) -> None:
    """And says so in what may be a log. `nohup` keeps the job."""
    options = f"{hosts} -x RANK=0"
    with running(options, WAIT) as (process, _):
        process.send_signal(signal.SIGHUP)
        output = process.ends(129, 20)
        assert "rank 0 got SIGTERM\n" in output, output
        said = output.splitlines()[-1]
        assert said == "error: ended by SIGHUP: the terminal has closed; nohup keeps a job running"
    with running(options, WAIT, "nohup") as (process, _):
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.ends(143, 20).splitlines()[-1] == "error: ended by SIGTERM"


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


@EITHER_KIND
@EXHAUSTIVE
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
    found = [pid for pid, command in commands.items() if SUPERVISOR in command]
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
