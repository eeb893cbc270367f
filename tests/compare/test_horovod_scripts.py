"""Scripts as Horovod's users build them: real Horovod against `-m hvdtrain.hvd`, and against DDP.

They are started as `hvdtrain compare` starts commands, and their first steps are held against each
other; nothing is timed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.compare import probe
from hvdtrain.compare.proof import parity
from hvdtrain.compare.proof.work_trace import trace_of
from hvdtrain.compare.record import ParityRow
from hvdtrain.compare.run.arm_process import ArmProcess
from tests.launching import BIN, ROOT, clean_env

SCRIPTS = Path(__file__).parent / "scripts"
EXACT = {"HVDTRAIN_EXACT_HOROVOD": "1"}
HOROVODRUN = f"{BIN}/horovodrun -np 2 {sys.executable}"
TORCHRUN = f"{BIN}/torchrun --standalone --nproc-per-node 2"
STEPS = 4

pytestmark = [pytest.mark.xdist_group("horovod"), pytest.mark.timeout(240)]


def proved(tmp_path: Path, env: Mapping[str, str], **lines: str) -> dict[str, ParityRow]:
    """The verdicts on commands; the first is the baseline, and is run twice."""
    base, line = next(iter(lines.items()))
    lines["again"] = line
    with ExitStack() as ended:
        arms = {}
        for name, line in lines.items():
            at = tmp_path / f"{name}.socket"
            settings = probe.environment(clean_env(env), at)
            log = tmp_path / f"{name}.log"
            arms[name] = ArmProcess(shlex.split(line), settings, at, log)
            ended.callback(arms[name].end)
        for arm in arms.values():
            arm.meet(150)
            arm.call("open", timeout_s=60)
        traces = {
            name: list(map(trace_of, arm.call("trace", STEPS, timeout_s=60)))
            for name, arm in arms.items()
        }
    rows = parity.compare(traces, base, "again")
    assert {row.arm: row.verdict for row in rows}["again"] == "bitwise", rows
    return {row.arm: row for row in rows if row.arm != "again"}


def script(name: str, tmp_path: Path) -> str:
    """The end of a command: a script and its options."""
    if name == "resume.py":
        write_checkpoint(tmp_path / "checkpoint.pt")
    options = {
        "imagenet.py": f"--checkpoint-format {tmp_path}/{{epoch}}.pt",
        "resume.py": f"--checkpoint {tmp_path}/checkpoint.pt",
    }
    return f"{SCRIPTS / name} {options.get(name, '')}"


def write_checkpoint(path: Path) -> None:
    """Write what an earlier job of resume.py has left."""
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}
    torch.save(state, path)


def both(name: str, tmp_path: Path) -> dict[str, str]:
    """The commands of a script under real Horovod and under hvdtrain.hvd."""
    end = script(name, tmp_path)
    return {"real": f"{HOROVODRUN} {end}", "ours": f"{TORCHRUN} -m hvdtrain.hvd {end}"}


EXHAUSTIVE = pytest.mark.exhaustive
SLOW = [EXHAUSTIVE, pytest.mark.slow]


@pytest.mark.parametrize(
    "name",
    [
        "mnist.py",
        pytest.param("synthetic.py", marks=SLOW),
        pytest.param("imagenet.py", marks=EXHAUSTIVE),
        pytest.param("resume.py", marks=EXHAUSTIVE),
        pytest.param("accumulation.py", marks=SLOW),
        pytest.param("amp.py", marks=SLOW),
        pytest.param("gan.py", marks=EXHAUSTIVE),
        pytest.param("elastic.py", marks=SLOW),
        # The line of the manual, docs/from-horovod.md.
        pytest.param(str(ROOT / "examples/horovod_script.py"), marks=SLOW, id="example"),
    ],
)
def test_a_script_trains_the_same_under_both(tmp_path: Path, name: str) -> None:
    (row,) = proved(tmp_path, EXACT, **both(name, tmp_path)).values()
    assert (row.verdict, row.note) == ("bitwise", ""), row


@EXHAUSTIVE
def test_batch_norm_under_horovod_and_ddp(tmp_path: Path) -> None:
    """DDP overwrites the buffers of all ranks but the first; Horovod does not."""
    end = script("synthetic.py", tmp_path)
    lines = {"real": f"{HOROVODRUN} {end}", "ddp": f"{TORCHRUN} {SCRIPTS}/port_of_synthetic.py"}
    (row,) = proved(tmp_path, {}, **lines).values()
    assert row.verdict == "bitwise", row
    assert "rank 0's" in row.note


@EXHAUSTIVE
def test_the_step_on_zeros_is_named(tmp_path: Path) -> None:
    """Real Horovod decays weights before the first step; neither DDP nor hvdtrain.hvd does."""
    lines = both("accumulation.py", tmp_path)
    lines["ddp"] = f"{TORCHRUN} {SCRIPTS}/port_of_accumulation.py"
    for row in proved(tmp_path, {}, **lines).values():
        assert row.verdict == "unequal"
        assert "step before the first, on gradients of zeros" in (row.cause or "")
        assert "decayed the weights" in (row.cause or "")


@EXHAUSTIVE
def test_accumulation_under_hvdtrain_and_ddp(tmp_path: Path) -> None:
    lines = {
        "ours": both("accumulation.py", tmp_path)["ours"],
        "ddp": f"{TORCHRUN} {SCRIPTS}/port_of_accumulation.py",
    }
    (row,) = proved(tmp_path, {}, **lines).values()
    assert row.verdict == "bitwise", row
