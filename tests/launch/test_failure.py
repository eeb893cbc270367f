"""A rank that fails ends the job, with one report that names it, and with its exit code."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hvdtrain.errors import WorldError
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.job.world import World
from hvdtrain.liveness import failure
from tests.environments import EXHAUSTIVE, MARKS, rows
from tests.forkserver import warm
from tests.launching import (
    Started,
    first_on_path,
    members,
    no_shared_memory_left,
    program,
    run,
    started,
    stragglers,
    succeed,
    variables,
)
from tests.messages import Message
from tests.runs import run_json

LAUNCHERS = {
    "mpirun": "mpirun -np {n} {python}",
    "torchrun": "torchrun --nproc-per-node {n}",
    "horovodrun": "horovodrun -np {n} --gloo {python}",
    "horovodrun-mpi": "horovodrun -np {n} --mpi {python}",
    "hvdrun": "hvdrun -np {n} {python}",
    # A Ctrl-C counts at once, not only the second.
    "srun": "srun --ntasks {n} --kill-on-bad-exit=1 --quit-on-interrupt {python}",
    "none": "{python}",
}
FAILING = Path(__file__).with_name("failing.py")


def line(launcher: str, n: int, *arguments: object) -> list[str]:
    return [*LAUNCHERS[launcher].format(n=n, python=sys.executable).split(), *map(str, arguments)]


def train(launcher: str, n: int, backend: str, *arguments: object) -> list[str]:
    return line(launcher, n, "-m", "hvdtrain", "--backend", backend, *arguments)


def settings(tmp_path: Path, where: str, how: str, rank: int) -> list[object]:
    """Return the options of a training in which a rank fails."""
    sets = f"--set where={where} --set how={how} --set rank={rank} --set mark={tmp_path}/mark"
    return [*f"--task {FAILING}:Failing {sets} --run-dir {tmp_path}/run --threads 1".split()]


def line_in(function: Callable[[], None]) -> str:
    """Return the first line of a function, as the report of a hang names it."""
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno + 1}, {code.co_name}"


def traces(output: str) -> list[str]:
    """The outermost file of every traceback, but for the launchers' own, which report our end.

    A thread of horovodrun's also raises, now and then, where a rank ends while it is being ended.
    """
    blocks = output.split("Traceback (most recent call last):\n")[1:]
    files = [re.findall(r'^\S*\s*File "([^"]+)"', block, flags=re.MULTILINE) for block in blocks]
    ours = [each[0] for each in files if each and "/horovod/runner/" not in " ".join(each)]
    return [file for file in ours if Path(file).name not in LAUNCHERS]


# What the ranks of a host share is said once


GOOD = "python -m hvdtrain --backend ddp"


@pytest.mark.parametrize(
    ("command", "env"),
    rows(f"""
    mpirun -np 2 python -m hvdtrain --task digitz |
    torchrun --nproc-per-node 2 -m hvdtrain --backend single |
    horovodrun -np 2 --gloo python -m hvdtrain --epoch 1 | | rest
    mpirun -np 2 python -m hvdtrain | HOROVOD_RANK=0 | rest
    mpirun -np 1 {GOOD} : -np 1 {GOOD} --epochs -1 | | rest  # what one rank alone has wrong
    """),
    ids="task,backend,option,variables,alone".split(","),
)
def test_bad_input_is_said_once(tmp_path: Path, command: str, env: str, message: Message) -> None:
    finished = run(warm(command.split()), cwd=tmp_path, env=variables(env))
    assert finished.code == (2 if command.startswith("mpirun") else 1)
    (only,) = finished.lines("error: ")
    message(only)
    assert not traces(finished.output), finished.output
    assert not list(tmp_path.iterdir())


def test_who_failed_reports_before_who_lost_it() -> None:
    failed = [ValueError("the cause"), HorovodInternalError("mismatched shapes")]
    lost = [WorldError("lost a peer"), HorovodInternalError("shut down", lost_peer=True)]
    of_rank_0, of_rank_1 = (World(r, 2, r, 2, 0, 1, "torchrun", "a test") for r in range(2))
    for own, other in itertools.product(failed, lost):
        delays = failure._report_delay_s(of_rank_1, own), failure._report_delay_s(of_rank_0, other)
        assert delays[0] < delays[1]


ENDS = {
    "raise": ("exited with code 1", 1),
    "exit": ("exited with code 3", 3),
    "kill": ("was killed by SIGKILL", 137),
}
TWO_HOSTS = "-H localhost:1,elsewhere:1"
ELASTIC = "--min-np 2 --host-discovery-script 'echo localhost:2'"
FIRST_CAUSE = Path(__file__).with_name("first_cause.py")


@pytest.mark.parametrize(
    ("hosts", "api", "how", "rank"),
    [
        ("", "shm", "exit", 1),
        (ELASTIC, "hvd", "exit", 1),
        *(
            pytest.param(hosts, "hvd", how, rank, marks=MARKS["slow" if hosts else "rest"])
            for hosts in ("", TWO_HOSTS, ELASTIC)
            for how in ENDS
            for rank in (0, 1)
        ),
    ],
)
def test_hvdrun_names_the_first_cause(
    tmp_path: Path, hosts: str, api: str, how: str, rank: int
) -> None:
    """And ends as that rank did, not as the one that has lost it."""
    program(tmp_path / "ssh", LOCAL_SSH)
    command = line("hvdrun", 2, FIRST_CAUSE, api, how, rank)
    command[1:1] = shlex.split(hosts)
    finished = run(command, env=first_on_path(tmp_path))
    text, code = ENDS[how]
    place = "elsewhere" if hosts == TWO_HOSTS and rank == 1 else "localhost"
    assert finished.output.splitlines()[-1] == f"error: rank {rank} on {place} {text}"
    assert finished.code == code


LOCAL_SSH = """
[ "$1" = -G ] && echo "hostname 192.0.2.1" && exit
for last; do :; done
exec sh -c "$last"
"""


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_rank_that_lost_a_peer_ends_after_it(launcher: str) -> None:
    module = ["-m", "hvdtrain.hvd"] if launcher == "mpirun" else []
    finished = run(line(launcher, 2, *module, FIRST_CAUSE, "hvd", "raise", 1))
    assert finished.code == 1
    assert finished.lines("ArithmeticError: as told"), finished.output
    assert not finished.lines("HorovodInternalError: "), finished.output


# Signals that end a run at once: see test_preemption.py for those that save first


def test_a_second_ctrl_c_inside_backward(tmp_path: Path) -> None:
    arguments = settings(tmp_path, "backward", "", -1)
    finished = run(warm(train("torchrun", 2, "ddp", *arguments)))
    assert finished.lines("interrupted"), finished.output
    assert not traces(finished.output), finished.output
    assert re.search(r"exitcode\s*:\s*130", finished.output), finished.output
    assert run_json(tmp_path / "run")["outcome"] == "interrupted", finished.output


# The launcher itself is gone


ORPHAN = """
import sys, time
from pathlib import Path
import hvdtrain.hvd as hvd
hvd.init()
Path(sys.argv[1]).touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("launcher", "name"),
    rows("""
    torchrun       | SIGKILL
    mpirun         | SIGKILL | rest
    horovodrun     | SIGKILL | rest
    horovodrun-mpi | SIGINT  | rest
    """),
)
def test_ranks_end_with_their_launcher(tmp_path: Path, launcher: str, name: str) -> None:
    """Also where a shell stands between (mpirun), and where the ranks are in a `sleep`."""
    mark, script = tmp_path / "mark", tmp_path / "script.py"
    script.write_text(ORPHAN)
    command = line(launcher, 2, "-m", "hvdtrain.hvd", script, mark)
    if launcher == "mpirun":
        command = [*command[:3], "sh", "-c", f"{shlex.join(command[3:])}; exit $?"]
    with no_shared_memory_left(but="vader_segment."):  # those of this job are looked at there
        check_orphans_end(command, mark, signal.Signals[name])


