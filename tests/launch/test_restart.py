"""Restarts by torchrun and hvdrun: the run goes on in its own directory, to the same bits."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.job.world import RESTART_VARIABLE, hvdrun_restart
from tests.forkserver import warm
from tests.launch.dying import STEPS
from tests.launch.test_failure import EXHAUSTIVE
from tests.launching import Finished, run, started, wait_for
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
    words = ["-m", "hvdtrain", "--backend", backend, *OPTIONS.split(), *task, *map(str, more)]
    if launcher == "hvdrun":  # its processes inherit pipes, which those of a fork server do not
        return [*LAUNCHERS[launcher].split(), *warm([sys.executable, *words])]
    return warm([*LAUNCHERS[launcher].split(), *words])


def only_run(folder: Path) -> Path:
    (path,) = (folder / "runs").iterdir()
    return path


def restarts(finished: Finished) -> list[str]:
    """Return what the ranks print of their restarts, without the paths."""
    found = re.findall(r"restart  (.*)", finished.output)
    return [re.sub(r"\S*/(checkpoints|before)", r"\1", text) for text in found]


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
    check_steps(only_run(folder))
    assert run_json(only_run(folder))["restarts"] == 0
    return str(run_json(only_run(folder))["params_sha256"])


def test_torchrun(undisturbed: str, tmp_path: Path) -> None:
    """Before a checkpoint, after it, and by an exception; without a run directory of one's own."""
    finished = run(line("torchrun", tmp_path, "1:3,0:12,1:4!"), cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert restarts(finished) == [
        "1 of 3: starts from step 0: there is no checkpoint in checkpoints yet (rank 1 had died)",
        "2 of 3: continues from checkpoints/step-00000010 (rank 0 had died)",
        "3 of 3: continues from checkpoints/step-00000010 (rank 1: ArithmeticError: as told)",
    ]
    run_dir = only_run(tmp_path)
    found = run_json(run_dir)
    assert (found["params_sha256"], found["restarts"]) == (undisturbed, 3)
    assert [each["outcome"] for each in found["attempts"]][1] == "killed"
    check_steps(run_dir)


@EXHAUSTIVE
def test_hosts_that_come(tmp_path: Path) -> None:
    """A second agent joins: all ranks start again, and TORCHELASTIC_RESTART_COUNT stays 0."""
    with socket.create_server(("localhost", 0)) as server:
        place = f"localhost:{server.getsockname()[1]}"
    agent = "torchrun --nnodes 1:2 --nproc-per-node 1 --local-addr localhost --rdzv-backend c10d"
    agent += f" --rdzv-endpoint {place} --rdzv-conf last_call_timeout=2"
    words = line("torchrun", tmp_path, "0:7+")
    agents = warm([*agent.split(), *words[words.index("-m") :]])
    # Else the second agent waits for an address that the first does not publish again (torch 2.13).
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with started(agents, cwd=tmp_path, env=env) as (first, log):
        wait_for(log, "step 6/")
        with started(agents, cwd=tmp_path, env=env) as (second, other_log):
            wait_for(log, "closing signal SIGTERM")
            (tmp_path / "go").touch()
            output = ""
            for process, its_log in ((first, log), (second, other_log)):
                assert process.wait(60) == 0, log.read_text() + other_log.read_text()
                output += its_log.read_text()
    found = run_json(only_run(tmp_path))
    said = r"restart  after a change of the hosts: continues from \S+ \(SIGTERM at rank 0; saved "
    assert re.search(said, output), output
    assert (found["world"]["size"], found["restarts"]) == (2, 1)
    check_steps(only_run(tmp_path))


@EXHAUSTIVE
@pytest.mark.parametrize("dies_early", [False, True])
def test_hvdrun(dies_early: bool, undisturbed: str, tmp_path: Path) -> None:
    who = "on localhost was killed by SIGKILL"
    deaths = [("1:12", "continues from checkpoints/step-00000010")]
    if dies_early:
        deaths.insert(0, ("0:0", "starts from step 0: no run directory is known"))
    told = ",".join(death for death, _ in deaths)
    finished = run(line("hvdrun", tmp_path, told), cwd=tmp_path, timeout=120)
    assert finished.code == 0, finished.output
    causes = [f"rank {death[0]} {who}" for death, _ in deaths]
    assert restarts(finished) == [
        f"{number} of 3: {text} ({cause})"
        for number, ((_, text), cause) in enumerate(zip(deaths, causes, strict=True), 1)
    ]
    assert finished.lines("all ranks start again") == [
        f"restart {number} of 3: {cause}; all ranks start again"
        for number, cause in enumerate(causes, 1)
    ]
    found = run_json(only_run(tmp_path))
    assert (found["params_sha256"], found["restarts"]) == (undisturbed, 1)
    check_steps(only_run(tmp_path))


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
    again = "starts from before again, as it has no checkpoint yet (rank"
    assert restarts(finished) == [
        f"1 of 3: {again} 1 had died)",
        f"2 of 3: {again} 0 had died)",
        "3 of 3: continues from checkpoints/step-00000020 (rank 1 had died)",
    ]
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
