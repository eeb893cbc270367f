"""The summary: what is in it by hand, and that no record, however little of one, is too little."""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.record import parse
from tests.compare.records import FAILED, Record, make_record, summary_of

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("compare-summary")


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 499)
        yield


def by_arm(rows: list[Record]) -> dict[str, Record]:
    return {row["arm"]: row for row in rows}


def test_a_summary_is_json_and_leaves_the_record_alone() -> None:
    for record in (
        make_record(),
        make_record(1, ranks=(1, 2, 4), scaling="weak"),
        make_record(2, ranks=(1, 2), scaling="strong"),
    ):
        before = copy.deepcopy(record)
        summary = summary_of(record)
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary
        assert record == before
        assert summary_of(record) == summary  # the intervals too


def test_it_needs_no_torch() -> None:
    code = "import sys, hvdtrain.compare.analysis.summary; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def tiny() -> Record:
    """Eight blocks, two ranks, no noise: a takes 10 ms, b 5, alone 4; block 3 is dropped."""
    times = {"a": (10.0, "baseline"), "a again": (10.0, "again"), "b": (5.0, "arm")}
    times["alone"] = (4.0, "ceiling")
    arms = {
        key: {
            "name": key,
            "key": key,
            "ranks": 2,
            "role": role,
            "level": "defaults",
            "status": "measured",
            "samples_per_step": 64,
            "peak_mib": [100.0, 120.0],
        }
        for key, (_, role) in times.items()
    }
    blocks: list[Record] = []
    for index in range(8):
        drift = 1 + index / 10
        windows = {
            # Of three steps: the slowest rank takes ms, ms and 4 ms.
            key: {
                "step_ms": [[ms * drift, 1.0, ms * drift], [1.0, ms * drift, 4 * ms * drift]],
                "cpu_s": [0.03, 0.06],
                "foreign": 0.1 + index / 100,
                "steal": 0.01,
            }
            for key, (ms, _) in times.items()
        }
        dropped = "too busy" if index == 3 else None
        blocks.append({"index": index, "kept": index != 3, "dropped": dropped, "arms": windows})
    for window in blocks[3]["arms"].values():
        window["step_ms"] = [[1000.0]] * 2
    anchors = {"2": {"memcpy_ms": [0.5, 1.0, 9.0]}}
    config = {"max_foreign": 0.5, "proof_steps": 20}
    return {"baseline": "a", "arms": arms, "blocks": blocks, "anchors": anchors, "config": config}


def test_the_speed_table_by_hand() -> None:
    row = by_arm(summary_of(tiny())["speed"])["b"]
    drifts = [1 + i / 10 for i in range(8) if i != 3]
    middle = statistics.median(drifts)
    assert row["blocks"] == 7
    assert row["step_ms"] == pytest.approx(5 * middle)
    assert row["step_low"] < row["step_ms"] < row["step_high"]
    assert row["mean_ms"] == pytest.approx(statistics.mean(drifts) * 5 * 6 / 3)
    assert row["p95_ms"] > 4 * 5 * middle
    assert row["samples_per_s"] == pytest.approx(64 / (5 * middle) * 1000)
    assert (row["ratio"], row["low"], row["high"]) == pytest.approx((2, 2, 2))
    assert row["verdict"] == "faster"
    # (4 ms and a copy of 1) of 5: the drift is in the former alone.
    assert row["percent_of_ideal"] == pytest.approx(100 * (4 * middle + 1) / (5 * middle))
    assert row["ideal_note"] is None
    assert row["cpu_s_per_step"] == pytest.approx(0.09 / 3)
    assert row["peak_mib"] == 120.0


def test_roles_have_their_own_verdicts() -> None:
    summary = summary_of(tiny())
    rows = by_arm(summary["speed"])
    assert {arm: row["verdict"] for arm, row in rows.items()} == {
        "a": "baseline",
        "a again": "same",
        "b": "faster",
        "alone": "ceiling",
    }
    assert summary["aa"][0]["spread"] == pytest.approx(0)
    (ideal,) = summary["ideal"]
    assert ideal["ideal_ms"] == pytest.approx(ideal["no_communication_ms"] + 1.0)
    assert summary["sentences"] == [
        "a again and a: no significant difference (1.00x [1.00, 1.00]; A/A spread 0.0 %)",
        "b is 2.00x [2.00, 2.00] as fast as a",
    ]


def test_over_100_percent_of_ideal_is_said_and_not_clipped() -> None:
    record = tiny()
    for block in record["blocks"]:
        block["arms"]["alone"] = block["arms"]["a"]
    rows = by_arm(summary_of(record)["speed"])
    assert rows["b"]["percent_of_ideal"] > 200
    assert "over 100" in rows["b"]["ideal_note"]
    assert "over 100" in rows["a"]["ideal_note"]  # by the copy alone


