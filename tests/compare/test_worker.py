"""What runs in the ranks of an arm: every step counts, and the proof leaves no trace in figures."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hvdtrain.compare.run.arm_script import LOOPS, describe_data
from hvdtrain.compare.run.no_communication import NoCommunication
from torch import Tensor, nn

from hvdtrain import Backend, TrainConfig
from hvdtrain.backends import load
from hvdtrain.cli.compare import command
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.probe.hvdtrain_probe import norm, sample, stride
from hvdtrain.compare.proof.work_trace import RankTrace
from hvdtrain.compare.record import Record
from hvdtrain.compare.run import arm_process
from hvdtrain.compare.run.arm_pool import ARM_SCRIPT, ArmPool, without_launcher
from hvdtrain.compare.run.arm_process import ArmFailed, ArmProcess
from hvdtrain.compare.run.arms import LAUNCHERS, choose_device, parse
from hvdtrain.errors import InputError
from hvdtrain.system import cores
from hvdtrain.tasks.digits import Digits
from hvdtrain.tasks.mlp import MLP
from tests import ranks as live
from tests.compare.prove import record_trace
from tests.launching import clean_env

OPTIONS = {name for option in command.params for name in option.opts}
CLEAR_REFS = Path("/proc/self/clear_refs")
resets_peak = pytest.mark.skipif(
    not os.access(CLEAR_REFS, os.W_OK), reason=f"{CLEAR_REFS} cannot be written here"
)


def advised(text: str) -> set[str]:
    """The options that an error tells the user of."""
    return set(re.findall(r"--[a-z-]+[a-z]", text))


@contextmanager
def worker(task: str, *settings: str) -> Iterator[ArmProcess]:
    """A live rank alone, with the task open."""
    command = [sys.executable, *ARM_SCRIPT]
    config = {"task": task, "set": settings, "batch_size": 8, "device": "cpu", "threads": 1}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-test-") as folder:
        at, log = Path(folder) / "socket", Path(folder) / "log"
        env = without_launcher(os.environ)
        made = ArmProcess([*command, str(at)], 1, env, at, log, has_launcher=False)
        try:
            made.meet(60)
            made.call("open", "single", "trainer", {**config, "epochs": 1000}, True, 1)
            yield made
        finally:
            made.end()


@pytest.mark.exhaustive
@pytest.mark.parametrize("per_host", [1, 2])
def test_cores_are_divided_into_threads_before_a_rank_is_bound(
    tmp_path: Path, per_host: int
) -> None:
    """On another host, whose cores the comparison does not know: it gives no number of threads."""
    cores = len(os.sched_getaffinity(0))
    line = [part.format(ranks=2) for part in LAUNCHERS["torchrun"]]
    config = {"task": "digits", "device": "cpu", "transport": "gloo", "threads": None}
    at = tmp_path / "at"
    made = ArmProcess([*line, *ARM_SCRIPT, str(at)], 2, clean_env(), at, tmp_path / "log")
    try:
        made.meet(60)
        facts = made.call("open", "ddp", "trainer", config, True, per_host)
    finally:
        made.end()
    assert [rank["threads"] for rank in facts] == [max(1, cores // per_host)] * 2
    assert [len(rank["affinity"]) for rank in facts] == [max(1, cores // 2)] * 2


@pytest.mark.parametrize(
    ("threads", "count", "own"),
    [
        # Four physical cores, whose second hardware threads are 4 to 7, as Linux numbers them.
        (range(8), 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (range(8), 3, [[0, 4], [1, 5], [2, 6]]),
        (range(8), 6, [[0], [1], [2], [3], [4], [5]]),
        ([0, 1, 4, 5], 2, [[0, 4], [1, 5]]),
        ([0, 1], 3, [[0], [1], [0]]),
    ],
)
def test_ranks_share_no_physical_core_as_long_as_there_are_enough(
    threads: Sequence[int], count: int, own: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_siblings", lambda core: str(core % 4))
    assert [cores.share_of_cores(rank, count, threads) for rank in range(count)] == own


def test_with_hosts_each_rank_divides_the_cores_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "64")
    for options, threads, per_host in (
        (CompareOptions(hosts="a:4,b:2", ranks=(1, 6)), None, 4),
        (CompareOptions(hosts="a:4,b:2", ranks=(6,), threads=3), 3, 4),
        (CompareOptions(ranks=(1, 2), threads=3), 3, 2),
        (CompareOptions(ranks=(1, 2)), max(1, len(os.sched_getaffinity(0)) // 2), 2),
    ):
        assert options.threads_of(1) == options.training(1)["threads"] == threads
        assert options.ranks_of_a_host(1) == per_host
        arm = parse("ddp/gloo", options.ranks[-1], False, options.hosts_of(options.ranks[-1]))
        pool = ArmPool([arm], options, Record({}, []), cast("Any", None), Path())
        pool._sockets = tmp_path
        env = pool._environment(arm)
        given = {env.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        assert given == {None if threads is None else str(threads)}


def test_the_device_is_chosen_for_a_reason() -> None:
    assert choose_device("auto", 2, 2) == ("cuda", "a GPU for each rank")
    assert choose_device("auto", 0, 2) == ("cpu", "no GPU that torch can use")
    assert choose_device("auto", 1, 2) == ("cpu", "2 ranks need as many GPUs, and there are 1")
    assert choose_device("cpu", 8, 2) == ("cpu", "as requested")


@pytest.mark.exhaustive
def test_a_failure_names_its_rank() -> None:
    with pytest.raises(ArmFailed, match="^rank 0: AttributeError: "), worker("digits") as rank:
        rank.call("pigeon")


JOIN = """
import os, pickle, sys, time
from multiprocessing.connection import Client

