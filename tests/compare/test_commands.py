"""Commands as arms: the probe takes the steps of scripts that know nothing of it."""

from __future__ import annotations

import functools
import json
import os
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.compare import probe
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.run.arm_process import ArmFailed, ArmProcess
from hvdtrain.compare.run.arms import names_of
from tests.compare.running import running
from tests.environments import rows
from tests.launching import run, wait_until
from tests.messages import Message

SCRIPTS = Path(__file__).parent / "scripts"
ALONE = SCRIPTS / "alone.py"

pytestmark = pytest.mark.timeout(400)


@contextmanager
def probed(
    tmp_path: Path, kind: str, optimizer: int = 1, **env: str
) -> Iterator[tuple[ArmProcess, dict[str, Any]]]:
    """The script alone.py, in one process that has taken its first step, and what it says then."""
    with running(tmp_path, [sys.executable, ALONE, kind], env, optimizer) as made:
        made.meet(60)
        (facts,) = made.call("open")
        yield made, facts


@pytest.mark.parametrize(
    "kind",
    rows("""
    plain
    accumulates
    compiled
    closure | rest
    scaler | rest
    changes folder | rest
    sparse input | rest
    a step raises | rest
    compiled model | slow
    nested | slow
    replaced | slow
    no rate | slow
    compiled loss | slow
    """),
)
def test_a_script_is_measured_as_it_is(tmp_path: Path, kind: str) -> None:
    # Of a loss that is compiled whole nothing is seen.
    samples = {"accumulates": 8, "compiled loss": 0}.get(kind, 4)
    with probed(tmp_path, kind) as (arm, facts):
        assert arm.size == 1
        rate = {"a step raises": [0.001], "no rate": []}.get(kind, [0.01])
        found = facts["describe"]
        assert (facts["samples"], found["parameters"], found["lr"]) == (samples, 22, rate)
        (trace,) = arm.call("trace", 3)
        sizes = [samples] * 3
        if kind == "a step raises":  # the step did not happen: the next has its samples, too
            sizes[1] *= 2
        assert [len(step["samples"]) for step in trace["steps"]] == sizes
        assert [step["micro_batches"] for step in trace["steps"]] == [size // 4 for size in sizes]
        assert all(step["gradient_norm"] > 0 for step in trace["steps"])
        moved = trace["elements"]["final"] - trace["elements"]["initial"]
        if kind != "scaler":  # the first step moves against the gradient of the first sample
            assert (trace["elements"]["gradient"] * moved).sum() < 0
        if kind == "plain":
            assert trace["elements"]["layout"][0][0] == "0.weight"
        if kind in ("plain", "closure"):
            assert trace["local_norm"] > 0
        (times,) = arm.call("time_steps", 5, 2)
        assert len(times["step_ms"]) == 5
        assert len(times["input_ms"]) == (5 if samples else 0)
        assert arm.call("fingerprint")[0][0] == 3 + 7


@pytest.mark.parametrize(("number", "parameters"), [(1, 22), (2, 28)])
def test_the_optimizer_that_is_asked_for(tmp_path: Path, number: int, parameters: int) -> None:
    with probed(tmp_path, "two optimizers", number) as (arm, facts):
        assert facts["describe"]["parameters"] == parameters
        (trace,) = arm.call("trace", 3)
        assert trace["optimizer"] == "SGD, Adam"
        assert len(trace["steps"]) == 3
        assert sum(trace["parameters"].values()) == len(trace["elements"]["gradient"]) == 28
        assert trace["steps"][-1]["lr"] == [0.01, 0.001]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    rows("""
    ends | 1
    fails | 1
    lbfgs | 1 | rest
    no optimizer | 1 | rest
    two optimizers | 3 | rest
    """),
)
def test_a_script_that_cannot_be_measured(
    tmp_path: Path, kind: str, optimizer: int, message: Message
) -> None:
    with message.raises(ArmFailed), probed(tmp_path, kind, optimizer) as (arm, _):
        arm.call("trace", 10)


