"""What earlier releases have written is read: each folder of tests/released has a run of one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from hvdtrain.training import checkpoint
from tests.forkserver import warm
from tests.launching import ROOT, run, succeed

RELEASES = sorted(path.name for path in (ROOT / "tests" / "released").iterdir())
TRAIN = [sys.executable, "-m", "hvdtrain"]
OPTIONS = "--task task.py:Old --epochs 4 --batch-size 16 --threads 1".split()


@pytest.mark.parametrize("release", RELEASES)
def test_a_run_of_an_earlier_release_goes_on(release: str, tmp_path: Path) -> None:
    """From its checkpoint after half the epochs to the weights of a whole run of today."""
    folder = tmp_path / "old"
    shutil.copytree(ROOT / "tests" / "released" / release, folder)
    for arguments in (["--run-dir", "run", "--resume", "must"], ["--run-dir", "whole"]):
        succeed(run(warm([*TRAIN, *OPTIONS, *arguments]), cwd=folder))
    weights = []
    for name in ("run", "whole"):
        last = checkpoint.list_checkpoints(folder / name / "checkpoints")[-1]
        assert last.name == "step-00000032"
        weights.append(torch.load(last / "model.pt"))
    torch.testing.assert_close(weights[0], weights[1])
    shown = succeed(run(warm([*TRAIN, "runs", "run"]), cwd=folder))
    assert "finished" in shown
