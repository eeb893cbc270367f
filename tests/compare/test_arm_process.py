"""The processes of an arm: their cores and threads, who ended first, and what the proof costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.compare import probe
from hvdtrain.compare.probe.hvdtrain_probe import norm, sample, stride
from hvdtrain.compare.run import arm_process
from hvdtrain.compare.run.arm_process import ArmFailed
from hvdtrain.launch.real_launchers import LAUNCHERS
from hvdtrain.system import cores
from tests.compare.running import running
from tests.environments import rows
from tests.launching import clean_env

CLEAR_REFS = Path("/proc/self/clear_refs")
resets_peak = pytest.mark.skipif(
    not os.access(CLEAR_REFS, os.W_OK), reason=f"{CLEAR_REFS} cannot be written here"
)


# What launchers set in each rank of two on a host; torchrun sets the threads as well.
@pytest.mark.parametrize(
    ("launched", "share"),
    rows("""
    LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 OMP_NUM_THREADS=1 | 8
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 | 8
    SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2(x2) | 8
    # Python in a job of eight.
    SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=8 | None
    """),
)
@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3"}], ids=len)
def test_every_launchers_ranks_have_their_share_of_the_cores_as_threads(
    tmp_path: Path, launched: str, share: str, given: dict[str, str]
) -> None:
    """On 16 cores: torchrun alone would say 1. What the user has set stays."""
    base = {name: value for name, value in clean_env().items() if name != "OMP_NUM_THREADS"}
    env = probe.environment({**base, **given}, tmp_path / "at", 0, shares_cores=True)
    env |= {"HVDTRAIN_CORES": "0-15", **given}
    env = {**dict(word.split("=") for word in launched.split()), **env}
    code = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == given.get("OMP_NUM_THREADS", share), done.stderr


def test_ranks_share_cores_only_if_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_cores.py has machines with more."""
    monkeypatch.setattr(cores, "_siblings", str)
    assert [cores.share_of_cores(rank, 3, [0, 1]) for rank in range(3)] == [[0], [1], [0]]


JOIN = """
import os, pickle, sys, time
from multiprocessing.connection import Client

def join(rank):
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    connection = Client(os.environ["HVDTRAIN_PROBE"].split()[-1], "AF_UNIX")
    connection.send_bytes(pickle.dumps((rank, 2, os.getpid(), "", "SGD")))
    connection.recv_bytes()  # it has begun
    return connection
"""

TWO_RANKS = """
rank = 0 if os.fork() else 1
connection = join(rank)
at_once = sys.argv[1] == "at once"
if rank == 0:
    if at_once:
        os.wait()
    connection.send_bytes(pickle.dumps((False, "rank 0: connection closed by peer")))
elif at_once:
    os._exit(9)
time.sleep(600)  # until it is killed
"""


@pytest.mark.parametrize("how", ["at once", "its connection to us last"])
def test_a_rank_that_is_gone_is_why_the_others_fail(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both are heard at once, as on a busy machine, or the others first."""
    monkeypatch.setattr(arm_process, "_CLOSING_S", 50.0)
    monkeypatch.setattr(arm_process, "_EXIT_S", 0.1)  # this launcher does not end by itself
    with running(tmp_path, [sys.executable, "-c", JOIN + TWO_RANKS, how]) as made:
        look = made._has_ended

        def ends_during_the_look(rank: int, deadline: float = 0.0) -> bool:
            os.kill(made.pids[1], signal.SIGKILL)
            return look(rank, deadline)

        made.meet(20)
        made.begin("window")
        if how == "at once":
            assert made._ranks[0].connection.poll(20), "rank 0 did not fail after rank 1 ended"
        else:
            monkeypatch.setattr(made, "_has_ended", ends_during_the_look)
        with pytest.raises(ArmFailed, match="^rank 1 ended during 'window'"):
            made.finish(20)
        monkeypatch.undo()


ENDS = """
names = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))
connection = join(rank)
if rank == 1:
    os.kill(os.getpid(), 9) if sys.argv[1] == "signal" else os._exit(9)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("launcher", "how", "said"),
    [
        ("torchrun", "signal", "code -9"),
        ("mpirun", "code", "code 9"),
        ("horovodrun", "code", "code 9"),
        ("mpirun", "signal", "signal 9"),
    ],
)
@pytest.mark.exhaustive
def test_who_ended_first_is_what_the_launcher_says(
    tmp_path: Path, launcher: str, how: str, said: str
) -> None:
    """By the time that anybody looks it has ended the others, too."""
    script = tmp_path / "ends.py"
    script.write_text(JOIN + ENDS)
    python = [] if launcher == "torchrun" else [sys.executable]
    line = [part.format(ranks=2) for part in LAUNCHERS[launcher]]
    with running(tmp_path, [*line, *python, script, how]) as made:
        made.meet(40)
        made.begin("window")
        made.process.wait(60)
        with pytest.raises(ArmFailed, match=f"^rank 1 ended, with {said}, during 'window': "):
            made.finish(20)