ALONE_FIRST = """
import os, torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
if dist.get_rank() == 0:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
dist.barrier()
"""


@pytest.mark.exhaustive
def test_an_optimizer_that_one_rank_trains_alone_is_named(tmp_path: Path) -> None:
    script = tmp_path / "alone_first.py"
    script.write_text(ALONE_FIRST)
    said = r"^ranks \[1\] took no .*one of Adam of 5 parameters"
    with running(tmp_path, ["torchrun", "--nproc-per-node", 2, script]) as arm:
        wait_until(lambda: select.select([arm._listener], [], [])[0] != [], "rank 0's step")
        with pytest.raises(ArmFailed, match=said):
            arm.meet(1)


@pytest.mark.exhaustive
def test_the_workers_of_a_loader_are_stopped_too_and_their_time_is_not_foreign(
    tmp_path: Path,
) -> None:
    with probed(tmp_path, "workers") as (arm, _):
        arm.call("trace", 2)
        (pid,) = arm.pids
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert children
        for process in (str(pid), *children):
            wait_until(functools.partial(is_stopped, process), f"the stop of {process}")
        before = arm.cpu_s()
        (times,) = arm.call("time_steps", 20, 0)
        assert arm.cpu_s() - before > times["cpu_s"] + 0.2


def is_stopped(pid: str) -> bool:
    """Return whether a process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_scripts_with_one_fixed_port_run_at_once(tmp_path: Path) -> None:
    """As PyTorch's tutorial has it; arms and the repeat of the baseline run at the same time."""
    lines = [[SCRIPTS / "spawns.py", *url] for url in ([], ["tcp://127.0.0.1:12355"])]
    with ExitStack() as stack:
        arms = [
            stack.enter_context(running(tmp_path / str(i), [sys.executable, *line]))
            for i, line in enumerate(lines)
        ]
        for arm in arms:
            arm.meet(90)
            assert arm.size == 2


def test_a_sitecustomize_of_the_users_own_runs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('my own sitecustomize')")
    with probed(tmp_path, "", PYTHONPATH=str(own)):
        pass
    assert "my own sitecustomize" in (tmp_path / "log").read_text()


def test_without_the_variable_nothing_is_loaded(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(probe.FOLDER)}
    text = "import sys, torch.optim; print('hvdtrain_probe' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def compared(tmp_path: Path, *arguments: object, timeout: float = 350) -> tuple[int, Any, str]:
    """Compare; return the exit code, compare.json and the output."""
    tmp_path.mkdir(exist_ok=True)
    folder = tmp_path / "compared"
    line = [sys.executable, "-m", "hvdtrain", "compare", *map(str, arguments)]
    done = run([*line, "--max-foreign", "100%", "--output", str(folder)], timeout=timeout)
    file = folder / "compare.json"
    return done.code, json.loads(file.read_text()) if file.exists() else {}, done.output


def torchrun(script: str, *arguments: str, ranks: int = 2) -> str:
    """Return the command line of a script under torchrun."""
    line = ["torchrun", "--nproc-per-node", str(ranks), str(SCRIPTS / script), *arguments]
    return shlex.join(line)


SHORT = ("--blocks", "6", "--steps", "5", "--proof-steps", "4")