def test_load_by_hand() -> None:
    load = summary_of(tiny())["load"]
    assert (load["blocks_measured"], load["blocks_kept"]) == (8, 7)
    assert "over 50 % of the cores are dropped" in load["rule"]
    assert load["dropped"] == [{"block": 3, "reason": "too busy"}]
    assert load["foreign_median"] == pytest.approx(0.135)
    assert load["foreign_max"] == pytest.approx(0.17)
    assert load["steal_max"] == 0.01


def test_a_machine_that_does_not_tell_its_load_is_named() -> None:
    record = make_record(blocks=6)
    for block in record["blocks"]:
        for window in block["arms"].values():
            window["foreign"] = window["steal"] = None
    load = summary_of(record)["load"]
    assert load["foreign_max"] is None
    assert "does not say" in load["rule"]


def test_the_phases_by_hand() -> None:
    record = tiny()
    record["phases"] = [
        {
            "block": i,
            "arms": {
                "a": _phase([9.0, 9.5], 0.5, 1.0, drift),
                "b": _phase([4.0, 3.2], 0.5, 1.0, drift),
                "alone": _phase([4.0, 3.0], 0.5, 1.0, drift),
            },
        }
        for i, drift in enumerate([1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 0.8])
    ]
    record["phases"][2]["arms"]["b"] = _phase([3.5, 3.0], 0.5, 1.0, 1.0)  # below the ceiling
    rows = by_arm(summary_of(record)["phases"])
    assert rows["a"]["compute_ms"] == pytest.approx(3.5)
    assert rows["a"]["straggler_ms"] == pytest.approx(0.5)
    assert rows["a"]["exposed_ms"] == rows["a"]["exposed_raw_ms"] == pytest.approx(5.5)
    assert rows["a"]["input_ms"] == pytest.approx(0.5)
    assert rows["a"]["optimizer_ms"] == pytest.approx(1.0)
    assert rows["b"]["exposed_ms"] == 0.0
    assert rows["alone"]["exposed_ms"] == 0.0
    assert "a again" not in rows  # it had no timed pass


def _phase(compute: list[float], put_in: float, step: float, drift: float) -> Record:
    """Three steps: [rank] -> ms."""
    ranks = {"compute_ms": compute, "input_ms": [put_in] * 2, "optimizer_ms": [step] * 2}
    return {name: [[ms * drift] * 3 for ms in times] for name, times in ranks.items()}


def test_exposed_communication_within_noise_is_zero_and_keeps_its_raw_value() -> None:
    record = tiny()
    record["phases"] = [
        {
            "block": i,
            "arms": {
                "b": _phase([4 + x, 4 + x], 1, 1, 1),
                "alone": _phase([4.0, 4.0], 1, 1, 1),
            },
        }
        for i, x in enumerate([0.3, -0.2, 0.4, 0.1, -0.1, 0.2])
    ]
    row = by_arm(summary_of(record)["phases"])["b"]
    assert row["exposed_ms"] == 0.0
    assert row["exposed_raw_ms"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("passes", "exposed", "shown"),
    [(1, 5.0, None), (5, 5.0, None), (6, 5.0, 5.0), (5, 0.0, 0.0), (5, -0.5, 0.0), (6, -0.5, 0.0)],
)
def test_few_passes_do_not_show_that_communication_is_exposed(
    passes: int, exposed: float, shown: float | None
) -> None:
    record = tiny()
    arms = {
        "b": _phase([4 + exposed] * 2, 1, 1, 1),
        "alone": _phase([4.0, 4.0], 1, 1, 1),
    }
    record["phases"] = [{"block": i, "arms": arms} for i in range(passes)]
    row = by_arm(summary_of(record)["phases"])["b"]
    assert row["exposed_ms"] == shown
    assert row["exposed_raw_ms"] == exposed
    limits = [exposed] * 2 if passes == 6 else [None, None]
    assert [row["exposed_low_ms"], row["exposed_high_ms"]] == limits


@pytest.mark.parametrize(
    ("hosts", "ranks", "title"),
    [
        (None, [2], "digits, 2 ranks on 1 host"),
        ("a:4,b:4", [8], "digits, 8 ranks on 2 hosts"),
        ("a:4,b:4", [2], "digits, 2 ranks on 1 host"),  # b has none of them
        ("a:4,b:4,c:4", [4, 8], "digits, 4, 8 ranks on 2 hosts"),
        ("a:4,b:4", [], "digits, no ranks on 2 hosts"),
    ],
)
def test_the_title_counts_the_hosts(hosts: str | None, ranks: list[int], title: str) -> None:
    record = make_record(blocks=1)
    record["config"].update(hosts=hosts, ranks=ranks)
    assert summary_of(record)["title"] == title


