"""Restarts by torchrun and hvdrun, and by hand: the run goes on in its own directory.

It ends with the same bits.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import play, summary
from hvdtrain.errors import LaunchError
from hvdtrain.job.world import RESTART_VARIABLE, hvdrun_restart
from tests.environments import EXHAUSTIVE
from tests.forkserver import warm
from tests.launch.dying import STEPS
from tests.launching import run, succeed
from tests.runs import records, run_json

DYING = f"{Path(__file__).with_name('dying.py')}:Dying"
TORCHRUN = "torchrun --nproc-per-node 2 --max-restarts 3"
HVDRUN = f"{sys.executable} -m hvdtrain launch -np 2 --max-restarts 3"
OPTIONS = (
    "--global-batch-size 32 --epochs 3 --checkpoint-every 5 --keep 9 "
    "--log-every 1 --threads 1 --timeout 30"
)


def training(folder: Path, deaths: str) -> list[str]:
    """Return the arguments of Python for a training whose ranks die."""
    task = ["--task", DYING, "--set", f"folder={folder}", "--set", f"deaths={deaths}"]
    words = ["-m", "hvdtrain", "--backend", "ddp", *OPTIONS.split(), *task]
    return [*words, "--run-dir", str(folder / "run")]


def line(launcher: str, folder: Path, deaths: str, *more: object) -> list[str]:
    words = [*training(folder, deaths), *map(str, more)]
    if launcher == HVDRUN:  # its processes inherit pipes, which those of a fork server do not
        return [*launcher.split(), *warm([sys.executable, *words])]
    return warm([*launcher.split(), *words])


def resumed(output: str) -> list[str]:
    """Return what the ranks print of what they continue from, without the folders."""
    found = re.findall(r"resume   ((?:from|no checkpoint).*)", output)
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
    succeed(run(line(TORCHRUN, folder, ""), cwd=folder))
    check_steps(folder / "run")
    assert run_json(folder / "run")["restarts"] == 0
    return str(run_json(folder / "run")["params_sha256"])


def test_torchrun(undisturbed: str, tmp_path: Path) -> None:
    """Before a checkpoint, after it, and by an exception."""
    output = succeed(run(line(TORCHRUN, tmp_path, "1:3,0:12,1:4!"), cwd=tmp_path))
    again = "from step-00000010, step 10"
    assert resumed(output) == ["no checkpoint in checkpoints; starting afresh", again, again]
    run_dir = tmp_path / "run"
    found = run_json(run_dir)
    assert (found["params_sha256"], found["restarts"]) == (undisturbed, 3)
    assert [each["outcome"] for each in found["attempts"]][1] == "killed"
    check_steps(run_dir)


def test_without_a_run_directory(tmp_path: Path) -> None:
    *words, option, _ = line(TORCHRUN, tmp_path, "1:12")
    assert option == "--run-dir"
    output = succeed(run(words, cwd=tmp_path))
    said = r"restart  WARNING: TRAINING STARTS AGAIN FROM STEP 0.*with --run-dir DIR it continues"
    assert len(re.findall(said, output)) == 1, output


@EXHAUSTIVE
def test_hvdrun(undisturbed: str, tmp_path: Path) -> None:
    """Ranks die before they train, and after a checkpoint."""
    who = "on localhost was killed by SIGKILL"
    deaths = ["0:0", "1:12"]
    finished = run(line(HVDRUN, tmp_path, ",".join(deaths)), cwd=tmp_path)
    again = ["no checkpoint in checkpoints; starting afresh", "from step-00000010, step 10"]
    assert resumed(succeed(finished)) == again
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
    succeed(run(line(TORCHRUN, tmp_path, "", "--run-dir", tmp_path / "first")))
    expected = run_json(tmp_path / "first")["params_sha256"]
    before = tmp_path / "before"
    (tmp_path / "first" / "checkpoints" / "step-00000015").rename(before)
    more = ["--resume", before, "--run-dir", tmp_path / "second"]
    output = succeed(run(line(TORCHRUN, tmp_path, "1:0,0:2,1:6", *more)))
    # The first ranks load nothing: one dies while it makes the model.
    again = "from before, step 15"
    assert resumed(output) == [again, again, "from step-00000020, step 20"]
    assert run_json(tmp_path / "second")["params_sha256"] == expected


def test_horovod_scripts_are_told(tmp_path: Path) -> None:
    """An `hvd.elastic` script has lost its commits after a restart, and one line says so."""
    script = tmp_path / "script.py"
    script.write_text(ELASTIC)
    output = succeed(run(warm([*TORCHRUN.split(), script])))
    said = r"the launcher restarted all ranks \(restart 1\): earlier commits are lost.*"
    assert len(re.findall(f"{said}write the state to a file", output)) == 1, output


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
    with pytest.raises(LaunchError, match="was not set by hvdrun; unset it"):
        hvdrun_restart({RESTART_VARIABLE: "[1]"})
    assert hvdrun_restart({}) is None


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_random_faults(tmp_path: Path) -> None:
    """Under real launchers: see benchmarks/chaos.py, whose rounds this plays."""
    results = tmp_path / "chaos.jsonl"
    bad = play(seed=16, first=0, rounds=25, real_share=0.0, results=results)
    assert bad == 0, summary(results)
