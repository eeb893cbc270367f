"""`hvdtrain compare` as its user runs it: real launchers, from the command to the report."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from hvdtrain.cli.compare import _make_folder, command
from hvdtrain.compare import record
from hvdtrain.compare.compare_options import CompareOptions, share, steps_in_sync
from hvdtrain.compare.run.arms import choose_arms, parse
from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig
from tests.compare.records import summary_of
from tests.forkserver import warm
from tests.launching import Finished, members, run, started
from tests.messages import Message

COMPARE = [sys.executable, "-m", "hvdtrain", "compare"]
QUICK = ["--blocks", "6", "--steps", "5", "--proof-steps", "4", "--max-foreign", "100%"]

pytestmark = pytest.mark.timeout(300)


def compare(
    folder: Path, *line: str, code: int = 0, env: dict[str, str] | None = None
) -> tuple[Finished, dict[str, Any]]:
    done = run(warm([*COMPARE, "--output", folder, *line]), timeout=280, env=env)
    assert done.code == code, done.output
    path = folder / record.NAME
    if not path.exists():
        return done, {}
    record.read(folder)
    # JSON has no NaN and no Infinity.
    return done, json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "more", [(), pytest.param(("horovod/mpi", "horovod/gloo"), marks=pytest.mark.exhaustive)]
)
def test_from_the_command_to_the_report(tmp_path: Path, more: tuple[str, ...]) -> None:
    arms = ",".join(["ddp/gloo", "compat/shm", *more])
    done, found = compare(tmp_path / "out", "--arms", arms, *QUICK)
    config = found["config"]
    assert f"device   {config['device']} ({config['device_reason']})" in done.output
    rows = found["arms"]
    assert [row["role"] for row in rows.values()].count("arm") == 1 + len(more)
    assert {row["role"] for row in rows.values()} == {
        "arm",
        "baseline",
        "again",
        "by hand",
        "ceiling",
    }
    assert {row["status"] for row in rows.values()} == {"measured"}, done.output
    launchers = {name: row["command"].split()[0] for name, row in rows.items()}
    if more:
        assert launchers["horovod/mpi"] == "mpirun"
        assert launchers["horovod/gloo"] == "horovodrun"
    assert launchers["ddp/gloo"] == launchers["no communication"] == "torchrun"
    proved = {row["arm"]: row["verdict"] for row in found["parity"]}
    assert proved.pop("no communication") == "not compared"
    assert set(proved.values()) == {"bitwise"}, found["parity"]
    [ends] = found["ends"]
    assert ends.pop("ddp/gloo")[0] > 50
    assert set(ends) == set(rows) - {"ddp/gloo", "no communication"}
    assert len({tuple(end) for end in ends.values()}) == 1, ends  # and so it stayed
    assert len(found["accounts"]["ddp/gloo"]) == 2
    assert found["config"]["data"].startswith("real: 8x8 images"), found["config"]
    for block in found["blocks"]:
        assert set(block["arms"]) == set(rows)
        for window in block["arms"].values():
            assert [len(rank) for rank in window["step_ms"]] == [5, 5]
    assert len(found["blocks"]) == 6
    orders = {tuple(block["arms"]) for block in found["blocks"]}
    assert len(orders) > 1  # random, not one after the other
    # What was in force, in the workers, is the same for all.
    wanted = ("threads", "interop_threads", "affinity")
    forces = [[[rank[n] for n in wanted] for rank in row["in_force"]] for row in rows.values()]
    assert all(force == forces[0] for force in forces)
    num_cores = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [(rank[0], len(rank[2])) for rank in forces[0]] == [(num_cores, num_cores)] * 2
    cores = [rank[2] for rank in forces[0]]
    assert not set(cores[0]) & set(cores[1])
    assert found["outcome"] == "finished"
    # Of the libraries, which all ranks of all arms share, a rank has a small part only.
    peaks = [row["peak_mib"][0] for row in rows.values()]
    assert 20 < min(peaks) <= max(peaks) < 2000
    summary = summary_of(found)
    assert summary["verdict"]["equal"] is True, summary["verdict"]
    assert len(summary["sentences"]) == 3 + len(more)
    for sentence in summary["sentences"]:
        assert sentence in " ".join(done.output.split()), done.output
    assert (tmp_path / "out" / "report.html").exists()
    again = run(warm([sys.executable, "-m", "hvdtrain", "report", tmp_path / "out"]))
    assert again.code == 0, again.output
    assert "bitwise equal" in again.output


@pytest.mark.exhaustive
def test_a_method_of_one_arm_is_declared_and_timed_by_whole_periods(tmp_path: Path) -> None:
    local, half = "ddp/gloo+sync-every=4", "ddp/gloo+compression=fp16"
    line = ["--arms", f"ddp/gloo,{local},{half}", *QUICK]
    done, found = compare(tmp_path / "out", *line)
    proved = {row["arm"]: row for row in found["parity"]}
    for name, option in ((local, "--sync-every 4"), (half, "--compression fp16")):
        assert proved[name]["verdict"] == "other method"
        assert f"has {option} (ddp/gloo: " in proved[name]["text"]
        assert found["arms"][name]["status"] == "measured", found["arms"][name]
        assert f"{name} has {option}" in done.output
    assert proved["by hand (gloo)"]["verdict"] == "bitwise"
    verdict = summary_of(found)["verdict"]
    assert verdict["equal"] is True
    assert f"by another method, as asked: {local}, {half}" in verdict["text"]
    assert f"<b>{half}</b> has --compression fp16" in (tmp_path / "out/report.html").read_text()
    assert found["arms"][local]["period"] == 4
    assert found["arms"][local]["options"] == {"sync_every": 4}
    # Its ranks have the same parameters at the end: it has gone on to the next average.
    assert found["ends"][0][local][0] % 4 == 0
    medians = {row["arm"]: row["step_ms"] for row in summary_of(found)["speed"]}
    blocks = [block["arms"][local]["step_ms"] for block in found["blocks"]]
    whole = [max(statistics.mean(rank[:4]) for rank in ranks) for ranks in blocks]
    assert medians[local] == pytest.approx(statistics.median(whole))


@pytest.mark.exhaustive
def test_a_method_of_all_arms_is_proved_as_ever(tmp_path: Path) -> None:
    line = ["--arms", "ddp/gloo,compat/shm", "--sync-every", "3", "--local-warmup", "2", *QUICK]
    _, found = compare(tmp_path / "out", *line)
    proved = {row["arm"]: row["verdict"] for row in found["parity"]}
    assert proved["compat/shm"] == proved["ddp/gloo (repeat)"] == "bitwise"
    assert proved["by hand (gloo)"] == "other method"
    assert found["config"]["proof_steps"] == 5  # QUICK's 4, and on to the average after 2 + 3
    assert found["arms"]["no communication"]["options"]["sync_every"] == 0
    names = dict(summary_of(found)["environment"])
    assert names["training method"] == "sync_every=3, local_warmup=2"


def test_the_options_of_an_arm() -> None:
    made = parse(" ddp/gloo + compression=fp16 + precision=bf16 ", 2, False)
    assert made.name == "ddp/gloo+precision=bf16+compression=fp16"
    assert made.options == {"precision": "bf16", "compression": "fp16"}
    assert parse("ddp+sync-bn", 2, False).name == "ddp/shm+sync-bn"
    # Of the usual arms, those that cannot have the method are left out, with the reason.
    options = CompareOptions(compression="bf16")
    arms, left_out = choose_arms(options, 2)
    assert "ddp/gloo" in [arm.name for arm in arms]
    why = dict(left_out)
    assert all("compresses to fp16 only" in why[f"horovod/{name}"] for name in ("mpi", "gloo"))
    hand, alone = (next(arm for arm in arms if arm.role == role) for role in ("by hand", "ceiling"))
    assert hand.config(options).compression == alone.config(options).compression == "none"
    # Its precision they have, as the ranks compute in it; the loop by hand has no half weights.
    base = CompareOptions(arms=("ddp/gloo+precision=bf16+opt-level=O2+sync-bn",))
    arms, _ = choose_arms(base, 2)
    again, hand, alone = arms[-3:]
    assert again.options == arms[0].options
    assert (alone.config(base).precision, alone.config(base).opt_level) == ("bf16", "O2")
    assert (hand.config(base).precision, hand.config(base).opt_level) == ("bf16", "none")


def test_the_proof_ends_at_an_average() -> None:
    config = TrainConfig(sync_every=4, local_warmup=3)
    assert [steps_in_sync(n, config) for n in (2, 3, 4, 7, 8, 11)] == [2, 3, 7, 7, 11, 11]
    assert steps_in_sync(5, TrainConfig()) == 5


# All of them, and on live ranks: test_parity.py.
FAULTS = {"ScalesLr": "learning rate", "ClipsFirst": "clipped before"}


@pytest.mark.exhaustive
def test_unequal_and_failing_arms_say_why_and_the_others_go_on(tmp_path: Path) -> None:
    faults = {f"tests.compare.faulty:{name}/gloo": cause for name, cause in FAULTS.items()}
    dies, raises = "tests.compare.failing:Dies/gloo", "tests.compare.failing:Raises/gloo"
    drifts = "tests.compare.failing:Drifts/gloo"
    arms = ",".join(["ddp/gloo", *faults, dies, raises, drifts, "no.such:Thing"])
    line = ["--arms", arms, "--clip-norm", "0.5", *QUICK]
    done, found = compare(tmp_path / "out", *line, code=1)
    refused = ", ".join([*faults, drifts])
    text = f"not the same training as the baseline: {refused} (see "
    assert text in done.output
    rows = found["arms"]
    for name, cause in faults.items():
        assert rows[name]["status"] == "refused", rows[name]
        assert cause in rows[name]["reason"]
        assert not any(name in block["arms"] for block in found["blocks"])
    assert summary_of(found)["verdict"]["equal"] is False
    assert rows[drifts]["status"] == "refused"
    assert "steps its parameters differed from ddp/gloo's" in rows[drifts]["reason"]
    reasons = {name: row["reason"] for name, row in rows.items() if row["status"] == "failed"}
    assert set(reasons) == {dies, raises, "no.such:Thing/shm"}
    assert "rank 1 ended, with code 9, during 'time_steps'" in reasons[dies]
    assert "ChildFailedError" not in reasons[dies]
    assert "RuntimeError: on purpose" in reasons[raises]
    assert "cannot load the backend" in reasons["no.such:Thing/shm"]
    said = " ".join(done.output.split())
    for reason in (*faults.values(), "on purpose", "rank 1 ended"):
        assert reason in said, said
    for name in ("ddp/gloo", "ddp/gloo (repeat)", "by hand (gloo)", "no communication"):
        assert rows[name]["status"] == "measured"
    assert len(found["blocks"]) == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "status", "why"),
    [
        ("Raises", "failed", "on purpose"),
        ("Parts", "refused", "its ranks had different parameters"),
    ],
)
def test_a_baseline_that_is_lost_ends_it(tmp_path: Path, fault: str, status: str, why: str) -> None:
    """Raises: at once. Parts: seen at the end only, of its duplicate as well."""
    baseline = f"tests.compare.failing:{fault}/gloo"
    temporary = tmp_path / ("temporary-" * 9)  # too long for a socket's path
    temporary.mkdir()
    line = ["--arms", f"{baseline},ddp/gloo", *QUICK]
    done, found = compare(tmp_path / "out", *line, code=1, env={"TMPDIR": str(temporary)})
    rows = found["arms"]
    assert rows[baseline]["status"] == status
    assert why in rows[baseline]["reason"]
    assert f"cannot be compared: its baseline {baseline} {status}" in rows["ddp/gloo"]["reason"]
    assert f"nothing could be compared; {baseline}" in done.output
    assert "as fast as" not in done.output
    assert "Traceback" not in done.output


def _until_blocks(folder: Path, blocks: int, log: Path) -> None:
    path = folder / record.NAME
    deadline = time.monotonic() + 200
    while not path.exists() or len(json.loads(path.read_text())["blocks"]) < blocks:
        assert time.monotonic() < deadline, f"no {blocks} blocks in 200 s:\n{log.read_text()}"
        time.sleep(0.1)


def _until_all_have_ended(marker: str) -> None:
    deadline = time.monotonic() + 60
    while left := members(marker):
        assert time.monotonic() < deadline, f"processes of the comparison stayed: {left}"
        time.sleep(0.05)


ENDLESS: Sequence[str] = ["--arms", "ddp/gloo,compat/shm", "--budget", "1h", "--target-ci", "0.1%"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "outcome"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_stopped_early_it_leaves_a_valid_report_and_nothing_else(
    tmp_path: Path, number: signal.Signals, outcome: str
) -> None:
    out = tmp_path / "out"
    with started([*COMPARE, "--output", out, *ENDLESS]) as (process, log):
        _until_blocks(out, 1, log)
        os.kill(process.pid, number)
        code = process.wait(60)
        assert code == 128 + number, log.read_text()
        _until_all_have_ended(process.marker)
        said = log.read_text()
    found = record.read(out)
    assert found.outcome == outcome
    assert "blocks" in (found.note or "")
    assert outcome in (out / "report.html").read_text()
    assert "compat/shm" in said
    assert "Traceback" not in said, said


@pytest.mark.exhaustive
def test_killed_it_takes_its_ranks_along(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # With ranks that have no launcher, and launchers of one rank.
    with started([*COMPARE, "--output", out, *ENDLESS, "-np", "1,2"]) as (process, log):
        _until_blocks(out, 1, log)
        process.kill()
        process.wait()
        _until_all_have_ended(process.marker)
    record.read(out)  # what was written is whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_world_sizes(tmp_path: Path, kind: str) -> None:
    line = ["--arms", "ddp/shm", "-np", "1,2", "--scaling", kind, *QUICK]
    _, found = compare(tmp_path / "out", *line)
    samples = {key: row["samples_per_step"] for key, row in found["arms"].items()}
    assert samples["ddp/shm x1"] == samples["single x1"] == 32
    assert samples["ddp/shm x2"] == (64 if kind == "weak" else 32)
    rows = summary_of(found)["scaling"]
    assert {row["base_kind"] for row in rows} == {"same arm", "single"}
    assert all(row["kind"] == kind and row["efficiency"] > 0 for row in rows)


WRONG = [
    "--arms ddp/pigeon",
    "--arms pigeon",
    "--arms ,",
    "--arms ddp/gloo+pigeon",
    "--arms ddp/gloo+sync-bn+sync-bn",
    "--arms ddp/gloo+sync-bn=yes",
    "--arms ddp/gloo+compression",
    "--arms ddp/gloo+sync-every=often",
    "--arms ddp/gloo+compression=zip",
    "--arms horovod/mpi+compression=bf16",
    "--arms ddp/shm+sync-bn+sync-every=4",
    "--arms ddp/shm+sync-every=8 --steps 5",
    "--arms horovod/mpi --compression powersgd",
    "--arms ddp/shm,ddp",
    "--baseline horovod/mpi --arms ddp/gloo",
    "--budget soon",
    "--target-ci 2",
    "--max-foreign 101%",
    "-np two",
    "-np 0",
    "-np 2,3 --scaling strong --batch-size 5",
    "--blocks 3",
    "--output tests",
]


@pytest.mark.parametrize("line", WRONG)
def test_bad_input(line: str, message: Message) -> None:
    """tests/test_cli.py shows that such an error ends a command with 2 and one line."""
    with pytest.raises((InputError, click.UsageError)) as caught:
        command.main(line.split(), standalone_mode=False)
    assert isinstance(caught.value, InputError | click.UsageError)
    assert caught.value.exit_code == 2
    message(caught.value)


def test_all_of_the_cores_is_a_share() -> None:
    assert share("100%") == 1
    with pytest.raises(InputError, match="'1' is not a share"):
        share("1")  # which may be meant as 1 %


def test_a_folder_is_one_comparisons_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        options = CompareOptions(output=name)
        assert _make_folder(options) == Path(name)
        with pytest.raises(InputError, match=f"--output {name} is not empty"):
            _make_folder(options)  # told the same at the same time
    named_by_time = {_make_folder(CompareOptions()) for _ in range(5)}
    assert len(named_by_time) == 5


@pytest.mark.exhaustive
def test_a_task_that_cannot_be_used_is_said_once(tmp_path: Path) -> None:
    done, _ = compare(tmp_path / "out", "--task", "pigeon", "--arms", "ddp/gloo", *QUICK, code=1)
    assert done.output.splitlines()[-1].count("unknown task 'pigeon'") == 1