def test_an_arm_is_found_by_role_and_world_size() -> None:
    record = parse(make_record(ranks=(1, 2)))
    assert record.key_of("baseline", 2) == "ddp/gloo x2"
    assert record.key_of("again", 1) == "ddp/gloo again x1"
    assert record.key_of("baseline", 4) == ""


def test_a_failed_arm_is_a_row_with_its_reason() -> None:
    summary = summary_of(make_record())
    row = by_arm(summary["speed"])[FAILED]
    assert row["status"] == "failed"
    assert "exit code 134" in row["reason"]
    assert row["blocks"] == 3
    assert row["verdict"] == "unknown"
    assert any(said.startswith(f"{FAILED} failed: rank 1") for said in summary["sentences"])
    record = make_record()
    for block in record["blocks"]:
        block["arms"].pop(FAILED, None)
    row = by_arm(summary_of(record)["speed"])[FAILED]
    assert row["step_ms"] is None
    assert row["ratio"] is None
    assert row["reason"]


def test_the_truth_of_the_synthetic_record_is_found() -> None:
    rows = by_arm(summary_of(make_record(blocks=60))["speed"])
    assert {arm: row["verdict"] for arm, row in rows.items() if arm != FAILED} == {
        "ddp/gloo": "baseline",
        "ddp/gloo again": "same",
        "by hand (gloo)": "same",
        "ddp/shm": "faster",
        "compat/shm": "faster",
        "ddp/mpi": "slower",
        "no communication": "ceiling",
    }
    assert rows["ddp/shm"]["ratio"] == pytest.approx(60 / 44, rel=0.04)
    assert rows["ddp/mpi"]["ratio"] == pytest.approx(60 / 72, rel=0.04)


def test_each_world_size_has_its_own_baseline() -> None:
    summary = summary_of(make_record(ranks=(2, 4)))
    assert [row["ranks"] for row in summary["aa"]] == [2, 4]
    rows = by_arm(summary["speed"])
    assert rows["ddp/gloo x2"]["verdict"] == rows["ddp/gloo x4"]["verdict"] == "baseline"
    assert rows["ddp/shm x4"]["ratio"] == pytest.approx(72 / 48, rel=0.1)
    assert "ddp/shm x4 is 1." in "".join(summary["sentences"])
    assert "as fast as ddp/gloo x4" in "".join(summary["sentences"])


@pytest.mark.parametrize(
    ("verdicts", "equal", "text"),
    [
        (["bitwise"] * 3, True, "all 4 arms did the same work: parameters bitwise equal after"),
        (["bitwise", "within tolerance"], True, "equal within the tolerance after 20 steps"),
        (["bitwise", "other method"], True, "; by another method, as asked: arm1"),
        (["bitwise", "unequal", "not compared"], False, "unequal work: arm1"),
        (["bitwise", "bitwise", "not compared"], None, "not compared: arm2"),
        (["not compared"], None, "not proved"),
        ([], None, "not proved"),
    ],
)
def test_the_verdict_on_equal_work(verdicts: list[str], equal: bool | None, text: str) -> None:
    record = tiny()
    record["arms"] = {"a": record["arms"]["a"]}
    for number, verdict in enumerate(verdicts):
        key = f"arm{number}"
        record["arms"][key] = {**record["arms"]["a"], "key": key, "name": key, "role": "arm"}
        record.setdefault("parity", []).append({"arm": key, "verdict": verdict})
    found = summary_of(record)["verdict"]
    assert found["equal"] is equal
    assert text in found["text"]
    assert found["text"].startswith("all") is (equal is True and "other method" not in verdicts)


def test_every_world_size_has_a_baseline_among_all() -> None:
    record = make_record(ranks=(1, 2), failed=None)
    record["parity"] = [row for row in record["parity"] if not row["arm"].startswith("ddp/gloo x")]
    same = [arm for arm in record["arms"].values() if arm["role"] != "ceiling"]
    said = summary_of(record)["verdict"]["text"]
    assert said.startswith(f"all {len(same)} arms did the same work"), said


def test_an_arm_that_parted_later_did_not_do_the_same_work() -> None:
    record = make_record()
    record["arms"]["ddp/shm"].update(status="refused", reason="its ranks had parted by the end")
    found = summary_of(record)
    assert found["verdict"] == {"equal": False, "text": "unequal work: ddp/shm"}
    assert "ddp/shm refused: its ranks had parted by the end" in found["sentences"]


