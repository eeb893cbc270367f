"""The summary: every number of a comparison by hand, and that a part of a record is enough.

test_report.py shows that page, tables and terminal have these numbers.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.compare.analysis import stats
from tests.compare.records import FAILED, Record, exact_record, make_record, summary_of

TINY = {"a": 10.0, "a (repeat)": 10.0, "b": 5.0, "alone": 4.0}


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 499)
        yield


def by_arm(rows: list[Record]) -> dict[str, Record]:
    return {row["arm"]: row for row in rows}


def test_a_summary_is_json_and_leaves_the_record_alone() -> None:
    record = make_record(ranks=(1, 2), scaling="weak")
    before = copy.deepcopy(record)
    summary = summary_of(record)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert record == before
    assert summary_of(record) == summary  # the intervals too


# Speed and efficiency


def test_the_speed_table_by_hand() -> None:
    row = by_arm(summary_of(exact_record(TINY))["speed"])["b"]
    drifts = [1 + i / 10 for i in range(8) if i != 3]
    middle = statistics.median(drifts)
    assert row["blocks"] == 7
    assert row["step_ms"] == pytest.approx(5 * middle)
    assert row["step_low"] < row["step_ms"] < row["step_high"]
    assert row["mean_ms"] == pytest.approx(statistics.mean(drifts) * 5 * 6 / 3)
    assert row["p95_ms"] > 4 * 5 * middle
    assert row["samples_per_s"] == pytest.approx(64 / row["mean_ms"] * 1000)
    assert (row["ratio"], row["low"], row["high"]) == pytest.approx((2, 2, 2))
    assert row["cpu_s_per_step"] == pytest.approx(0.09 / 3)
    assert row["peak_mib"] == 120.0
    assert row["data_ms"] == pytest.approx(0.3)


def test_roles_have_their_own_verdicts() -> None:
    summary = summary_of(exact_record({**TINY, "c": 20.0}))
    assert {arm: row["verdict"] for arm, row in by_arm(summary["speed"]).items()} == {
        "a": "baseline",
        "a (repeat)": "same",
        "b": "faster",
        "alone": "ceiling",
        "c": "slower",
    }
    assert summary["aa"][0]["spread"] == pytest.approx(0)
    assert summary["sentences"][1] == "b is 2.00x [2.00, 2.00] as fast as a"


def test_each_world_size_has_its_own_baseline() -> None:
    times = {"a x2": 10.0, "a (repeat) x2": 10.0, "b x2": 5.0}
    times |= {"a x4": 12.0, "a (repeat) x4": 12.0, "b x4": 4.0}
    summary = summary_of(exact_record(times))
    assert [row["ranks"] for row in summary["aa"]] == [2, 4]
    rows = by_arm(summary["speed"])
    assert rows["a x2"]["verdict"] == rows["a x4"]["verdict"] == "baseline"
    assert rows["b x4"]["ratio"] == pytest.approx(3)
    assert "b x4 is 3.00x [3.00, 3.00] as fast as a x4" in summary["sentences"]


def test_a_failed_arm_is_a_row_with_its_reason() -> None:
    record = make_record()
    summary = summary_of(record)
    row = by_arm(summary["speed"])[FAILED]
    assert (row["status"], row["verdict"], row["blocks"]) == ("failed", "unknown", 3)
    assert row["reason"] == record["arms"][FAILED]["reason"]
    assert f"{FAILED} failed: {row['reason']}" in summary["sentences"]
    for block in record["blocks"]:
        block["arms"].pop(FAILED, None)
    row = by_arm(summary_of(record)["speed"])[FAILED]
    assert (row["step_ms"], row["ratio"]) == (None, None)


def test_an_uneven_pair_is_a_warning() -> None:
    said = summary_of(exact_record({**TINY, "a (repeat)": 11.5}))["sentences"]
    assert said[0].startswith("a (repeat) is the same command as a, and yet 0.87x")


@pytest.mark.parametrize(("kind", "same", "single"), [("weak", 0.8, 0.6), ("strong", 0.2, 0.15)])
def test_efficiency_by_hand(kind: str, same: float, single: float) -> None:
    times = {"a x1": 40.0, "a x4": 50.0, "single x1": 30.0, "b x4": 60.0}
    rows = summary_of(exact_record(times, scaling=kind))["scaling"]
    found = {(row["arm"], row["base_kind"]): row["efficiency"] for row in rows}
    assert found[("a x4", "same arm")] == pytest.approx(same)
    assert found[("a x4", "single")] == pytest.approx(single)
    # b does not run at one rank; it still has the process that is alone.
    assert ("b x4", "same arm") not in found
    assert found[("b x4", "single")] == pytest.approx(single * 50 / 60)
    assert all(row["ranks"] == 4 for row in rows)
    assert summary_of(exact_record(times))["scaling"] == []  # it was not asked for


@pytest.mark.parametrize("kept", [1, 5, 6])
def test_fewer_blocks_than_a_speed_needs_have_no_interval(kept: int) -> None:
    blocks = kept if kept <= 3 else kept + 1  # block 3 is dropped
    record = exact_record({"a x1": 40.0, "a x4": 50.0}, scaling="strong", blocks=blocks)
    (row,) = summary_of(record)["scaling"]
    assert row["efficiency"] == pytest.approx(0.2)
    limits = [pytest.approx(0.2)] * 2 if kept == 6 else [None, None]
    assert [row["low"], row["high"]] == limits
    assert row["blocks"] == kept


# Equal work


@pytest.mark.parametrize(
    ("verdicts", "equal", "text"),
    [
        (["bitwise"] * 3, True, "all 4 trained the same: parameters bitwise equal after"),
        (["bitwise", "within tolerance"], True, "equal within the tolerance after 20 steps"),
        (["bitwise", "other method"], True, "; by another method, as asked: arm1"),
        (["bitwise", "unequal", "not compared"], False, "not the same training: arm1"),
        (["bitwise", "bitwise", "not compared"], None, "not compared: arm2"),
        ([], None, "not proved"),
    ],
)
def test_the_verdict_on_equal_work(verdicts: list[str], equal: bool | None, text: str) -> None:
    proved = {f"arm{number}": verdict for number, verdict in enumerate(verdicts)}
    record = exact_record({"a": 10.0, **dict.fromkeys(proved, 10.0)})
    record["parity"] = [{"arm": key, "verdict": verdict} for key, verdict in proved.items()]
    found = summary_of(record)["verdict"]
    assert found["equal"] is equal
    assert text in found["text"]
    assert found["text"].startswith("all") is (equal is True and "other method" not in verdicts)


def test_what_became_of_arms_is_in_the_verdict() -> None:
    record = exact_record({f"{name} x{n}": 10.0 for name in ("a", "b", "c") for n in (1, 2)})
    record["parity"] = [{"arm": f"b x{n}", "verdict": "bitwise"} for n in (1, 2)]
    record["arms"]["c x1"]["status"] = record["arms"]["c x2"]["status"] = "failed"
    text = "4 trained the same: parameters bitwise equal after 20 steps"
    verdict = summary_of(record)["verdict"]
    assert verdict == {"equal": True, "text": f"{text}; failed before: c x1, c x2"}
    proved = {key: [412, "abc"] for key in record["arms"] if key[0] in "ab"}
    record["ends"] = [proved, {**proved, "b x2": [520, "other"]}]
    assert f"{text}, bitwise again after 412; " in summary_of(record)["verdict"]["text"]
    # One whose ranks have parted since.
    record["arms"]["b x2"].update(status="refused", reason="its ranks had parted")
    found = summary_of(record)
    assert found["verdict"] == {"equal": False, "text": "not the same training: b x2"}
    assert "b x2 refused: its ranks had parted" in found["sentences"]


# Load, and what else is said


def test_load_by_hand() -> None:
    record = exact_record(TINY)
    load = summary_of(record)["load"]
    assert (load["blocks_measured"], load["blocks_kept"]) == (8, 7)
    assert load["dropped"] == [{"block": 3, "reason": "too busy"}]
    assert load["foreign_median"] == pytest.approx(0.135)
    assert load["foreign_max"] == pytest.approx(0.17)
    assert load["steal_max"] == 0.01
    for block in record["blocks"]:
        for window in block["arms"].values():
            window["foreign"] = window["steal"] = None
    load = summary_of(record)["load"]
    assert load["foreign_max"] is None
    assert "this machine does not say" in load["rule"]


@pytest.mark.parametrize(
    ("blocks", "starts", "foreign", "dropped", "said"),
    [
        (40, 3, 0.1, 0, None),
        (6, 1, 0.0, 0, "From 6 blocks of 1 start: "),
        (9, 2, 0.0, 0, "From 9 blocks of 2 starts."),
        (9, 2, 0.0, 1, "From 8 blocks of 2 starts. 1 more block was dropped, "),
        (40, 2, 0.3, 0, "Measured under load: in the blocks that count others took 31 % of"),
    ],
)
def test_a_caution(
    blocks: int, starts: int, foreign: float, dropped: int, said: str | None
) -> None:
    record = exact_record({"a": 10.0}, blocks=blocks)
    for block in record["blocks"]:
        block.update(kept=block["index"] >= dropped, generation=block["index"] % starts)
        block.update(foreign=foreign, steal=0.01)
    found = summary_of(record)["caution"]
    assert found == said or (said and found.startswith(said))


@pytest.mark.parametrize(
    ("hosts", "ranks", "title"),
    [
        (None, [2], "digits, 2 ranks on 1 host"),
        ("a:4,b:4", [8], "digits, 8 ranks on 2 hosts"),
        ("a:4,b:4", [2], "digits, 2 ranks on 1 host"),  # b has none of them
        ("a:4,b:4,c:4", [4, 8], "digits, 4, 8 ranks on 2 hosts"),
    ],
)
def test_the_title_counts_the_hosts(hosts: str | None, ranks: list[int], title: str) -> None:
    record = exact_record({})
    record["config"].update(task="digits", hosts=hosts, ranks=ranks)
    assert summary_of(record)["title"] == title


def test_the_environment_answers_or_says_that_it_cannot() -> None:
    record = make_record(blocks=1)
    rows = dict(summary_of(record)["environment"])
    assert rows["batch per rank"] == "32"
    assert rows["batch of all ranks"] == "64"
    assert rows["launch ddp/mpi"].startswith("mpirun -np 2")
    record["config"].pop("precision")
    record["arms"]["ddp/shm"]["in_force"][1]["threads"] = 2
    record["arms"]["ddp/shm"]["in_force"][0]["variables"]["OMP_NUM_THREADS"] = "7"
    rows = dict(summary_of(record)["environment"])
    assert rows["precision"] == "not recorded"
    assert "1, 2 (ddp/shm)" in rows["threads per rank"]
    assert "(ddp/shm)" in rows["variable OMP_NUM_THREADS"]


def _pruned(draw: Any, value: Any, depth: int = 0) -> Any:
    """The value as a comparison that was ended somewhere could have left it."""
    if isinstance(value, dict) and depth < 2:
        return {
            key: _pruned(draw, inner, depth + 1)
            for key, inner in value.items()
            if draw(st.integers(0, 9)) or key in ("arms", "blocks")
        }
    if isinstance(value, list) and draw(st.booleans()):
        return value[: draw(st.integers(0, len(value)))]
    return value


@given(st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.exhaustive
def test_no_partial_record_is_too_little(data: st.DataObject) -> None:
    summary_of(_pruned(data.draw, make_record(blocks=7, ranks=(1, 2), scaling="weak")))
