"""Elastic jobs: ranks that die, hosts that come and go, under hvdrun."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import itertools
import os
import random
import re
import signal
import socket
import sys
import threading
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
from hvdtrain.launch.discovery import Discovery, FailedHosts
from hvdtrain.launch.elastic_server import ElasticServer, RankRequest
from hvdtrain.launch.host_list import Host
from tests.forkserver import warm
from tests.launch.hosts import running_hosts
from tests.launching import Finished, Started, members, run, started, wait_for

HVDRUN = ["hvdtrain", "launch"]
RANK = re.compile(r"\S*python \S*elastic_script.py .*")  # not its supervisor
SCRIPT = [sys.executable, str(Path(__file__).with_name("elastic_script.py"))]


@dataclass
class Job:
    """A running elastic job, whose hosts the test changes."""

    folder: Path
    process: Started
    log: Path

    def set_hosts(self, *hosts: str) -> None:
        """Let the script print other hosts, at once or not at all."""
        new = self.folder / "new"
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.rename(self.folder / "hosts")

    def wait(self, text: str, times: int = 1) -> None:
        wait_for(self.log, text, times, seconds=90)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def news(self) -> str:
        """The output without the lines of each epoch and each step."""
        lines = self.text.splitlines()
        return "\n".join(line for line in lines if "EPOCH" not in line and ":step " not in line)

    def pids(self, size: int, times: int = 1) -> dict[int, int]:
        """Wait for the first, or another, world of this size to train; return its processes."""
        found: list[tuple[str, str]] = []
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            found = re.findall(rf"START (\d+)/{size} (\d+)", self.text)
            stepped = re.findall(rf"STEP (\d+)/{size} ", self.text)
            if len(found) == len(stepped) == size * times:
                return {int(rank): int(pid) for rank, pid in found[-size:]}
            time.sleep(0.02)
        raise AssertionError(f"no world of {size}: {self.news}")

    def kill(self, pid: int) -> float:
        """Kill a rank with SIGKILL; return when."""
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    def finish(self) -> int:
        """Let the training end; return the exit code."""
        (self.folder / "finish").touch()
        return self.process.wait(60)


@contextlib.contextmanager
def elastic(
    folder: Path,
    launcher: list[str],
    *hosts: str,
    pause_s: float = 0.01,
    on: Callable[..., list[str]] | None = None,
    command: list[str] | None = None,
) -> Iterator[Job]:
    """Run the training, or another command, on hosts; `on` wraps the line, so that it runs on one
    of them.
    """
    discover = folder / "hosts.sh"
    discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discover.chmod(0o755)
    (folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
    line = [*launcher, "--host-discovery-script", str(discover)]
    line += command or [*SCRIPT, str(folder / "finish"), str(pause_s)]
    # Not warm on another host: the server's processes are in its PID namespace.
    with started(warm(line) if on is None else on(*line)) as (process, log):
        yield Job(folder, process, log)


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
KEPT_ASIDE = "--min-np", "1", "--blacklist-cooldown-range", "600", "600"


def test_ranks_die_and_hosts_come(tmp_path: Path) -> None:
    """2 -> 1 -> 3 -> 2: the survivor keeps its process, also when rank 0 dies."""
    launcher = [*HVDRUN, "--max-np", "3", *KEPT_ASIDE]
    with elastic(tmp_path, launcher, *BOTH_NAMES) as job:
        first = job.pids(2)
        job.kill(first[0])
        assert job.pids(1) == {0: first[1]}
        assert "on 127.0.0.1 was killed by SIGKILL; world 2 -> 1 rank, generation 2" in job.text
        job.set_hosts("localhost:3")
        grown = job.pids(3)
        assert grown[0] == first[1]
        assert "2 ranks joined on localhost; world 1 -> 3 ranks, generation 3" in job.text
        job.set_hosts("localhost:2")
        job.wait("rank 2 on localhost leaves; world 3 -> 2 ranks, generation 4")
        assert job.pids(2, times=2) == {0: grown[0], 1: grown[1]}
        assert job.finish() == 0, job.news
        check_training(job)
        assert members(job.process.marker) == {}


@pytest.mark.exhaustive
@pytest.mark.xdist_group("hosts")
def test_hosts_come_and_go(tmp_path: Path) -> None:
    """Over ssh: a rank dies with its host put aside, a host comes, and that of rank 0 goes."""
    launcher = [sys.executable, "-m", "hvdtrain", "launch", "--min-np", "2"]
    launcher += ["--blacklist-cooldown-range", "0.5", "5"]
    with (
        running_hosts(3) as hosts,
        elastic(tmp_path, launcher, "a:1", "b:1", on=hosts.on_login) as job,
    ):
        first = job.pids(2)
        (rank,) = [p for p, line in hosts.processes("b").items() if RANK.fullmatch(line)]
        job.kill(rank)  # too few ranks, until b is used again
        again = job.pids(2, times=2)
        assert again[0] == first[0]
        assert "on b was killed by SIGKILL; 1 rank joined on b; world 2 -> 2 ranks" in job.text
        job.set_hosts("a:1", "b:1", "c:1")
        grown = job.pids(3)
        assert (grown[0], grown[1]) == (first[0], again[1])
        job.set_hosts("c:1", "b:1")
        assert job.pids(2, times=3) == {0: grown[1], 1: grown[2]}
        job.wait("rank 0 on a leaves; world 3 -> 2 ranks")
        assert job.finish() == 0, job.news
        check_training(job)
        hosts.wait_until_gone()


@pytest.mark.exhaustive
def test_a_stopped_rank_is_left_behind(tmp_path: Path) -> None:
    """It does not ask for the next world, which a third rank's death has made necessary."""
    launcher = [*HVDRUN, "--min-np", "1", "--elastic-timeout", "2"]
    launcher += ["--blacklist-cooldown-range", "600", "600"]
    with elastic(tmp_path, launcher, "localhost:3") as job:
        first = job.pids(3)
        os.kill(first[1], signal.SIGSTOP)
        job.kill(first[2])
        assert job.pids(1) == {0: first[0]}
        said = "rank 1 on localhost requested no next rank within --elastic-timeout; it is ended"
        assert said in job.text
        assert job.finish() == 0, job.news