@EXHAUSTIVE
def test_ranks_end_with_a_launcher_that_ends_while_they_start(tmp_path: Path) -> None:
    """The store of the agent refuses."""
    command = line("torchrun", 2, "-m", "hvdtrain", "--run-dir", tmp_path / "run")
    with started(command) as (agent, _):
        agent.wait_until(
            lambda: any("bin/torchrun" not in each for each in members(agent.marker).values()),
            "a rank",
        )
        agent.kill()
        check_ended(agent)
        assert "has ended" in agent.text, agent.text
    assert not (tmp_path / "run").exists()


IN_THE_BACKGROUND = """
import os, sys, time
from pathlib import Path
import hvdtrain.hvd as hvd
hvd.init()
shell = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
Path(sys.argv[1]).touch()
while Path("/proc", shell).exists():
    time.sleep(0.01)
time.sleep(3)  # three looks of what watches the launcher
Path(sys.argv[1]).write_text("goes on")
"""


@EXHAUSTIVE
def test_a_shell_that_leaves_mpirun_behind_is_no_launcher(tmp_path: Path) -> None:
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(IN_THE_BACKGROUND)
    job = shlex.join(line("mpirun", 1, "-m", "hvdtrain.hvd", script, mark))
    with started(["sh", "-c", f"{job} & until test -e {mark}; do sleep 0.1; done"]) as (shell, log):
        shell.ends(0)
        check_ended(shell)
        assert mark.read_text() == "goes on", shell.text


