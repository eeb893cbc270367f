"""Scripts as Horovod's users build them: real Horovod against `-m hvdtrain.hvd`, and against DDP.

They are started as `hvdtrain compare` starts commands, and their first steps are held against each
other; nothing is timed.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.compare.proof import parity
from hvdtrain.compare.proof.work_trace import trace_of
from hvdtrain.compare.record import ParityRow
from tests.compare.running import running
from tests.environments import rows
from tests.launching import BIN, ROOT, run, succeed

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
    with ExitStack() as stack:
        arms = {
            name: stack.enter_context(running(tmp_path / f"run of {name}", shlex.split(line), env))
            for name, line in lines.items()
        }
        for arm in arms.values():
            arm.meet(250)
            arm.call("open", timeout_s=60)
        traces = {
            name: list(map(trace_of, arm.call("trace", STEPS, timeout_s=60)))
            for name, arm in arms.items()
        }
    found = {row.arm: row for row in parity.compare(traces, base, "again")}
    assert found.pop("again").verdict == "bitwise", found
    return found


# The end of a command; {arm} is a folder of each arm's own.
ENDS = rows("""
    mnist | --epochs 1000
    synthetic | --num-iters 1000 | slow
    imagenet | --epochs 1000 --batches-per-allreduce 2 --checkpoint-format {arm}/{{epoch}}.pt | rest
    resume | --checkpoint {arm}/checkpoint.pt | slow
    nlp | --accumulate 2 --batches 1000 | slow
    nlp | --amp --sgd --batches 1000 | slow
    gan | 1000 | rest
    elastic | | slow
    ../../examples/horovod_script | | slow
""")


def both(name: str, end: str, tmp_path: Path) -> dict[str, str]:
    """Return the commands of a script under real Horovod and under hvdtrain.hvd."""
    lines = {}
    for arm, start in {"real": HOROVODRUN, "ours": f"{TORCHRUN} -m hvdtrain.hvd"}.items():
        folder = tmp_path / arm
        folder.mkdir()
        if name == "resume":
            write_checkpoint(folder / "checkpoint.pt")
        lines[arm] = f"{start} {SCRIPTS / name}.py {end.format(arm=folder)}"
    return lines


def write_checkpoint(path: Path) -> None:
    """Write what an earlier job of resume.py has left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}
    torch.save(state, path)


@pytest.mark.parametrize(("name", "end"), ENDS)
def test_a_script_trains_the_same_under_both(tmp_path: Path, name: str, end: str) -> None:
    """The example is the one of docs/from-horovod.md."""
    (row,) = proved(tmp_path, EXACT, **both(name, end, tmp_path)).values()
    assert (row.verdict, row.note) == ("bitwise", ""), row


@pytest.mark.exhaustive
def test_batch_norm_under_horovod_and_ddp(tmp_path: Path) -> None:
    """DDP overwrites the buffers of all ranks but the first; Horovod does not."""
    real = both("synthetic", "--num-iters 1000", tmp_path)["real"]
    ddp = f"{TORCHRUN} {PORTS}/port_of_synthetic.py"
    (row,) = proved(tmp_path, {}, real=real, ddp=ddp).values()
    assert row.verdict == "bitwise", row
    assert "buffers of rank 0" in row.note


@pytest.mark.exhaustive
def test_accumulation_and_the_step_on_zeros(tmp_path: Path) -> None:
    """Real Horovod decays weights before the first step; neither DDP nor hvdtrain.hvd does."""
    lines = both("nlp", "--accumulate 2 --batches 1000", tmp_path)
    ddp = f"{TORCHRUN} {PORTS}/port_of_nlp.py"
    found = proved(tmp_path, {}, ours=lines["ours"], real=lines["real"], ddp=ddp)
    assert found["ddp"].verdict == "bitwise", found
    assert found["real"].verdict == "unequal"
    assert "step on gradients of zeros before the first step" in (found["real"].cause or "")
    assert "decayed the weights" in (found["real"].cause or "")


@pytest.mark.exhaustive
def test_the_comparison_of_the_readme(tmp_path: Path) -> None:
    """Its command as it stands there, without taking the time."""
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall("^hvdtrain (compare .*horovodrun.*)", text, re.MULTILINE)
    line = [sys.executable, "-m", "hvdtrain", *shlex.split(command), "--prove-only"]
    done = run([*line, "--output", tmp_path / "out"], cwd=ROOT, timeout=250)
    assert "✓ both trained the same" in succeed(done)
