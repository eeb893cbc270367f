"""`hvdtrain compare` as its user runs it: named arms on real launchers, from the command to the
report. Commands of the user's own: test_commands.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from hvdtrain.cli.compare import _make_folder
from hvdtrain.compare import record
from hvdtrain.compare.analysis.table import make_table
from hvdtrain.compare.compare_options import CompareOptions, share
from hvdtrain.compare.run.arms import choose
from hvdtrain.errors import InputError
from tests.launching import Finished, members, run, started, wait_until
from tests.messages import Message

COMPARE = [sys.executable, "-m", "hvdtrain", "compare"]
QUICK = ["--blocks", "6", "--steps", "5", "--proof-steps", "4", "--max-foreign", "100%"]

FAULTY = "tests.compare.faulty:"
SLOW = pytest.mark.slow
pytestmark = pytest.mark.timeout(600)


def compare(
    folder: Path, *line: str, code: int = 0, env: dict[str, str] | None = None
) -> tuple[Finished, record.Record]:
    done = run([*COMPARE, "--output", folder, *line], timeout=550, env=env)
    assert done.code == code, done.output
    # JSON has no NaN and no Infinity.
    json.loads((folder / record.NAME).read_text(), parse_constant=pytest.fail)
    return done, record.read(folder)


@pytest.mark.parametrize(
    "more", [(), pytest.param(("horovod/gloo",), marks=pytest.mark.exhaustive)]
)
def test_from_the_command_to_the_report(tmp_path: Path, more: tuple[str, ...]) -> None:
    names = ["ddp/gloo", "compat/shm", *more]
    done, found = compare(tmp_path / "out", "--arms", ",".join(names), *QUICK)
    arms = found.arms
    assert list(arms) == [*names, "ddp/gloo (repeat)"]
    assert {row.status for row in arms.values()} == {"measured"}, done.output
    assert {row.verdict for row in found.parity} == {"bitwise"}, found.parity
    [ends] = found.ends
    assert ends["ddp/gloo"][0] > 50
    assert ends == dict.fromkeys(arms, ends["ddp/gloo"])  # and so it stayed
    times = [block.arms[name] for block in found.blocks for name in arms]
    assert [[len(rank) for rank in t.step_ms] for t in times] == [[5, 5]] * 6 * len(arms)
    # What was in force, in the ranks, is the same for all.
    forces = [[(r.threads, r.affinity) for r in row.in_force] for row in arms.values()]
    assert all(force == forces[0] for force in forces)
    num_cores = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [(threads, len(own)) for threads, own in forces[0]] == [(num_cores, num_cores)] * 2
    # Of the libraries, which all ranks of all arms share, a rank has a small part only.
    assert all(20 < row.peak_mib[0] < 2000 for row in arms.values())
    assert make_table(found).equal
    for text in ("timing: block 1, 6 in all\n", f"report   {tmp_path / 'out'}/report.html\n"):
        assert text in done.output


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=SLOW)])
def test_equal_work_is_accepted(tmp_path: Path, count: int) -> None:
    """Of biases before BatchNorm under Adam, which steps on rounding."""
    line = f"--arms ddp/gloo,compat,horovod/mpi -np {count} --task {FAULTY}Biased --prove-only"
    _, found = compare(tmp_path / "out", *line.split(), *QUICK, *["--train", "--accumulate 2"])
    again, *rows = reversed(found.parity)
    assert again.verdict == "bitwise"
    assert len(rows) == 2
    for row in rows:
        assert row.verdict == ("bitwise" if count == 2 else "within tolerance"), row
        if count == 3:  # rounding, not a fault that slipped through
            assert row.difference is not None
            assert 0 < row.difference < 2e-6 < (row.tolerance or 0)
            assert "rounding errors" in row.text


def test_a_name_stands_for_a_command(message: Message) -> None:
    own = CompareOptions(
        arms=("ddp/gloo", "horovod"),
        task="mlp",
        set=("width=8",),
        ranks=4,
        train="--precision bf16",
        baseline="horovod/mpi",
    )
    arms = choose(own)[0] + choose(CompareOptions(arms=("ddp",), hosts="a:1,b:1"))[0]
    lines = [f"{arm.role} {arm.name}: {' '.join(arm.line)}" for arm in arms]
    message("\n".join(lines), python=sys.executable)


@pytest.mark.exhaustive
def test_arms_that_part_later_or_cannot_start_say_why_and_the_others_go_on(tmp_path: Path) -> None:
    drifts, missing = f"{FAULTY}Drifts/gloo", "no.such:Thing/shm"
    line = ["--arms", f"ddp/gloo,{drifts},no.such:Thing", "--train", "--clip-norm 0.5", *QUICK]
    done, found = compare(tmp_path / "out", *line, code=1)
    assert f"did not train the same as the baseline: {drifts} (see " in done.output
    assert make_table(found).equal is False
    assert "its parameters differed from ddp/gloo's after" in (found.arms[drifts].reason or "")
    assert "cannot load the backend" in (found.arms[missing].reason or "")
    assert {name: row.status for name, row in found.arms.items()} == {
        "ddp/gloo": "measured",
        drifts: "refused",
        missing: "failed",
        "ddp/gloo (repeat)": "measured",
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "status", "why"),
    [
        ("Raises", "failed", "on purpose"),
        pytest.param("Parts", "refused", "its ranks had different parameters", marks=SLOW),
    ],
)
def test_a_baseline_that_is_lost_ends_it(tmp_path: Path, fault: str, status: str, why: str) -> None:
    """Raises: at once. Parts: seen at the end only, of its duplicate as well."""
    baseline = f"{FAULTY}{fault}/gloo"
    temporary = tmp_path / ("temporary-" * 9)  # too long for a socket's path
    temporary.mkdir()
    line = ["--arms", f"{baseline},ddp/gloo", *QUICK]
    done, found = compare(tmp_path / "out", *line, code=1, env={"TMPDIR": str(temporary)})
    assert found.arms[baseline].status == status
    assert why in (found.arms[baseline].reason or "")
    reason = found.arms["ddp/gloo"].reason or ""
    assert f"nothing to compare with: the baseline {baseline} {status}" in reason
    assert f"nothing could be compared; {baseline}" in done.output
    assert "times as fast as" not in done.output
    assert "Traceback" not in done.output


def _has_a_block(folder: Path) -> bool:
    path = folder / record.NAME
    return path.exists() and bool(json.loads(path.read_text())["blocks"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (signal.SIGINT, "interrupted"),
        pytest.param(signal.SIGTERM, "terminated", marks=SLOW),
        (signal.SIGKILL, "running"),
    ],
)
def test_stopped_early_it_leaves_a_valid_record_and_no_process(
    tmp_path: Path, number: signal.Signals, outcome: str
) -> None:
    """Of a command without a launcher, too: its only rank is stopped."""
    out, train = tmp_path / "out", "-m hvdtrain train --quiet --epochs 1000000"
    commands = [f"{sys.executable} {train}", f"torchrun --nproc-per-node 1 {train}"]
    endless = ["--output", str(out), "--budget", "1h", "--target-ci", "0.1%"]
    with started([*COMPARE, *commands, *endless]) as (process, log):
        wait_until(lambda: _has_a_block(out), "a block", 200, log)
        os.kill(process.pid, number)
        code = process.wait(60)
        wait_until(lambda: not members(process.marker), "the end of all processes")
        said = log.read_text()
    found = record.read(out)
    assert found.outcome == outcome
    if number == signal.SIGKILL:
        return
    assert code == 128 + number, said
    assert "blocks" in (found.note or "")
    assert outcome in (out / "report.html").read_text()
    assert "Traceback" not in said, said


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
