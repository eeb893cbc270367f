"""Elastic jobs: ranks that die, hosts that come and go, under hvdrun."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import re
import shlex
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hvdtrain.job import elastic_world
from hvdtrain.job.elastic_world import RemovedFromJob
from hvdtrain.launch.discovery import FailedHosts, find_hosts
from hvdtrain.launch.elastic_server import ElasticServer, Reply
from tests.environments import EXHAUSTIVE, rows
from tests.forkserver import warm
from tests.launch.hosts import running_hosts
from tests.launching import (
    Finished,
    Started,
    members,
    program,
    run,
    started,
    wait_for,
    wait_until,
)

HVDRUN = ["hvdtrain", "launch"]
COLD = [sys.executable, "-m", *HVDRUN]
PYTHON = sys.executable
SCRIPT = [PYTHON, str(Path(__file__).with_name("elastic_script.py"))]


def set_hosts(folder: Path, *hosts: str) -> None:
    """Let the script of a job print other hosts, at once or not at all."""
    new = folder / "new"
    new.write_text("".join(f"{host}\n" for host in hosts))
    new.rename(folder / "hosts")


@dataclass
class Job:
    """A running elastic job, whose hosts the test changes."""

    folder: Path
    process: Started

    def wait(self, text: str, times: int = 1) -> None:
        wait_for(self.process.log, text, times, seconds=90)

    @property
    def text(self) -> str:
        return self.process.text

    def pids(self, size: int, times: int = 1) -> dict[int, int]:
        """Wait for the first, or another, world of this size to train; return its processes."""

        def found(word: str) -> list[tuple[str, str]]:
            return re.findall(rf"{word} (\d+)/{size} (\d+)", self.text)

        def has_stepped() -> bool:
            return len(found("START")) == len(found("STEP")) == size * times

        wait_until(has_stepped, f"a world of {size}", 90, self.process.log)
        return {int(rank): int(pid) for rank, pid in found("START")[-size:]}

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        """Let the training end, with exit code 0."""
        (self.folder / "finish").touch()
        self.process.ends(0)


@contextlib.contextmanager
def elastic(
    folder: Path,
    options: str,
    *hosts: str,
    pause_s: float = 0.01,
    on: Callable[..., list[str]] | None = None,
    code: str = "",
) -> Iterator[Job]:
    """Run the training, or other Python code, on hosts; `on` wraps the line, so that it runs on one
    of them.
    """
    program(folder / "hosts.sh", f"cat {folder}/hosts")
    set_hosts(folder, *hosts)
    line = [*options.split(), "--host-discovery-script", f"{folder}/hosts.sh"]
    line += [PYTHON, "-c", code] if code else [*SCRIPT, f"{folder}/finish", str(pause_s)]
    # Not warm on another host: the server's processes are in its PID namespace.
    wrapped = warm([*HVDRUN, *line]) if on is None else on(*COLD, *line)
    with started(wrapped) as (process, _):
        yield Job(folder, process)


def check_training(job: Job) -> None:
    """Every sample of every epoch has been trained, and the ranks end with the same parameters."""
    epochs = re.findall(r"EPOCH (\d+) missing (\d+) repeated (-?\d+)", job.text)
    assert epochs, job.text
    # An epoch may end twice: when a rank dies before the commit that follows.
    numbers = {int(number) for number, _, _ in epochs}
    assert numbers == set(range(len(numbers))), job.text
    assert {missing for _, missing, _ in epochs} == {"0"}, job.text
    assert all(0 <= int(repeated) <= 12 for _, _, repeated in epochs), job.text
    ends = re.findall(r"END \d+/(\d+) \d+ (\w+)", job.text)
    assert len(ends) == int(ends[0][0]), job.text
    assert len({checksum for _, checksum in ends}) == 1, job.text


# The host whose rank dies gets no other one: it is not listed any more when hosts come. Else the
# launcher may start a process there that it ends at once, which holds a slot for a moment.
BOTH_NAMES = "127.0.0.1:1", "localhost:1"
KEPT_ASIDE = "--min-np 1 --blacklist-cooldown-range 600 600"


def test_ranks_die_and_hosts_come(tmp_path: Path) -> None:
    """2 -> 1 -> 3 -> 2: the survivor keeps its process, also when rank 0 dies."""
    with elastic(tmp_path, f"--max-np 3 {KEPT_ASIDE}", *BOTH_NAMES) as job:
        first = job.pids(2)
        job.kill(first[0])
        assert job.pids(1) == {0: first[1]}
        assert "on 127.0.0.1 was killed by SIGKILL; world 2 -> 1 rank, generation 2" in job.text
        set_hosts(tmp_path, "localhost:3")
        grown = job.pids(3)
        assert grown[0] == first[1]
        assert "2 ranks joined on localhost; world 1 -> 3 ranks, generation 3" in job.text
        set_hosts(tmp_path, "localhost:2")
        job.wait("rank 2 on localhost leaves; world 3 -> 2 ranks, generation 4")
        assert job.pids(2, times=2) == {0: grown[0], 1: grown[1]}
        job.finish()
        check_training(job)
        assert members(job.process.marker) == {}


@EXHAUSTIVE
@pytest.mark.xdist_group("hosts")
def test_hosts_come_and_go(tmp_path: Path) -> None:
    """Over ssh: a rank dies with its host put aside, a host comes, and that of rank 0 goes."""
    options = "--min-np 2 --blacklist-cooldown-range 0.5 5"
    with (
        running_hosts(3) as hosts,
        elastic(tmp_path, options, "a:1", "b:1", on=hosts.on_login) as job,
    ):
        first = job.pids(2)
        rank = r"\S*python \S*elastic_script.py .*"  # not its supervisor
        (pid,) = [p for p, line in hosts.processes("b").items() if re.fullmatch(rank, line)]
        job.kill(pid)  # too few ranks, until b is used again
        again = job.pids(2, times=2)
        assert again[0] == first[0]
        assert "on b was killed by SIGKILL; 1 rank joined on b; world 2 -> 2 ranks" in job.text
        set_hosts(tmp_path, "a:1", "b:1", "c:1")
        grown = job.pids(3)
        assert (grown[0], grown[1]) == (first[0], again[1])
        set_hosts(tmp_path, "c:1", "b:1")
        assert job.pids(2, times=3) == {0: grown[1], 1: grown[2]}
        job.wait("rank 0 on a leaves; world 3 -> 2 ranks")
        job.finish()
        check_training(job)
        hosts.wait_until_gone()


@EXHAUSTIVE
def test_a_stopped_rank_is_left_behind(tmp_path: Path) -> None:
    """It does not ask for the next world, which a third rank's death has made necessary. Meanwhile
    the script fails, which is said once, and its last hosts stand.
    """
    with elastic(tmp_path, f"--elastic-timeout 2 {KEPT_ASIDE}", "localhost:3") as job:
        first = job.pids(3)
        (tmp_path / "hosts").unlink()
        job.wait("No such file")
        os.kill(first[1], signal.SIGSTOP)
        job.kill(first[2])
        assert job.pids(1) == {0: first[0]}
        said = "rank 1 on localhost did not ask for a new rank within --elastic-timeout: ending it"
        assert said in job.text
        assert job.text.count("No such file") == 1
        set_hosts(tmp_path, *BOTH_NAMES)
        assert job.pids(2)[1] not in first.values()
        job.finish()


@pytest.mark.soak
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """Also while the ranks meet, or join: a step follows within seconds, and no sample is lost.

    The last rank is not killed.
    """
    seed = random.randrange(1000)
    chance = random.Random(seed)
    print("seed", seed)
    killed: set[int] = set()
    options = "--min-np 1 --blacklist-cooldown-range 0.3 0.3"
    with elastic(tmp_path, options, "localhost:4", pause_s=0.005) as job:
        job.pids(4)
        for _ in range(15):
            time.sleep(chance.choice([0.0, 0.05, 0.1, 0.2, 0.4, 0.8]))
            begun = {int(pid) for pid in re.findall(r"START \d+/\d+ (\d+)", job.text)}
            count = job.text.count("STEP ")
            if len(alive := sorted(begun - killed)) > 1:
                victim = chance.choice(alive)
                killed.add(victim)
                job.kill(victim)
                wait_for(job.process.log, "STEP ", times=count + 1, seconds=30)
        job.finish()
        check_training(job)


# Without training


def hvdrun(folder: Path, code: str, options: str = "") -> Finished:
    """Run Python code, which needs no torch, on elastic ranks: two, if the options say no more."""
    line = [*HVDRUN, "--host-discovery-script", "echo localhost:2", *shlex.split(options)]
    return run(warm([*line, PYTHON, "-c", code, folder]), timeout=60)


CODES = {
    "hello": "print('hello')",
    "fails": "import sys; sys.exit(3)",
    # One has ended with 0, the other later with 1.
    "late": """