def join(rank):
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    connection = Client(sys.argv[-1], "AF_UNIX")
    connection.send_bytes(pickle.dumps((rank, 2, os.getpid(), "")))
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
    at = tmp_path / "socket"
    command = [sys.executable, "-c", JOIN + TWO_RANKS, how, str(at)]
    made = ArmProcess(command, 2, os.environ, at, tmp_path / "log")
    look = made._has_ended

    def ends_during_the_look(rank: int, deadline: float = 0.0) -> bool:
        os.kill(made.pids[1], signal.SIGKILL)
        return look(rank, deadline)

    if how != "at once":
        monkeypatch.setattr(made, "_has_ended", ends_during_the_look)
    try:
        made.meet(20)
        made.begin("window")
        if how == "at once":
            assert made._connections[0].poll(20), "rank 0 did not fail"  # after rank 1 has ended
        with pytest.raises(ArmFailed, match="^rank 1 ended during 'window'"):
            made.finish(20)
    finally:
        made.end(gently=False)


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
        pytest.param("mpirun", "code", "code 9", marks=pytest.mark.exhaustive),
        pytest.param("horovodrun", "code", "code 9", marks=pytest.mark.exhaustive),
        pytest.param("mpirun", "signal", "signal 9", marks=pytest.mark.exhaustive),
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
    at = tmp_path / "at"
    command = [*line, *python, str(script), how, str(at)]
    made = ArmProcess(command, 2, clean_env(), at, tmp_path / "log")
    try:
        made.meet(40)
        made.begin("window")
        made.process.wait(60)
        with pytest.raises(ArmFailed, match=f"^rank 1 ended, with {said}, during 'window': "):
            made.finish(20)
    finally:
        made.end(gently=False)


