"""kill -9 of a whole job at random moments: nothing is lost, and the result is the same."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from hvdtrain.training import checkpoint
from tests.forkserver import warm
from tests.launching import kill, run, started

# Saving takes longer than a step here, so most kills hit a checkpoint being written.
LINE = (
    "torchrun --nproc-per-node 2 -m hvdtrain --backend ddp --task mlp --set width=128 "
    "--set samples=4096 --epochs 4 --checkpoint-every 1 --log-every 1 --timeout 30"
).split()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
@pytest.mark.parametrize("kills_wanted", [20])
def test_kills(tmp_path: Path, kills_wanted: int) -> None:
    whole = tmp_path / "whole"
    assert run(warm([*LINE, "--run-dir", whole]), timeout=100).code == 0
    expected = json.loads((whole / "run.json").read_text())["params_sha256"]
    chance = random.Random(5)
    kills, job, attempts = 0, 0, 0
    while kills < kills_wanted:
        run_dir = tmp_path / f"job-{job}"
        if _kill_in_training(run_dir, chance.uniform(0, 1.5)):
            kills, attempts = kills + 1, attempts + 1
            if checkpoint.list_checkpoints(run_dir / "checkpoints"):
                newest, _ = checkpoint.newest(run_dir / "checkpoints")
                assert newest is not None, "a killed run left no valid checkpoint"
        else:
            attempts = 10
        if kills == kills_wanted or attempts >= 10:
            _finish(run_dir, expected)
            job, attempts = job + 1, 0


def _kill_in_training(run_dir: Path, after_s: float) -> bool:
    """Start or resume the job, and kill it some time after it has begun. False if it has ended."""
    resume = "auto" if run_dir.exists() else "none"
    with started(warm([*LINE, "--run-dir", run_dir, "--resume", resume])) as (process, log):
        deadline = time.monotonic() + 60
        while "run      " not in log.read_text() and process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        time.sleep(after_s)
        kill(process.marker)
        code = process.wait()
        assert code in (0, -signal.SIGKILL), log.read_text()
    outcome = json.loads((run_dir / "run.json").read_text())["outcome"]
    assert outcome in ("running", "finished")  # killed, it cannot say more than the former
    return bool(outcome == "running")


def _finish(run_dir: Path, expected: str) -> None:
    finished = run(warm([*LINE, "--run-dir", run_dir, "--resume", "auto"]), timeout=100)
    assert finished.code == 0, finished.output
    about = json.loads((run_dir / "run.json").read_text())
    assert about["params_sha256"] == expected
    assert about["outcome"] == "finished"
    assert "killed" in [attempt["outcome"] for attempt in about["attempts"]]
    left = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert all(name.startswith("step-") for name in left), left