import os, sys, time
from pathlib import Path
rank, said = int(os.environ["HOROVOD_RANK"]), Path(sys.argv[1], "rank-0")
if rank == 0:
    said.with_suffix(".new").write_text(str(os.getpid()))
    said.with_suffix(".new").rename(said)
else:
    while not said.exists() or Path("/proc", said.read_text()).exists():
        time.sleep(0.01)
    time.sleep(1)  # hvdrun has noticed that rank 0 has ended
sys.exit(rank)
""",
    "dies": """
import os, signal
from hvdtrain.job.elastic_world import enter

enter(60)
if os.environ["HOROVOD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
enter(60)
""",
    # Before the ranks are connected, they wait for each other's keys: not for ten minutes.
    "waits": """
import os, signal, threading
from hvdtrain.job.elastic_world import enter
from hvdtrain.errors import WorldError
from hvdtrain.job.rendezvous import open_store
from hvdtrain.job.world import detect

lost = []
def call(operation, *arguments):
    try:
        operation(*arguments)
    except WorldError as error:
        lost.append(f"{operation.__name__}: {error}")

enter(60)
if (world := detect()).size == 2:
    store = open_store(world, 600)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threads = [
        threading.Thread(target=call, args=(store.get, "never set")),
        threading.Thread(target=call, args=(store.multi_get, ["never set"])),
        threading.Thread(target=call, args=(store.wait, ["never set"])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    enter(60)
    print("went on", detect().size, *sorted(lost), flush=True)
""",
    "sleeps": "import time; time.sleep(60)",
    "ends": "import time; time.sleep(2); print('done')",
}
LOST = "a rank of this generation has exited before all were connected"
# MPI operator's script can list a pod before its name resolves: the host is put aside, once.
PODS = "echo localhost:1; echo no-such-host.invalid:1"
ASIDE = "is the name right. .no-such-host.invalid gets no new ranks for 10 s"
JOBS = rf"""
hello  |                                     | 0 | hello\n.*hello\n
fails  |                                     | 3 | error: a new rank on localhost exited with code 3
late   |                                     | 1 | error:
dies   | --min-np 1 --reset-limit 0          | 4 | killed by SIGKILL, after --reset-limit 0 changes
waits  | {KEPT_ASIDE} | 0 | went on 1 get: {LOST} multi_get: {LOST} wait: {LOST}
sleeps | --min-np 3 --elastic-timeout 0.5       | 4 | 0 ranks ready, fewer than 3 \(--min-np\)
sleeps | --min-np 3 --elastic-timeout 0.5 -np 2 | 4 | 0 ranks ready, fewer than 3 \(--min-np\)
sleeps | --host-discovery-script 'exit 3' | 2 | exit 3 ended with code 3: it printed no error
sleeps | --host-discovery-script 'echo why >&2; false' | 2 | ended with code 1: why
sleeps | --host-discovery-script 'echo a:b:c d'        | 2 | printed 'a:b:c d'
ends   | --host-discovery-script '{PODS}' | 0 | (?s)^(?!.*{ASIDE}.*{ASIDE}).*{ASIDE}.*:done | rest
"""


@pytest.mark.parametrize(("code", "options", "ends_with", "said"), rows(JOBS))
def test_the_job_ends_with_its_ranks(
    tmp_path: Path, code: str, options: str, ends_with: str, said: str
) -> None:
    """The first world, too, has --min-np ranks. A script that fails at once starts none."""
    finished = hvdrun(tmp_path, CODES[code], options)
    assert finished.code == int(ends_with), finished.output
    assert re.search(said, finished.output), finished.output


ASKS = """
import os
from hvdtrain.job.elastic_world import enter
print("asks", os.getpid(), flush=True)
enter(60)
"""


def test_a_rank_that_dies_while_it_waits_costs_the_launcher_nothing(tmp_path: Path) -> None:
    """Its request keeps no thread and no connection."""
    options = "--min-np 3 --blacklist-cooldown-range 0.01 0.01"

    with elastic(tmp_path, options, "localhost:2", on=lambda *line: [*line], code=ASKS) as job:
        hvdrun, most = psutil.Process(job.process.pid), 1 << 30

        def is_idle() -> bool:
            """The requests of the two ranks that live are open, and the port for others."""
            return len(hvdrun.net_connections()) == 3 and hvdrun.num_threads() <= most

        for number in range(2, 5):
            job.wait("asks ", number)
            wait_until(is_idle, "three sockets, and no more threads", 90, job.process.log)
            most = min(most, hvdrun.num_threads())
            job.kill(int(re.findall(r"asks (\d+)", job.text)[-1]))
        job.process.terminate()
        assert "Traceback" not in job.process.ends(143), job.text


def test_a_rank_that_has_lost_its_place_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(elastic_world.WORKER, "a:1")
    monkeypatch.setattr(elastic_world._Asked, "count", 0)
    removed = ",".join("-1" for _ in elastic_world.NUMBERS).encode()
    monkeypatch.setattr(elastic_world, "request", lambda path, timeout_s: removed)
    before = dict(os.environ)
    with pytest.raises(RemovedFromJob, match="a:1 is no longer part of the job"):
        elastic_world.enter(60)
    assert dict(os.environ) == before


WAITS_FOR_A_NEW_RANK = """
import os, time
import hvdtrain.hvd as hvd
from hvdtrain.job import elastic_world
hvd.init()
print("RANK", hvd.rank(), os.getpid(), flush=True)
while not elastic_world.request("hosts/update"):
    time.sleep(0.02)
print("a new one is ready", flush=True)
time.sleep(600)
"""


def test_a_new_rank_does_not_begin_where_all_others_have_died(tmp_path: Path) -> None:
    """It has no state: it would train from the start, in silence."""
    with elastic(tmp_path, KEPT_ASIDE, BOTH_NAMES[0], code=WAITS_FOR_A_NEW_RANK) as job:
        job.wait("RANK 0")
        set_hosts(tmp_path, *BOTH_NAMES)
        job.wait("a new one is ready")
        job.kill(int(re.findall(r"RANK 0 (\d+)", job.text)[0]))
        job.process.ends(137)
        assert job.text.count("RANK") == 1, job.text
        assert "rank 0 on 127.0.0.1 was killed by SIGKILL" in job.text


# Hosts


def test_hosts_of_a_script() -> None:
    script = r"printf 'a:3\nb\n\nme@c:1\nd:0\n[fd00::1]:4\nfd00::2\na:3'"
    for source, wanted in ((script, "a:3 b:2 me@c:1 [fd00::1]:4 [fd00::2]:2"), ("true", "")):
        assert " ".join(map(str, find_hosts(source, 2))) == wanted


def test_a_failed_host_is_put_aside_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    failed = FailedHosts(10.0, 50.0)
    for cooldown_s in (10.0, 20.0, 40.0, 50.0):
        assert (failed.add("a"), failed.has("a"), failed.has("b")) == (cooldown_s, True, False)
        now += 1
        assert failed.add("a") == cooldown_s - 1  # ranks that fail together count once
        now += cooldown_s
        assert not failed.has("a")
    now += 51
    assert failed.add("a") == 10.0


# Security


STORE = "hvdtrain/store.1"


def test_the_server_wants_the_secret_and_forgets_old_generations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    server = ElasticServer(lambda name, reply: asked.append(name))
    addresses = itertools.cycle(["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])])

    def answer(path: str, message: bytes = b"", secret: str = server.secret) -> bytes | int:
        """Return the body, b"" for none, or the code of an error."""
        place = next(addresses), str(server.port), secret
        try:
            return elastic_world.request(path, message, server=place)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        server.begin(1)
        for path in ("rank_and_size/a:0", STORE, "hosts/update"):
            assert answer(path, b"", "guess") == answer(path, b"x", "") == 403
        assert asked == []
        with monkeypatch.context() as changed:  # another body than the one that the proof is for
            put = functools.partial(urllib.request.Request, data=b"another", method="PUT")
            changed.setattr(urllib.request, "Request", lambda url, *_, **__: put(url))
            assert answer(STORE, b"address") == 400
        assert [answer(STORE, body) for body in (b"", b"address", b"")] == [b"", b"", b"address"]
        server.store = ""
        assert answer(STORE) == 410
        server.begin(2)
        assert answer(STORE, b"of a dead rank") == 410
        assert [answer("hvdtrain/store.2", body) for body in (b"", b"x" * 70_000)] == [b"", 413]
    finally:
        server.stop()


def test_a_rank_believes_its_launcher_only() -> None:
    def forget_the_secret(name: str, reply: Reply) -> None:
        server.secret = "of another job, at the same port"
        reply.put("0,1,0,1,0,1")

    server = ElasticServer(forget_the_secret)
    ask = functools.partial(
        elastic_world.request, server=("127.0.0.1", str(server.port), server.secret)
    )
    try:
        assert ask("hosts/update") == b""
        server.values["hosts/update"] = b"7,1"
        assert ask("hosts/update") == b"7,1"
        with pytest.raises(OSError, match="is not the launcher of this job"):
            ask("rank_and_size/a:0")
        with pytest.raises(OSError, match="403"):
            ask("hosts/update")
    finally:
        server.stop()