def test_a_port_that_two_arms_want_is_named(tmp_path: Path) -> None:
    code = "raise OSError(98, 'Address already in use')"
    said = r"already in use.*: write \{port\} in the command"
    with running(tmp_path, [sys.executable, "-c", code]) as made:
        with pytest.raises(ArmFailed, match=said):
            made.meet(60)


SLOW_TRACKER = """
import multiprocessing, os, signal
event = multiprocessing.get_context("spawn").Event()
tracker = multiprocessing.resource_tracker._resource_tracker._pid
os.kill(tracker, signal.SIGSTOP)
parts = event._cond._lock, event._cond._sleeping_count, event._cond._woken_count
parts += event._cond._wait_semaphore, event._flag
print(tracker, *(part._semlock.name for part in parts), flush=True)
os._exit(0)
"""


def test_what_removes_a_launchers_semaphores_is_let(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """horovodrun makes some; its resource tracker removes them, at times only after its end."""
    with running(tmp_path, [sys.executable, "-c", SLOW_TRACKER]) as made:
        made.process.wait(60)
        tracker, *names = made.log.read_text().split()
        semaphores = [Path("/dev/shm", f"sem.{name.removeprefix('/')}") for name in names]
        assert all(path.exists() for path in semaphores)

        def wait_and_let_it_go_on(seconds: float) -> None:
            os.kill(int(tracker), signal.SIGCONT)
            time.sleep(seconds)

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=wait_and_let_it_go_on)
        monkeypatch.setattr(arm_process, "time", clock)
    assert not [path for path in semaphores if path.exists()]


LARGE_START = """
import torch
freed = [torch.ones(6 << 20) for _ in range(16)]
kept = torch.ones(1 << 20)  # behind them: freeing alone does not give them back
del freed
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(8, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.exhaustive
@resets_peak
def test_peak_memory_is_not_that_of_the_start(tmp_path: Path) -> None:
    """Of 384 MiB, far more than what luck adds to the steps."""
    (tmp_path / "large.py").write_text(LARGE_START)
    with running(tmp_path, [sys.executable, tmp_path / "large.py"]) as made:
        made.meet(60)
        made.call("open")
        made.call("trace", 2)
        (traced,) = made.call("peak_mib")
        made.call("time_steps", 2, 0)
        (steps,) = made.call("peak_mib")
    assert 20 < steps < traced - 200


# The memory of the proof


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def stored(kind: str, size: int) -> Tensor:
    """Numbers of a tensor of `size` x `size`, in some memory format."""
    numbers = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    if kind == "transposed":
        return numbers.T
    if kind == "channels last":
        images = numbers.reshape(size // 16, 16, 4, size // 4)
        return images.contiguous(memory_format=torch.channels_last)
    return numbers


@pytest.mark.exhaustive
@resets_peak
def test_the_proof_takes_little_memory() -> None:
    """Of 64 MiB of gradients."""
    model = nn.Module()
    model.weight = nn.Parameter(stored("transposed", 4096))
    model.unused = nn.Parameter(torch.zeros(4096, 4096))
    parameters = [model.weight, model.unused]
    every = stride(parameters)
    norm(parameters)  # whatever is made once
    sample(parameters, every)
    CLEAR_REFS.write_text("5")
    before = peak_mib()
    norm(parameters)
    assert peak_mib() - before < 8
    sample(parameters, every)
    assert peak_mib() - before < 16  # of which the sample itself is 2


@pytest.mark.parametrize(
    ("kind", "dtype"),
    rows("contiguous | float32 \n transposed | float64 \n channels last | bfloat16"),
)
def test_norm_and_sample_are_of_the_elements_in_their_order(kind: str, dtype: str) -> None:
    grad = stored(kind, 1024).to(getattr(torch, dtype))
    assert norm([grad]) == pytest.approx(float(grad.double().square().sum().sqrt()), rel=1e-13)
    tensors = [grad, torch.zeros(()).expand(2, 3), torch.tensor(2.0)]
    found = torch.from_numpy(sample(tensors, 7))
    assert torch.equal(found, torch.cat([t.reshape(-1)[::7].double() for t in tensors]))
