"""Restarts by torchrun and hvdrun: the run goes on in its own directory, to the same bits."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.job.world import RESTART_VARIABLE, hvdrun_restart
from tests.forkserver import warm
from tests.launch.dying import STEPS
from tests.launch.test_failure import EXHAUSTIVE
from tests.launching import Finished, run
from tests.runs import records, run_json

DYING = f"{Path(__file__).with_name('dying.py')}:Dying"
HVDRUN = ["-m", "hvdtrain", "launch", "--max-restarts", "3"]
LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node 2 --max-restarts 3",
    "hvdrun": " ".join([sys.executable, *HVDRUN, "-np", "2"]),
}
OPTIONS = (
    "--global-batch-size 32 --epochs 3 --checkpoint-every 5 --keep 9 "
    "--log-every 1 --threads 1 --timeout 30"
)


def line(
    launcher: str, folder: Path, deaths: str, *more: object, backend: str = "ddp"
) -> list[str]:
    task = ["--task", DYING, "--set", f"folder={folder}", "--set", f"deaths={deaths}"]
    words = ["-m", "hvdtrain", "--backend", backend, *OPTIONS.split(), *task]
    words += ["--run-dir", str(folder / "run"), *map(str, more)]
    if launcher == "hvdrun":  # its processes inherit pipes, which those of a fork server do not
        return [*LAUNCHERS[launcher].split(), *warm([sys.executable, *words])]
    return warm([*LAUNCHERS[launcher].split(), *words])


def resumed(finished: Finished) -> list[str]:
    """Return what the ranks print of what they continue from, without the folders."""
    found = re.findall(r"resume   ((?:from|no checkpoint).*)", finished.output)
    return [re.sub(r"\S*/", "", text) for text in found]


def check_steps(run_dir: Path) -> None:
    """metrics.jsonl has each step once, and the evaluation of each epoch."""
    found = records(run_dir)
    trained = [record["step"] for record in found if "loss" in record]
    evaluated = [record["step"] for record in found if "eval_loss" in record]
    assert trained == [*range(1, 3 * STEPS + 1)]
    assert evaluated == [STEPS, 2 * STEPS, 3 * STEPS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(line("torchrun", folder, ""), cwd=folder).code == 0
    check_steps(folder / "run")
    assert run_json(folder / "run")["restarts"] == 0
    return str(run_json(folder / "run")["params_sha256"])


def test_torchrun(undisturbed: str, tmp_path: Path) -> None:
    """Before a checkpoint, after it, and by an exception."""
    finished = run(line("torchrun", tmp_path, "1:3,0:12,1:4!"), cwd=tmp_path)
    assert finished.code == 0, finished.output
    again = "from step-00000010, step 10"
    assert resumed(finished) == ["no checkpoint in checkpoints; starting afresh", again, again]
    run_dir = tmp_path / "run"
    found = run_json(run_dir)
    assert (found["params_sha256"], found["restarts"]) == (undisturbed, 3)
    assert [each["outcome"] for each in found["attempts"]][1] == "killed"
    check_steps(run_dir)


def test_without_a_run_directory(tmp_path: Path) -> None:
    words = line("torchrun", tmp_path, "1:12")
    words = [*words[: words.index("--run-dir")], *words[words.index("--run-dir") + 2 :]]
    finished = run(words, cwd=tmp_path)
    assert finished.code == 0, finished.output
    (said,) = finished.lines("restart  WARNING: TRAINING STARTS AGAIN FROM STEP 0")
    assert "with --run-dir DIR it continues" in said


@EXHAUSTIVE
@pytest.mark.parametrize("dies_early", [False, True])
def test_hvdrun(dies_early: bool, undisturbed: str, tmp_path: Path) -> None:
    who = "on localhost was killed by SIGKILL"
    deaths = ["0:0", "1:12"] if dies_early else ["1:12"]
    finished = run(line("hvdrun", tmp_path, ",".join(deaths)), cwd=tmp_path, timeout=120)
    assert finished.code == 0, finished.output
    first = ["no checkpoint in checkpoints; starting afresh"] if dies_early else []
    assert resumed(finished) == [*first, "from step-00000010, step 10"]
    assert finished.lines("all ranks start again") == [
        f"restart {number} of 3: rank {death[0]} {who}; all ranks start again"
        for number, death in enumerate(deaths, 1)
    ]
    found = run_json(tmp_path / "run")
    assert (found["params_sha256"], found["restarts"]) == (undisturbed, 1)
    check_steps(tmp_path / "run")


@EXHAUSTIVE
def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    """`--resume DIR` counts until the run has a checkpoint of its own."""
    first = run(line("torchrun", tmp_path, "", "--run-dir", tmp_path / "first"))
    assert first.code == 0, first.output
    expected = run_json(tmp_path / "first")["params_sha256"]
    before = tmp_path / "before"
    (tmp_path / "first" / "checkpoints" / "step-00000015").rename(before)
    more = ["--resume", before, "--run-dir", tmp_path / "second"]
    finished = run(line("torchrun", tmp_path, "1:0,0:2,1:6", *more))
    assert finished.code == 0, finished.output
    # The first ranks load nothing: one dies while it makes the model.
    again = "from before, step 15"
    assert resumed(finished) == [again, again, "from step-00000020, step 20"]
    assert run_json(tmp_path / "second")["params_sha256"] == expected


def test_horovod_scripts_are_told(tmp_path: Path) -> None:
    """An `hvd.elastic` script has lost its commits after a restart, and one line says so."""
    script = tmp_path / "script.py"
    script.write_text(ELASTIC)
    finished = run(warm([*LAUNCHERS["torchrun"].split(), script]))
    assert finished.code == 0, finished.output
    (said,) = finished.lines("all ranks again (restart 1): the commits of those before are lost")
    assert "write the state to a file" in said


ELASTIC = """
import os, signal
import hvdtrain.hvd as hvd
import hvdtrain.hvd.elastic

@hvd.elastic.run
def train(state):
    state.commit()
    if hvd.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

hvd.init()
train(hvd.elastic.TorchState(batch=0))
"""


def test_a_variable_that_hvdrun_has_not_set() -> None:
    with pytest.raises(LaunchError, match="is not what hvdrun sets; unset it"):
        hvdrun_restart({RESTART_VARIABLE: "[1]"})
    assert hvdrun_restart({}) is None