def check_orphans_end(
    command: list[str],
    mark: Path,
    number: signal.Signals,
    env: Mapping[str, str] | None = None,
) -> None:
    with started(command, env=env) as (process, log):
        process.wait_until(mark.exists, f"the file {mark.name}")
        segments = mapped_segments(process)
        if number == signal.SIGINT:  # as from a terminal
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        check_ended(process)
        left = [path for path in segments if path.exists()]
        assert not left, "Open MPI's shared memory, which mpirun deletes as it ends"


def mapped_segments(process: Started) -> set[Path]:
    """Return the files of Open MPI's shared memory that the command's processes have mapped."""
    text = ""
    for pid in members(process.marker):
        with contextlib.suppress(OSError):  # it has ended
            text += Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return set(map(Path, re.findall(r"/dev/shm/(?:vader|sm)_segment\S+", text)))


def check_ended(process: Started) -> None:
    """All processes of the command end."""
    assert not stragglers(process.marker), process.text


LEAVES = """
import os
import hvdtrain
from hvdtrain.errors import WorldError
try:
    with hvdtrain.open_backend("ddp"):
        if os.environ["RANK"] == "1":
            os._exit(0)
except WorldError as error:
    print("told:", error, flush=True)
    os._exit(0)
"""
AGAIN = """
import os
from datetime import timedelta
import torch.distributed as dist
from hvdtrain import BackendOptions, open_backend

if os.environ["RANK"] == "1":
    try:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 2}
        dist.init_process_group("gloo", timeout=timedelta(seconds=0.1), **alone)
    except dist.DistError:
        print("it has failed", flush=True)
with open_backend("ddp", options=BackendOptions(transport="gloo", timeout_s=20)) as backend:
    backend.barrier()
"""


@pytest.mark.parametrize(
    ("code", "said"), [(LEAVES, "told: lost contact with a peer"), (AGAIN, "it has failed")]
)
def test_a_rank_that_leaves_or_fails_alone(code: str, said: str, tmp_path: Path) -> None:
    """While the others close; or, as in an elastic job in which a rank dies, make their group."""
    script = tmp_path / "script.py"
    script.write_text(code)
    output = succeed(run(warm([*line("torchrun", 2), script])))
    assert output.count(said) == 1, output
