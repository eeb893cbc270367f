"""A rank of `--shard-optimizer` is killed in the middle of a step; the run is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.forkserver import warm
from tests.launching import Finished, no_shared_memory_left, run

DYING = f"{Path(__file__).with_name('dying.py')}:DyingInSharedStep"
OPTIONS = "--batch-size 16 --epochs 3 --checkpoint-every 4 --threads 1 --timeout 30"
SHARDED = "--shard-optimizer"


def train(
    size: int, backend: str, folder: Path, run_dir: Path, deaths: str, *more: str
) -> Finished:
    task = ["--task", DYING, "--set", f"folder={folder}", "--set", f"deaths={deaths}"]
    command = ["torchrun", "--nproc-per-node", str(size), "-m", "hvdtrain", "--backend", backend]
    return run(warm([*command, *OPTIONS.split(), *task, "--run-dir", str(run_dir), *more]))


def params_of(run_dir: Path) -> str:
    about = json.loads((run_dir / "run.json").read_text())
    assert about["outcome"] == "finished"
    return str(about["params_sha256"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "size", "rank"),
    [("ddp", 2, 0), ("compat", 3, 1)],
)
def test_kill_9_in_the_step(backend: str, size: int, rank: int, tmp_path: Path) -> None:
    """No checkpoint has the parameters that are partly new, with the option or without."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(size, backend, tmp_path, whole, "").code == 0
    with no_shared_memory_left():
        (tmp_path / "pids").unlink()
        finished = train(size, backend, tmp_path, killed, f"{rank}:10", SHARDED)
        pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == size
    assert not [pid for pid in pids if Path("/proc", pid).exists()], finished.output
    assert finished.code != 0
    assert (tmp_path / "dead-0").exists(), finished.output
    steps = sorted(path.name for path in (killed / "checkpoints").glob("step-*"))
    assert steps == ["step-00000004", "step-00000008"]
    for name, more in (("plain", []), ("sharded", [SHARDED])):
        again = shutil.copytree(killed, tmp_path / name)
        finished = train(size, backend, tmp_path, again, f"{rank}:10", "--resume", "auto", *more)
        assert finished.code == 0, finished.output
        (line,) = finished.lines("resume   from ")
        assert "step-00000008" in line
        assert params_of(again) == params_of(whole)
