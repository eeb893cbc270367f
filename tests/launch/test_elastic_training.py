"""`hvdtrain --elastic`: runs whose world changes, under hvdrun and under real horovodrun."""

from __future__ import annotations

import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import warm
from tests.launch.test_elastic import (
    BOTH_NAMES,
    HVDRUN,
    KEPT_ASIDE,
    Job,
    elastic,
    kill_at_random,
)
from tests.launching import members, run
from tests.runs import records, run_json

FILE = Path(__file__).with_name("elastic_task.py")
TRAIN = [sys.executable, "-m", "hvdtrain", "--elastic", "--task", f"{FILE}:Small"]
TRAIN += ["--callback", f"{FILE}:Count", "--uneven", "join", "--batch-size", "2"]
TRAIN += ["--epochs", "1000", "--log-every", "1", "--timeout", "30", "--threads", "1"]
QUICK = [*HVDRUN, "--min-np", "1", "--blacklist-cooldown-range", "0.1", "1"]


def training(folder: Path, *options: str) -> list[str]:
    """Return the command of a run in the folder, which ends when `Job.finish` says so."""
    finish = ["env", f"FINISH={folder / 'finish'}"]
    return [*finish, *TRAIN, "--run-dir", str(folder / "run"), *options]


def check_training(job: Job) -> dict[str, Any]:
    """Every sample of every epoch has been trained once, but for lost steps; the ranks have equal
    parameters at the end; each step has one record, and each epoch an evaluation and a record of
    the samples. Return run.json.
    """
    epochs = re.findall(r"EPOCH (\d+) missing (\d+) repeated (-?\d+)", job.text)
    # An epoch may end twice: when a rank dies before the commit that follows.
    assert {int(number) for number, *_ in epochs} == set(range(int(epochs[-1][0]) + 1)), job.news
    assert {(missing, repeated) for _, missing, repeated in epochs} == {("0", "0")}, job.text
    ends = re.findall(r"END \d+/(\d+) \d+ (\w+)", job.text)
    assert len(ends) == int(ends[0][0]), job.news
    assert len({state for _, state in ends}) == 1, job.news
    logged = records(job.folder / "run")
    steps = [record["step"] for record in logged if "loss" in record]
    assert steps == list(range(1, steps[-1] + 1))
    evaluated = [record["epoch"] for record in logged if "eval_loss" in record]
    assert evaluated == list(range(1, evaluated[-1] + 1))
    about = run_json(job.folder / "run")
    assert about["outcome"] == "finished"
    assert [seen["epoch"] for seen in about["seen"]] == evaluated
    for world in about["worlds"][1:]:
        said = f"lost {world['lost_steps']} step{'s' * (world['lost_steps'] != 1)} since the commit"
        assert f"{said} at step {world['step']}" in job.text
    return about


def test_ranks_die_and_hosts_come(tmp_path: Path) -> None:
    """2 -> 1 -> 3: the survivor keeps its process, and takes the run directory of a dead rank 0."""
    options = "--backend", "compat", "--commit-every", "4", "--lr-on-resize", "linear"
    command = training(tmp_path, *options)
    with elastic(tmp_path, [*HVDRUN, *KEPT_ASIDE], *BOTH_NAMES, command=command) as job:
        first = job.pids(2)
        job.wait(":step 6/")
        job.kill(first[0])
        assert job.pids(1) == {0: first[1]}
        job.set_hosts("localhost:3")
        assert job.pids(3)[0] == first[1]
        assert job.finish() == 0, job.news
        about = check_training(job)
        assert [world["ranks"] for world in about["worlds"]] == [2, 1, 3]
        assert about["worlds"][1]["step"] >= 4
        assert about["worlds"][1]["lost_steps"] <= 4
        assert about["worlds"][2]["lost_steps"] == 0
        assert "lr       x 0.5: 2 -> 1 rank (--lr-on-resize linear)" in job.text
        rates = [record["lr"] for record in records(tmp_path / "run") if "lr" in record]
        assert list(dict.fromkeys(rates)) == pytest.approx([0.01, 0.005, 0.015])
        assert members(job.process.marker) == {}


