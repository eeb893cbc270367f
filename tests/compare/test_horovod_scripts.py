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

SCRIPTS = ROOT / "tests/horovod_scripts"
PORTS = Path(__file__).parent / "scripts"
EXACT = {"HVDTRAIN_EXACT_HOROVOD": "1"}
HOROVODRUN = f"{BIN}/horovodrun -np 2 {sys.executable}"
TORCHRUN = f"{BIN}/torchrun --standalone --nproc-per-node 2"
STEPS = 4

pytestmark = [pytest.mark.xdist_group("horovod"), pytest.mark.timeout(400)]


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
            arm.meet(250)
            arm.call("open", timeout_s=60)
        traces = {
            name: list(map(trace_of, arm.call("trace", STEPS, timeout_s=60)))
            for name, arm in arms.items()
        }
    rows = parity.compare(traces, base, "again")
    assert {row.arm: row.verdict for row in rows}["again"] == "bitwise", rows
    return {row.arm: row for row in rows if row.arm != "again"}


# The end of a command; {arm} is a folder of each arm's own.
ENDS = {
    "mnist": "--epochs 1000",
    "synthetic": "--num-iters 1000",
    "imagenet": "--epochs 1000 --batches-per-allreduce 2 --checkpoint-format {arm}/{{epoch}}.pt",
    "resume": "--checkpoint {arm}/checkpoint.pt",
    "nlp --accumulate": "--accumulate 2 --batches 1000",
    "nlp --amp": "--amp --sgd --batches 1000",
    "gan": "1000",
    "elastic": "",
    "../../examples/horovod_script": "",  # the line of docs/from-horovod.md
}


def both(name: str, tmp_path: Path) -> dict[str, str]:
    """Return the commands of a script under real Horovod and under hvdtrain.hvd."""
    lines = {}
    for arm, start in {"real": HOROVODRUN, "ours": f"{TORCHRUN} -m hvdtrain.hvd"}.items():
        folder = tmp_path / arm
        folder.mkdir()
        if name == "resume":
            write_checkpoint(folder / "checkpoint.pt")
        end = ENDS[name].format(arm=folder)
        lines[arm] = f"{start} {SCRIPTS / name.split()[0]}.py {end}"
    return lines


def write_checkpoint(path: Path) -> None:
    """Write what an earlier job of resume.py has left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}
    torch.save(state, path)


EXHAUSTIVE = pytest.mark.exhaustive
SLOW = [EXHAUSTIVE, pytest.mark.slow]


@pytest.mark.parametrize(
    "name",
    [
        "mnist",
        pytest.param("synthetic", marks=SLOW),
        pytest.param("imagenet", marks=EXHAUSTIVE),
        pytest.param("resume", marks=SLOW),
        pytest.param("nlp --accumulate", marks=SLOW),
        pytest.param("nlp --amp", marks=SLOW),
        pytest.param("gan", marks=EXHAUSTIVE),
        pytest.param("elastic", marks=SLOW),
        pytest.param("../../examples/horovod_script", marks=SLOW, id="example"),
    ],
)
def test_a_script_trains_the_same_under_both(tmp_path: Path, name: str) -> None:
    (row,) = proved(tmp_path, EXACT, **both(name, tmp_path)).values()
    assert (row.verdict, row.note) == ("bitwise", ""), row


@EXHAUSTIVE
def test_batch_norm_under_horovod_and_ddp(tmp_path: Path) -> None:
    """DDP overwrites the buffers of all ranks but the first; Horovod does not."""
    real = both("synthetic", tmp_path)["real"]
    ddp = f"{TORCHRUN} {PORTS}/port_of_synthetic.py --num-iters 1000"
    (row,) = proved(tmp_path, {}, real=real, ddp=ddp).values()
    assert row.verdict == "bitwise", row
    assert "rank 0's" in row.note


@EXHAUSTIVE
def test_accumulation_and_the_step_on_zeros(tmp_path: Path) -> None:
    """Real Horovod decays weights before the first step; neither DDP nor hvdtrain.hvd does."""
    lines = both("nlp --accumulate", tmp_path)
    ddp = f"{TORCHRUN} {PORTS}/port_of_nlp.py"
    rows = proved(tmp_path, {}, ours=lines["ours"], real=lines["real"], ddp=ddp)
    assert rows["ddp"].verdict == "bitwise", rows
    assert rows["real"].verdict == "unequal"
    assert "step before the first, on gradients of zeros" in (rows["real"].cause or "")
    assert "decayed the weights" in (rows["real"].cause or "")