# The mistakes that people make when they port a script, and a word of the cause that is named.
TWINS = """
    seed: another seed
    order: other samples
    lr: multiplies the learning rate by the number of ranks
    missing average: gradients are not synchronised
    clip before average: clipped before they are synchronised
    half batch: batch size
    dropped layer: a different model:
    bf16: bfloat16
    another optimizer: optimizer
    frozen layer: parameters without a gradient
    sum: the division is missing
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wrong_twins_are_refused_with_their_cause(tmp_path: Path) -> None:
    causes = dict(line.strip().split(": ", 1) for line in TWINS.strip().splitlines())
    named = [
        word for kind in ("right", *causes) for word in ("-n", kind, torchrun("twin.py", kind))
    ]
    code, record, _ = compared(tmp_path, *named, *SHORT, timeout=550)
    assert code == 1
    for kind, words in causes.items():
        arm = record["arms"].pop(kind)
        assert (arm["status"], words in arm["reason"]) == ("refused", True), arm
    assert {arm["status"] for arm in record["arms"].values()} == {"proved"}
    assert not record["blocks"]  # there is nothing to time beside the baseline


@pytest.mark.exhaustive
def test_hvdtrain_is_a_command_like_others(tmp_path: Path) -> None:
    """It refuses unknown variables, of which the probe's is none. Each start has its own run, and
    the arms, of which the first runs twice, their own names and ports.
    """
    line = f"{sys.executable} -m hvdtrain --backend single --epochs 100000"
    named = ("-n", "own", f"{line} --run-dir {tmp_path}/{{arm}}-{{port}}", "-n", "quiet")
    more = ("--prove-only", "--proof-steps", "4")
    code, record, output = compared(tmp_path, *named, f"{line} --quiet --ema 0.999", *more)
    assert code == 0, output
    assert {row["verdict"] for row in record["parity"]} == {"bitwise"}
    assert not record["blocks"]
    again, first = sorted(path.name for path in tmp_path.glob("own*"))
    assert again.startswith("own--repeat--")
    assert first.rpartition("-")[2] != again.rpartition("-")[2]


@pytest.mark.parametrize(
    ("lines", "names"),
    rows("""
    python a.py --lr 0.1 & python a.py --lr 0.2 | --lr 0.1 & --lr 0.2
    srun -n 2 python a.py lr=1 & srun -n 2 python a.py lr=2 | lr=1 & lr=2
    torchrun -np 2 a.py & horovodrun -np 2 python a.py | torchrun & horovodrun
    torchrun --n 2 d.py & horovodrun -np 2 python h.py | torchrun d.py & horovodrun h.py
    horovodrun python a.py & torchrun --n 2 -m b.c a.py | horovodrun & torchrun -m b.c
    /opt/bin/python x/a.py & /opt/bin/python x/b.py | a.py & b.py
    python old/a.py & python new/a.py | old/a.py & new/a.py
    python -m a.b --fused x.py & python -m a.c --fused x.py | -m a.b & -m a.c
    A=1 torchrun a.py & env A=2 torchrun a.py & torchrun a.py | A=1 & A=2 & torchrun a.py
    mpirun a.py & srun a.py & srun a.py --x & srun a.py | mpirun & srun & srun --x & srun (4)
    python -u a.py | python a.py
    """),
)
def test_the_words_that_differ_name_a_command(lines: str, names: str) -> None:
    commands = tuple(lines.split(" & "))
    assert " & ".join(names_of(CompareOptions(commands=commands))) == names
    assert names_of(CompareOptions(commands=commands, names=tuple("wins"))) == [*"wins"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dies", [0, 1])
def test_other_work_is_timed_if_allowed_and_an_arm_may_die(tmp_path: Path, dies: int) -> None:
    line = torchrun("twin.py", "right", ranks=1)
    named = ["-n", "lives", line, *["-n", "dies", f"{line} 30"] * dies]
    named += ["-n", "other", torchrun("twin.py", "seed", ranks=1), "--allow-different"]
    code, record, output = compared(tmp_path, *named, *SHORT)
    assert code == dies, output
    assert "not the same training: other" in output
    assert ("failed: dies (see " in output) == dies
    assert record["arms"]["other"]["status"] == "measured"


def test_commands_that_cannot_run_say_why(tmp_path: Path) -> None:
    named = ["-n", "one", f"{sys.executable} {ALONE} fails", "-n", "two", "python -c 1/0"]
    code, _, output = compared(tmp_path, *named)
    assert code == 1, output
    assert "one: rank 0 ended during 'trace': ValueError: broken" in output
    assert "two: the command took no optimizer step: ZeroDivisionError: division by zero" in output
