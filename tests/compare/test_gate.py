"""`--fail-slower`: which arms it calls slower, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.compare import record as records
from hvdtrain.compare.analysis.gate import gate_rows
from hvdtrain.compare.analysis.table import make_table
from hvdtrain.compare.record import Record, parse
from tests.compare.records import exact_record
from tests.compare.test_commands import SHORT, compared, torchrun

OLDER = Path(__file__).parents[1] / "released" / "0.1.0" / "compare"


def record(**step_ms: float) -> Record:
    """A comparison with `a` as baseline, and these times of other arms, without noise."""
    return parse(exact_record({"a": 10.0, "a (repeat)": 10.0, **step_ms}))


def slower(now: Record, allowed: float, before: Record | None = None) -> dict[str, bool | None]:
    earlier = None if before is None else make_table(before)
    return {row.arm: row.is_slower for row in gate_rows(make_table(now), allowed, earlier)}


def test_an_arm_is_held_against_the_baseline() -> None:
    found = slower(record(b=10.4, c=10.6, d=5.0), 0.05)
    assert found == {"b": False, "c": True, "d": False}
    assert slower(record(b=10.4), 0.03) == {"b": True}


def test_an_arm_is_held_against_what_it_was_relative_to_the_baseline() -> None:
    before = record(b=5.0, gone=1.0)
    assert slower(record(b=5.2, new=50.0), 0.05, before) == {"b": False}
    assert slower(record(b=5.3, new=50.0), 0.05, before) == {"b": True}
    # A machine that is half as fast today makes nothing slower.
    slow_day = parse(exact_record({"a": 20.0, "a (repeat)": 20.0, "b": 10.0}))
    assert slower(slow_day, 0.01, before) == {"b": False}


def test_a_report_says_how_fast_each_was_before() -> None:
    now, then = make_table(record(b=5.5)), make_table(record(b=5.0))
    (row,) = gate_rows(now, 0.0, then)
    before = "before 2.00x [2.00, 2.00]"
    assert row.text == f"b: 1.82x [1.82, 1.82] as fast as a, {before}: slower"


def test_noise_is_no_reason() -> None:
    """Slower by 8 % in the median, but by less than 5 % at the near end of its interval."""
    noisy = record(b=10.8)
    for index, block in enumerate(noisy.blocks):
        times = block.arms["b"].step_ms
        times[:] = [[ms * (0.9 + 0.1 * (index % 3)) for ms in rank] for rank in times]
    assert slower(noisy, 0.05) == {"b": False}


def test_the_baselines_own_noise_is_no_reason() -> None:
    """An arm that is 8 % slower in each block, where the repeat of the baseline is 10 % slower."""
    uneven = parse(exact_record({"a": 10.0, "a (repeat)": 11.0, "b": 10.8}))
    assert slower(uneven, 0.05) == {"b": False}
    assert slower(record(b=10.8), 0.05) == {"b": True}


def test_against_a_file_of_an_older_version() -> None:
    """One of 0.1.0, whose arms by hand and without communication this version leaves out."""
    before = records.read(OLDER)
    found = slower(records.read(OLDER), 0.05, before)
    names = ("ddp/shm", "ddp/mpi", "compat/shm", "horovod/mpi", "horovod/gloo")
    assert found == dict.fromkeys(names, False)
    today = records.read(OLDER)
    for block in today.blocks:
        ms = block.arms["ddp/shm"].step_ms
        ms[:] = [[1.3 * one for one in rank] for rank in ms]
    assert slower(today, 0.05, before) == {**found, "ddp/shm": True}


def test_an_arm_that_cannot_be_judged_is_said() -> None:
    """A crash of the new code must not open the gate, nor an old file without blocks that count."""
    failed = record(b=5.0)
    failed.arms["b"].status, failed.arms["b"].reason = "failed", "rank 1 ended"
    (row,) = gate_rows(make_table(failed), 0.05)
    assert (row.is_slower, row.text) == (None, "b: cannot be judged: rank 1 ended")
    dropped = record(b=5.0)
    for block in dropped.blocks:
        block.kept = False
    assert slower(record(b=50.0), 0.05, dropped) == {"b": None}
    assert slower(dropped, 0.05, record(b=5.0)) == {"b": None}


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_the_exit_code(tmp_path: Path) -> None:
    """An arm that waits for 0.1 s in every step."""
    line = ["-n", "one", torchrun("twin.py", "right"), "-n", "two", torchrun("twin.py", "slow")]
    code, _, output = compared(tmp_path, *line, *SHORT, "--fail-slower", "5%")
    assert code == 6, output
    assert "gate     two: " in output
    assert "slower than --fail-slower allows: two" in output