def kill_at_random(
    job: Job, chance: random.Random, times: int, pauses_s: list[float], step: str
) -> None:
    """Kill a rank after a random pause, as often as `times`; the others must go on each time.

    `step` is what a rank prints in every step. The last rank is not killed.
    """
    killed: set[int] = set()
    for _ in range(times):
        time.sleep(chance.choice(pauses_s))
        started = {int(pid) for pid in re.findall(r"START \d+/\d+ (\d+)", job.text)}
        alive = sorted(started - killed)
        count = job.text.count(step)
        if len(alive) > 1:
            victim = chance.choice(alive)
            killed.add(victim)
            job.kill(victim)
            wait_for(job.log, step, times=count + 1, seconds=30)


@pytest.mark.soak
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """Also while the ranks meet, or join: a step follows within seconds, and no sample is lost."""
    seed = random.randrange(1000)
    chance = random.Random(seed)
    print("seed", seed)
    launcher = [*HVDRUN, "--min-np", "1", "--blacklist-cooldown-range", "0.3", "0.3"]
    with elastic(tmp_path, launcher, "localhost:4", pause_s=0.005) as job:
        job.pids(4)
        kill_at_random(job, chance, 15, [0.0, 0.05, 0.1, 0.2, 0.4, 0.8], "STEP ")
        assert job.finish() == 0, job.news
        check_training(job)


# Without training


def hvdrun(folder: Path, code: str, *options: str, hosts: str = "echo localhost:2") -> Finished:
    """Run Python code, which needs no torch, on elastic ranks."""
    (folder / "script.py").write_text(code)
    line = [*HVDRUN, "--host-discovery-script", hosts, *options]
    return run(warm([*line, sys.executable, str(folder / "script.py")]), timeout=60)