@pytest.mark.exhaustive
def test_many_changes_of_hosts(tmp_path: Path) -> None:
    """Each step has a commit, so that worlds end in the middle of epochs and at their ends."""
    options = (
        "--backend",
        "compat",
        "--commit-every",
        "1",
        "--batch-size",
        "10",
        "--checkpoint-every",
        "1000",
    )
    command = training(tmp_path, *options)
    with elastic(tmp_path, QUICK, "localhost:1", command=command) as job:
        job.pids(1)
        for number in range(1, 15):
            job.set_hosts("localhost:2")
            job.pids(2, times=number)
            job.set_hosts("localhost:1")
            job.pids(1, times=number + 1)
        assert job.finish() == 0, job.news
        assert len(check_training(job)["worlds"]) == 29


@pytest.mark.soak
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """On ddp, also while the ranks meet, or join: a step follows within seconds."""
    seed = random.randrange(1000)
    chance = random.Random(seed)
    print("seed", seed)
    launcher = [*HVDRUN, "--min-np", "1", "--blacklist-cooldown-range", "0.3", "0.3"]
    command = training(tmp_path, "--backend", "ddp", "--commit-every", "3")
    with elastic(tmp_path, launcher, "localhost:3", command=command) as job:
        job.pids(3)
        kill_at_random(job, chance, 8, [0.0, 0.1, 0.3, 1.0], ":step ")
        assert job.finish() == 0, job.news
        check_training(job)


@pytest.mark.exhaustive
def test_horovodruns_driver(tmp_path: Path) -> None:
    """Two names of this host are two hosts: horovodrun ends all ranks of a host that loses one."""
    launcher = ["horovodrun", "--min-np", "1", "-np", "2", "--network-interfaces", "lo"]
    launcher += ["--blacklist-cooldown-range", "2", "10"]
    command = training(tmp_path, "--backend", "compat", "--commit-every", "3")
    with elastic(tmp_path, launcher, "localhost:1", "127.0.0.1:1", command=command) as job:
        first = job.pids(2)
        job.kill(first[1])
        assert job.pids(1) == {0: first[0]}
        assert job.pids(2, times=2)[0] == first[0]  # the host is taken again
        assert job.finish() == 0, job.news
        check_training(job)


@pytest.mark.exhaustive
def test_a_preempted_run_goes_on_in_another_job(tmp_path: Path) -> None:
    """SIGTERM to hvdrun: all ranks save after the same step; the next job has another world. The
    backend is auto, and so not real Horovod's.
    """
    command = training(tmp_path, "--resume", "auto")
    with elastic(tmp_path, QUICK, "localhost:2", command=command) as job:
        job.pids(2)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(60) == 143, job.news
        assert "SIGTERM at rank" in job.news
    with elastic(tmp_path, QUICK, "localhost:1", command=command) as job:
        job.pids(1)
        assert job.finish() == 0, job.news
        assert "resume   from " in job.text
        assert "backend  compat " in job.text, job.news
        assert check_training(job)["worlds"][0]["ranks"] == 1


def test_the_world_of_another_launcher_is_fixed(tmp_path: Path) -> None:
    (tmp_path / "finish").touch()
    alone = run(warm(training(tmp_path)))
    assert alone.code == 0, alone.output
    assert "the number of ranks is fixed, as no elastic launcher has started" in alone.output


def test_hvdrun_needs_the_option(tmp_path: Path) -> None:
    line = [*HVDRUN, "--host-discovery-script", "echo localhost:1"]
    refused = run(warm([*line, sys.executable, "-m", "hvdtrain"]))
    assert refused.code == 2, refused.output
    assert "hvdrun has started an elastic job" in refused.output
