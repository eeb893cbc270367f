"""Measured scaling efficiency by hand."""

from __future__ import annotations

import pytest

from tests.compare.records import Record, make_record, summary_of


def constant(ms: dict[str, float], kind: str, num_blocks: int = 6) -> Record:
    """A record of some blocks without noise; a key is "name xRANKS"."""
    arms: dict[str, Record] = {
        key: {"name": key.split(" x")[0], "ranks": int(key.split(" x")[1]), "key": key}
        for key in ms
    }
    blocks = [
        {
            "index": i,
            "arms": {
                key: {"step_ms": [[t * (1 + i)]] * arms[key]["ranks"]} for key, t in ms.items()
            },
        }
        for i in range(num_blocks)
    ]
    return {"config": {"scaling": kind}, "arms": arms, "blocks": blocks}


@pytest.mark.parametrize(("kind", "same", "single"), [("weak", 0.8, 0.6), ("strong", 0.2, 0.15)])
def test_efficiency_by_hand(kind: str, same: float, single: float) -> None:
    record = constant({"a x1": 40.0, "a x4": 50.0, "single x1": 30.0, "b x4": 60.0}, kind)
    rows = summary_of(record)["scaling"]
    found = {(row["arm"], row["base_kind"]): row["efficiency"] for row in rows}
    assert found[("a x4", "same arm")] == pytest.approx(same)
    assert found[("a x4", "single")] == pytest.approx(single)
    # b does not run at one rank; it still has the process that is alone.
    assert ("b x4", "same arm") not in found
    assert found[("b x4", "single")] == pytest.approx(single * 50 / 60)
    assert all(row["ranks"] == 4 for row in rows)


@pytest.mark.parametrize("num_blocks", [1, 5, 6])
def test_fewer_blocks_than_a_speed_needs_have_no_interval(num_blocks: int) -> None:
    record = constant({"a x1": 40.0, "a x4": 50.0}, "strong", num_blocks)
    (row,) = summary_of(record)["scaling"]
    assert row["efficiency"] == pytest.approx(0.2)
    limits = [pytest.approx(0.2)] * 2 if num_blocks == 6 else [None, None]
    assert [row["low"], row["high"]] == limits
    assert row["blocks"] == num_blocks


def test_no_efficiency_unless_scaling_was_asked_for() -> None:
    record = make_record(ranks=(1, 2))
    assert summary_of(record)["scaling"] == []