LATE = """
import os, sys, time
from pathlib import Path
rank, said = int(os.environ["HOROVOD_RANK"]), Path(__file__).with_name("rank-0")
if rank == 0:
    said.with_suffix(".new").write_text(str(os.getpid()))
    said.with_suffix(".new").rename(said)
else:
    while not said.exists() or Path("/proc", said.read_text()).exists():
        time.sleep(0.01)
    time.sleep(1)  # hvdrun has noticed that rank 0 has ended
sys.exit(rank)
"""


def test_the_job_ends_with_its_ranks(tmp_path: Path) -> None:
    hello = hvdrun(tmp_path, "print('hello')")
    assert (hello.code, len(hello.lines("hello"))) == (0, 2), hello.output
    failing = hvdrun(tmp_path, "import sys; sys.exit(3)")
    assert failing.code == 3, failing.output
    assert "error: a new rank on localhost exited with code 3" in failing.output
    assert hvdrun(tmp_path, LATE).code == 1  # one has ended with 0, the other later with 1


ASKS = """
import os
from hvdtrain.job.elastic_world import enter
print("asks", os.getpid(), flush=True)
enter(60)
"""


def test_a_rank_that_dies_while_it_waits_costs_the_launcher_nothing(tmp_path: Path) -> None:
    """Its request keeps no thread and no connection."""
    launcher = [sys.executable, "-m", "hvdtrain", "launch", "--min-np", "3"]
    launcher += ["--blacklist-cooldown-range", "0.01", "0.01"]
    command = [sys.executable, "-c", ASKS]

    def cold(*line: str) -> list[str]:
        return list(line)

    with elastic(tmp_path, launcher, "localhost:2", on=cold, command=command) as job:
        hvdrun = psutil.Process(job.process.pid)
        threads, deadline = 0, time.monotonic() + 90
        for number in range(2, 5):
            job.wait("asks ", number)
            # The requests of the two ranks that live are open, and the port for others.
            while (sockets := len(hvdrun.net_connections())) != 3 or (
                threads and hvdrun.num_threads() != threads
            ):
                assert time.monotonic() < deadline, (sockets, hvdrun.threads(), job.text)
                time.sleep(0.02)
            threads = threads or hvdrun.num_threads()
            job.kill(int(re.findall(r"asks (\d+)", job.text)[-1]))
        job.process.terminate()
        assert job.process.wait(30) == 143, job.text
        assert "Traceback" not in job.text, job.text


WAITS = """
import os, signal, threading
from hvdtrain.job.elastic_world import enter
from hvdtrain.errors import WorldError
from hvdtrain.job.rendezvous import open_store
from hvdtrain.job.world import detect

def call(operation, *arguments):
    try:
        operation(*arguments)
    except WorldError as error:
        print("lost:", operation.__name__, error, flush=True)

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
    print("went on", detect().size, flush=True)
"""


def test_no_rank_waits_in_the_store_for_a_dead_one(tmp_path: Path) -> None:
    """Before the ranks are connected, they wait for each other's keys: not for ten minutes."""
    (tmp_path / "waits.py").write_text(WAITS)
    launcher = [*HVDRUN, "--min-np", "1", "--blacklist-cooldown-range", "600", "600"]
    command = [sys.executable, str(tmp_path / "waits.py")]
    with elastic(tmp_path, launcher, "localhost:2", command=command) as job:
        assert job.process.wait(60) == 0, job.text
        for operation in ("get", "multi_get", "wait"):
            assert f"lost: {operation} a rank of this generation has exited" in job.text
        assert "went on 1" in job.text


DIES = """
import os, signal
from hvdtrain.job.elastic_world import enter

enter(60)
if os.environ["HOROVOD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
enter(60)
"""


