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
from tests.environments import rows
from tests.messages import Message

OLDER = Path(__file__).parents[1] / "released" / "0.1.0" / "compare"
EARLIER = "b=5 gone=1"


def record(times: str) -> Record:
    """A comparison with `a` as baseline, and these times of arms, without noise."""
    step_ms = dict(word.split("=") for word in f"a=10 a_(repeat)=10 {times}".split())
    return parse(exact_record({k.replace("_", " "): float(v) for k, v in step_ms.items()}))


def slower(now: Record, allowed: float, before: Record | None = None) -> dict[str, bool | None]:
    earlier = None if before is None else make_table(before)
    return {row.arm: row.is_slower for row in gate_rows(make_table(now), allowed, earlier)}


@pytest.mark.parametrize(
    ("times", "allowed", "earlier", "found"),
    rows(f"""
    b=10.4 c=10.6 d=5 | 0.05 | | b False c True d False
    b=10.4 | 0.03 | | b True
    # Against what it was relative to the baseline: a slow day makes nothing slower.
    b=5.2 new=50 | 0.05 | {EARLIER} | b False
    b=5.3 new=50 | 0.05 | {EARLIER} | b True
    a=20 a_(repeat)=20 b=10 | 0.01 | {EARLIER} | b False
    # Slower by 8 % in each block: not if the baseline's repeat is by 10 %.
    b=10.8 | 0.05 | | b True
    a_(repeat)=11 b=10.8 | 0.05 | | b False
    a_(repeat)=11 b=10.8 | 0.05 | b=10 | b False
    """),
)
def test_what_an_arm_is_held_against(times: str, allowed: str, earlier: str, found: str) -> None:
    answers = slower(record(times), float(allowed), record(earlier) if earlier else None)
    assert " ".join(f"{arm} {is_slower}" for arm, is_slower in answers.items()) == found


def test_noise_is_no_reason() -> None:
    """Slower by 8 % in the median, but by less than 5 % at the near end of its interval."""
    noisy = record("b=10.8")
    for index, block in enumerate(noisy.blocks):
        times = block.arms["b"].step_ms
        times[:] = [[ms * (0.9 + 0.1 * (index % 3)) for ms in rank] for rank in times]
    for earlier in (None, record("b=10")):
        assert slower(noisy, 0.05, earlier) == {"b": False}


def test_against_a_file_of_an_older_version() -> None:
    """One of 0.1.0, whose arms by hand and without communication this version leaves out."""
    before, today = records.read(OLDER), records.read(OLDER)
    names = ("ddp/shm", "ddp/mpi", "compat/shm", "horovod/mpi", "horovod/gloo")
    for block in today.blocks:
        ms = block.arms["ddp/shm"].step_ms
        ms[:] = [[1.3 * one for one in rank] for rank in ms]
    assert slower(today, 0.05, before) == {**dict.fromkeys(names, False), "ddp/shm": True}


def test_what_the_gate_says(message: Message) -> None:
    """A crash of the new code must not open the gate, nor an old file without blocks that count."""
    failed, dropped, good = (record("b=5.5") for _ in range(3))
    failed.arms["b"].status, failed.arms["b"].reason = "failed", "rank 1 ended"
    for block in dropped.blocks:
        block.kept = False
    said = []
    for now, before in ((failed, None), (good, dropped), (dropped, good), (good, record(EARLIER))):
        (row,) = gate_rows(make_table(now), 0.0, None if before is None else make_table(before))
        said.append(f"{row.is_slower}: {row.text}")
    message("\n".join(said))


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_the_exit_code(tmp_path: Path) -> None:
    """An arm that waits for 0.1 s in every step."""
    line = ["-n", "one", torchrun("twin.py", "right"), "-n", "two", torchrun("twin.py", "slow")]
    code, _, output = compared(tmp_path, *line, *SHORT, "--fail-slower", "5%")
    assert code == 6, output
    assert "gate     two: " in output
    assert "slower than --fail-slower allows: two" in output