def test_an_arm_that_never_started_is_not_among_all() -> None:
    record = make_record()
    record["parity"] = [row for row in record["parity"] if row["arm"] != FAILED]
    found = summary_of(record)["verdict"]
    assert found["equal"] is True
    assert found["text"].startswith("6 arms did the same work")
    assert found["text"].endswith(f"failed before: {FAILED}")


def test_it_is_said_when_parameters_were_still_the_same_at_the_end() -> None:
    record = make_record(failed=None)
    proved = {key: [412, "abc"] for key in record["arms"] if key != "no communication"}
    record["ends"] = [proved, {**proved, "ddp/shm": [520, "other"]}]
    assert summary_of(record)["verdict"]["text"].endswith("20 steps, bitwise again after 412")
    record["ends"] = record["ends"][1:]
    assert summary_of(record)["verdict"]["text"].endswith("20 steps")


def test_an_uneven_pair_is_a_warning() -> None:
    record = make_record()
    for block in record["blocks"]:
        window = block["arms"]["ddp/gloo again"]
        window["step_ms"] = [[1.15 * ms for ms in rank] for rank in window["step_ms"]]
    said = next(s for s in summary_of(record)["sentences"] if s.startswith("ddp/gloo again"))
    assert "is the same as ddp/gloo, and yet 0.87x" in said


@pytest.mark.parametrize(
    ("blocks", "starts", "said"),
    [(40, 3, None), (6, 1, "From 6 blocks of 1 start: "), (9, 2, "From 9 blocks of 2 starts.")],
)
def test_few_blocks_and_one_start_are_said(blocks: int, starts: int, said: str | None) -> None:
    record = make_record(blocks=blocks)
    for block in record["blocks"]:
        block.update(kept=True, generation=block["index"] % starts)
    found = summary_of(record)["caution"]
    assert found == said or (said and found.startswith(said))


def test_it_is_said_why_there_are_few_blocks() -> None:
    record = make_record(blocks=9)  # of which one is dropped
    said = summary_of(record)["caution"]
    assert said.startswith("From 8 blocks of 1 start: one start")
    assert (
        ". 1 more block was dropped, for the load of others, and --max-foreign allows 50%" in said
    )


@pytest.mark.parametrize(("foreign", "said"), [(0.1, False), (0.3, True), (0.7, True)])
def test_a_load_under_which_was_measured_is_said(foreign: float, said: bool) -> None:
    record = make_record(blocks=40)
    for block in record["blocks"]:
        block.update(kept=True, generation=block["index"] % 2, foreign=foreign, steal=0.01)
    found = summary_of(record)["caution"]
    text = f"Measured under load: in the blocks that count others took {100 * foreign + 1:.0f} % of"
    assert (found or "").startswith(text) == said
    assert said or found is None
    for block in record["blocks"]:
        block.update(foreign=0.9 if block["index"] == 3 else 0.0)
    assert "(median; at most 91 %)" in summary_of(record)["caution"]


def test_a_pass_under_load_does_not_count() -> None:
    record = make_record(blocks=40)
    for found in record["phases"][1:]:
        found["kept"] = False
    assert {row["passes"] for row in summary_of(record)["phases"]} == {1}


def test_the_environment_answers_or_says_that_it_cannot() -> None:
    rows = dict(summary_of(make_record())["environment"])
    assert rows["batch per rank"] == "32"
    assert rows["batch of all ranks"] == "64"
    assert rows["warm-up"].startswith("outside of the blocks")
    assert rows["launch ddp/mpi"].startswith("mpirun -np 2")
    record = make_record(blocks=1)
    record["config"].pop("precision")
    record["arms"]["ddp/shm"]["in_force"][1]["threads"] = 2
    record["arms"]["ddp/shm"]["in_force"][0]["variables"]["OMP_NUM_THREADS"] = "7"
    rows = dict(summary_of(record)["environment"])
    assert rows["precision"] == "not recorded"
    assert "1, 2 (ddp/shm)" in rows["threads per rank"]
    assert "(ddp/shm)" in rows["variable OMP_NUM_THREADS"]


def test_interrupted_before_the_first_block() -> None:
    record = make_record(outcome="interrupted", blocks=0)
    record |= {"phases": [], "anchors": {}, "parity": []}
    summary = summary_of(record)
    assert summary["outcome"] == "interrupted"
    assert summary["note"] == "stopped by Ctrl-C"
    assert summary["aa"] == []
    assert {row["step_ms"] for row in summary["speed"]} == {None}
    assert "not enough blocks (0)" in " ".join(summary["sentences"])


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
def test_no_partial_record_is_too_little(data: st.DataObject) -> None:
    record = _pruned(data.draw, make_record(blocks=7, ranks=(1, 2), scaling="weak"))
    summary_of(record)