def test_more_changes_than_the_reset_limit(tmp_path: Path) -> None:
    options = ("--min-np", "1", "--reset-limit", "0")
    ended = hvdrun(tmp_path, DIES, *options)
    assert ended.code == 4, ended.output
    assert "on localhost was killed by SIGKILL, after --reset-limit 0 changes" in ended.output


def test_a_rank_that_has_lost_its_place_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(elastic_world.WORKER, "a:1")
    monkeypatch.setattr(elastic_world._Asked, "count", 0)
    removed = ",".join("-1" for _ in elastic_world.NUMBERS).encode()
    monkeypatch.setattr(elastic_world, "request", lambda path, timeout_s: removed)
    before = dict(os.environ)
    with pytest.raises(RemovedFromJob, match="a:1 is no longer part of the job"):
        elastic_world.enter(60)
    assert dict(os.environ) == before


def test_too_few_hosts(tmp_path: Path) -> None:
    options = ("--min-np", "3", "--elastic-timeout", "0.5")
    for asked in ((), ("-np", "2")):  # the first world, too, has --min-np ranks
        few = hvdrun(tmp_path, "import time; time.sleep(60)", *options, *asked)
        assert few.code == 4, few.output
        assert "0 ranks are ready, fewer than 3 (--min-np)" in few.output, few.output


@pytest.mark.exhaustive
def test_a_host_without_an_address_is_put_aside(tmp_path: Path) -> None:
    """MPI operator's script can list a pod before its name resolves."""
    hosts = "echo localhost:1; echo no-such-host.invalid:1"
    done = hvdrun(tmp_path, "import time; time.sleep(2); print('done')", hosts=hosts)
    assert (done.code, len(done.lines(">:done"))) == (0, 1), done.output
    said = "no-such-host.invalid does not resolve yet; it gets no new ranks for 10 s"
    assert len(done.lines(said)) == 1, done.output


def test_more_ranks_needed_than_allowed(tmp_path: Path) -> None:
    refused = hvdrun(tmp_path, "", "--min-np", "3", "--max-np", "2")
    assert refused.code == 2, refused.output
    assert "error: --max-np 2 is less than the 3 ranks of --min-np" in refused.output


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("exit 3", "exit 3 ended with code 3: it printed no error"),
        ("echo why >&2; false", "ended with code 1: why"),
        ("echo a:b:c d", "printed 'a:b:c d'"),
    ],
)
def test_a_script_that_fails_at_once(tmp_path: Path, hosts: str, said: str) -> None:
    failed = hvdrun(tmp_path, "", hosts=hosts)
    assert failed.code == 2, failed.output
    assert said in failed.output, failed.output


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)],
)
def test_the_end_of_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text("import time; print('hello'); time.sleep(60)")
    line = [sys.executable, "-m", "hvdtrain", "launch", "--host-discovery-script"]
    line += ["echo localhost:2", str(tmp_path / "script.py")]
    with started(line) as (process, log):
        wait_for(log, "hello", times=2)
        process.send_signal(number)
        code = process.wait(60)
        assert code == (-9 if number == signal.SIGKILL else 128 + number), log.read_text()
        deadline = time.monotonic() + 60
        while left := members(process.marker):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


# Hosts


def discovery(script: Path | str, failures: list[str], found: list[list[Host]]) -> Discovery:
    return Discovery(str(script), 2, found.append, failures.append)


def test_hosts_of_a_script(tmp_path: Path) -> None:
    lines = "a:3", "b", "", "me@c:1", "d:0", "[fd00::1]:4", "fd00::2", "a:3"
    text = tmp_path / "text"
    text.write_text("\n".join(lines))
    found = discovery(f"cat {text}", [], []).find()
    wanted = [("a", 3), ("b", 2), ("me@c", 1), ("fd00::1", 4), ("fd00::2", 2)]
    assert [(host.name, host.slots) for host in found] == wanted
    assert discovery("true", [], []).find() == []