@pytest.mark.parametrize(
    ("has_launcher", "number"), [(True, signal.SIGTERM), (False, signal.SIGKILL)]
)
def test_the_kernel_ends_a_launcher_with_the_comparison(
    tmp_path: Path, has_launcher: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call between fork and exec, where nothing may be loaded."""
    code = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n))"
    line = [sys.executable, "-c", f"{code}; print(n.value)"]  # 2: PR_GET_PDEATHSIG

    def load(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("ctypes.CDLL", load)
    made = ArmProcess(line, 1, os.environ, tmp_path / "at", tmp_path / "log", has_launcher)
    made.process.wait(60)
    made.end()
    assert int((tmp_path / "log").read_text()) == number


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
    at, log = tmp_path / "socket", tmp_path / "log"
    made = ArmProcess([sys.executable, "-c", SLOW_TRACKER], 1, os.environ, at, log)
    made.process.wait(60)
    tracker, *names = log.read_text().split()
    semaphores = [Path("/dev/shm", f"sem.{name.removeprefix('/')}") for name in names]
    assert all(path.exists() for path in semaphores)

    def wait_and_let_it_go_on(seconds: float) -> None:
        os.kill(int(tracker), signal.SIGCONT)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=wait_and_let_it_go_on)
    monkeypatch.setattr(arm_process, "time", clock)
    made.end()
    assert not [path for path in semaphores if path.exists()]


LARGE_START = """
import torch
from hvdtrain.tasks.mlp import MLP

class LargeStart(MLP):
    def model(self):
        freed = [torch.ones(6 << 20) for _ in range(16)]
        self.kept = torch.ones(1 << 20)  # behind them: freeing alone does not give them back
        return super().model()
"""


@resets_peak
@pytest.mark.exhaustive
def test_peak_memory_is_not_that_of_the_start(tmp_path: Path) -> None:
    """Of 384 MiB, far more than what luck adds to the steps."""
    task = tmp_path / "large_start.py"
    task.write_text(LARGE_START)
    with worker(f"{task}:LargeStart", "width=2048", "depth=3") as rank:
        rank.call("trace", 2)
        (traced,) = rank.call("peak_mib")
        rank.call("time_steps", 2, 0)
        (steps,) = rank.call("peak_mib")
    assert 100 < steps < traced - 200


def test_what_is_said_of_the_data() -> None:
    digits = "real: 8x8 images of handwritten digits, from scikit-learn; 1437 samples"
    assert describe_data(Digits(), 1437) == digits
    assert describe_data(Spare(), 2).endswith("; 2 samples")


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


KINDS = ["contiguous", "transposed", "channels last"]


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
    [
        ("contiguous", torch.float32),
        ("transposed", torch.float64),
        ("channels last", torch.bfloat16),
    ],
)
def test_the_norm_is_that_of_all_elements(kind: str, dtype: torch.dtype) -> None:
    grad = stored(kind, 1024).to(dtype)
    before, found = grad.clone(), norm([grad])
    assert found == pytest.approx(float(grad.double().square().sum().sqrt()), rel=1e-13)
    assert norm([grad]) == found
    assert torch.equal(grad, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_in_the_order_of_the_elements(kind: str) -> None:
    tensors = [stored(kind, 64), torch.zeros(()).expand(2, 3), torch.tensor(2.0)]
    found = torch.from_numpy(sample(tensors, 7))
    assert torch.equal(found, torch.cat([t.reshape(-1)[::7].double() for t in tensors]))


# The same options, and the same errors, in all loops


class Spare(MLP):
    """A model with a layer that it does not use, and an optimizer that decays its weights."""

    def __init__(self) -> None:
        super().__init__(width=16, depth=1, samples=64, lr=0.01, optimizer="adamw")

    def model(self) -> nn.Module:
        return HasSpare(super().model())


class HasSpare(nn.Module):
    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used = used
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.used(x))


def prove(opened: Backend, /, loop: str, backend: str, **changes: Any) -> RankTrace:
    """Runs on live ranks, on the opened backend's process group."""
    config = TrainConfig(seed=3, threads=1, epochs=2, **{"batch_size": 8, **changes})
    options = replace(opened.options, unused_parameters=config.backend_options().unused_parameters)
    made_backend = load(backend)(opened.world, options)
    made_backend.open()
    made = LOOPS[loop](Spare(), made_backend, config)
    made.set_up(record=False)
    return record_trace(made, made.steps(), 6)


ARMS = [
    ("trainer", "ddp"),
    ("by hand", "ddp"),
    ("trainer", f"{NoCommunication.__module__}:NoCommunication"),
]
TWO = pytest.mark.parametrize("ranks", [("ddp-gloo", 2)], indirect=True)


@TWO
@pytest.mark.parametrize(
    ("changes", "text", "advice"),
    [
        # Not an endless loop over epochs of nothing.
        ({"batch_size": 33}, "is larger than the training data, 64 samples", "--uneven"),
        ({}, "2 parameters got no gradient: spare.weight, spare.bias", "--unused-parameters"),
    ],
    ids=["too few samples", "unused parameters"],
)
def test_an_error_is_the_same_in_every_loop(
    ranks: live.Ranks, changes: dict[str, Any], text: str, advice: str
) -> None:
    found = [ranks.outcomes(prove, *arm, **changes)[0] for arm in ARMS]
    assert all(isinstance(f, live.Raised) and f.kind == InputError.__name__ for f in found)
    said = {f.text for f in found}
    assert len(said) == 1
    assert text in min(said)
    assert advised(min(said)) == {advice} <= OPTIONS


@TWO
@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_every_loop_gives_unused_parameters_zeros_and_pads(ranks: live.Ranks, uneven: str) -> None:
    changes: dict[str, Any] = {
        "unused_parameters": "zero",
        "uneven": uneven,
        "accumulate": 2,
        "batch_size": 5,
    }
    trainer, by_hand, alone = (ranks.run(prove, *arm, **changes) for arm in ARMS)
    for one, other in zip(trainer, by_hand, strict=True):
        assert [step.samples for step in one.steps] == [step.samples for step in other.steps]
        assert one.final_sha256 == other.final_sha256 != one.initial_sha256
    sizes = [step.gradient_bytes for found in (trainer, by_hand, alone) for step in found[0].steps]
    assert len(set(sizes)) == 1  # the zeros are among them


def test_options_reach_the_training_of_all_arms() -> None:
    options = CompareOptions(unused_parameters="zero", uneven="pad")
    config = TrainConfig(**options.training(2))
    assert (config.unused_parameters, config.uneven) == ("zero", "pad")
    with pytest.raises(InputError, match="--uneven 'odd' is not one of: drop, pad"):
        CompareOptions(uneven="odd").check()
    with pytest.raises(InputError, match="--uneven join: a comparison needs steps of equal size"):
        CompareOptions(uneven="join").check()
