"""The backend `ps` goes on without a lost worker: what that means for data and weights."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from hvdtrain.training import checkpoint
from tests.forkserver import warm
from tests.launching import ROOT, started_ranks
from tests.methods.data_runs import Regression, Stream
from tests.runs import records, run_json

LOST_AT = 3
"""The step in which the worker ends."""


class Counted(Regression):
    """The gradient is 1 for any sample: a step by its mean takes exactly 1 from the parameter."""

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        return Stream(self.num), None

    def loss(self, net: nn.Module, batch: Any) -> Any:
        self.seen.append(batch[1].tolist())
        if os.environ["RANK"] == "1" and len(self.seen) == LOST_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return net(torch.ones(len(batch[1]), 1, dtype=torch.float64)).mean()


@pytest.mark.parametrize(
    ("uneven", "steps"), [("join", 6), pytest.param("drop", 5, marks=pytest.mark.exhaustive)]
)
def test_a_stream_goes_on(uneven: str, steps: int, tmp_path: Path) -> None:
    """5 steps of 2 samples of each of 3 ranks; the 4 that are left are 2, 1 and 1."""
    task = tmp_path / "mine.py"
    task.write_text(
        "from tests.methods.test_lost_worker import Counted\n"
        "class Mine(Counted):\n    def __init__(self): super().__init__(34)\n"
    )
    command = warm([sys.executable, "-m", "hvdtrain", "--backend", "ps", "--task", f"{task}:Mine"])
    command += ["--run-dir", str(tmp_path / "run"), "--uneven", uneven, "--timeout", "30"]
    command += "--epochs 1 --batch-size 2 --precision fp64 --log-every 1".split()
    shared = {"LOCAL_WORLD_SIZE": "3", "PYTHONPATH": str(ROOT)}
    with started_ranks([command] * 3, **shared) as ranks:
        codes = [process.wait(60) for process, _ in ranks]
        texts = [log.read_text() for _, log in ranks]
    assert codes == [0, -signal.SIGKILL, 0], texts
    assert run_json(tmp_path / "run")["backend"]["lost_ranks"]
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r][-1] == steps
    (*_, last) = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoint.load(last, "model")["weight"].item() == pytest.approx(-steps, rel=1e-12)