@pytest.mark.exhaustive
def test_the_last_good_answer_stands(tmp_path: Path) -> None:
    text, failures, found = tmp_path / "text", list[str](), list[list[Host]]()
    text.write_text("a:1\n")
    runs = tmp_path / "runs"
    polled = discovery(f"echo run >> {runs}; cat {text}", failures, found)

    def wait_until(is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_true():
            assert time.monotonic() < deadline, (failures, found)
            time.sleep(0.02)

    polled.start()
    text.unlink()
    wait_until(lambda: len(failures) == 1)
    count = len(runs.read_text())
    wait_until(lambda: len(runs.read_text()) >= count + 2 * len("run\n"))  # not reported again
    text.write_text("a:1\nb:2\n")
    wait_until(lambda: len(found) == 2)
    polled.stop()
    assert found == [[Host("a", 1)], [Host("a", 1), Host("b", 2)]]
    assert len(failures) == 1
    assert "No such file" in failures[0]


def test_a_failed_host_is_put_aside_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    failed = FailedHosts(10.0, 50.0)
    times = []
    for _ in range(4):
        times.append(failed.add("a"))
        assert failed.has("a")
        assert not failed.has("b")
        now += 1
        assert failed.add("a") == times[-1] - 1  # ranks that fail together count once
        now += times[-1]
        assert not failed.has("a")
    assert times == [10.0, 20.0, 40.0, 50.0]
    now += 51
    assert failed.add("a") == 10.0


# Security


def test_the_server_wants_the_secret_and_forgets_old_generations() -> None:
    asked: list[RankRequest] = []
    server = ElasticServer(asked.append)

    addresses = itertools.cycle(["127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])])

    def answer(path: str, secret: str, data: bytes | None = None, sent: bytes = b"") -> int:
        """`sent`: another body than the one that the proof is for."""
        url = f"http://{next(addresses)}:{server.port}/{path}"
        method = "PUT" if data else "GET"
        digest = hashlib.sha256(data or b"").hexdigest()
        given = f"7 {digest} {elastic_world.proof(secret, '7', method, path, digest)}"
        headers = {elastic_world.PROOF_HEADER: given}
        request = urllib.request.Request(url, sent or data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        server.begin(1)
        for path in ("rank_and_size/a:0", "hvdtrain/store.1", "hosts/update"):
            assert answer(path, "guess") == answer(path, "", b"x") == 403
        assert asked == []
        assert answer("hvdtrain/store.1", server.secret) == 404
        assert answer("hvdtrain/store.1", server.secret, b"address", b"another") == 400
        assert answer("hvdtrain/store.1", server.secret) == 404
        assert answer("hvdtrain/store.1", server.secret, b"address") == 200
        assert answer("hvdtrain/store.1", server.secret) == 200
        server.is_broken = True
        assert answer("hvdtrain/store.1", server.secret) == 410
        server.begin(2)
        assert answer("hvdtrain/store.1", server.secret, b"of a dead rank") == 410
        assert answer("hvdtrain/store.2", server.secret) == 404
        assert answer("hvdtrain/store.2", server.secret, b"x" * 70_000) == 413
    finally:
        server.stop()


def test_a_rank_believes_its_launcher_only() -> None:
    server = ElasticServer(lambda request: request.reply.put(None))
    try:
        place = "127.0.0.1", str(server.port), server.secret
        assert elastic_world.request("hosts/update", server=place) == b""
        server.update = "7,1"
        assert elastic_world.request("hosts/update", server=place) == b"7,1"
        server.secret = "of another job, at the same port"
        with pytest.raises(OSError, match="403"):
            elastic_world.request("hosts/update", server=place)
    finally:
        server.stop()
    with pytest.raises(OSError, match="is not the launcher of this job"), fake_server() as port:
        elastic_world.request("hosts/update", server=("127.0.0.1", str(port), "secret"))


@contextlib.contextmanager
def fake_server() -> Iterator[int]:
    """Answers each request, without a proof."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"7,1")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            yield server.server_port
        finally:
            thread.join()
