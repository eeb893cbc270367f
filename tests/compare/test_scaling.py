"""The cost model finds what made the data, and says when it cannot; efficiencies by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.compare.analysis import efficiency as scaling
from hvdtrain.compare.analysis.efficiency import Link, fit
from hvdtrain.compare.analysis.speed import Measured
from tests.compare.records import GRADIENT_BYTES, TRUE_LINK, Record, make_record

SIZES = (1_000, 30_000, 1_000_000, 25_000_000)


def points(
    alpha_s: float, s_per_byte: float, ranks: tuple[int, ...] = (2,)
) -> list[tuple[int, int, float]]:
    made = Link(alpha_s, s_per_byte, 0, 0)
    return [(n, k, made.ring_s(n, k)) for n in ranks for k in SIZES]


def fitted(found: Link | str) -> Link:
    assert isinstance(found, Link), found
    return found


@settings(deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-8), st.sampled_from([(2,), (4,), (2, 3, 8)]))
def test_the_fit_is_exact_on_data_of_the_model(
    alpha_s: float, s_per_byte: float, ranks: tuple[int, ...]
) -> None:
    link = fitted(fit(points(alpha_s, s_per_byte, ranks)))
    assert link.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert link.s_per_byte == pytest.approx(s_per_byte, rel=1e-6)
    assert link.worst_error < 1e-6


def test_small_messages_weigh_as_much_as_large_ones() -> None:
    """By absolute squares, 10 % too much at 25 MB would take alpha to 0."""
    spoilt = points(3e-4, 1e-9)
    spoilt[-1] = (2, 25_000_000, spoilt[-1][2] * 1.1)
    assert fitted(fit(spoilt)).alpha_s == pytest.approx(3e-4, rel=0.05)


def test_no_parameter_is_ever_negative() -> None:
    """Large messages that outgrow a line would take alpha below 0."""
    link = fitted(fit([(2, 1_000_000, 0.001), (2, 2_000_000, 0.0025), (2, 4_000_000, 0.006)]))
    assert link.alpha_s == 0
    assert link.s_per_byte > 0
    assert link.rms_error > 0.1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "of 0 sizes"),
        ([(2, 1000, 1e-3), (2, 2000, 2e-3), (2, 2000, 2.1e-3)], "of 2 sizes"),
        ([(1, k, 1e-6) for k in SIZES], "of 0 sizes"),  # one rank reduces nothing
        ([(2, k, float("nan")) for k in SIZES], "of 0 sizes"),
        ([(2, 1000, 3e-3), (2, 2000, 2e-3), (2, 3000, 1e-3)], "do not take longer"),
        ([(2, 1000, 1.0), (2, 2000, 1e-4), (2, 10**6, 1e-3), (2, 10**7, 1e-1)], " % off"),
    ],
)
def test_what_cannot_be_fitted_is_said(data: list[tuple[int, int, float]], why: str) -> None:
    found = fit(data)
    assert isinstance(found, str)
    assert why in found


def test_ring_and_server_by_hand() -> None:
    link = Link(alpha_s=1e-3, s_per_byte=1e-9, rms_error=0, worst_error=0)
    assert link.ring_s(4, 1e6) == pytest.approx(6e-3 + 1.5e-3)
    assert link.server_s(4, 1e6) == pytest.approx(2e-3 + 6e-3)
    assert link.ring_s(1, 1e6) == link.server_s(1, 1e6) == 0


def predicted(record: Record) -> Record:
    found = scaling.prediction(record, Measured(record))
    assert found is not None
    return found


def row_of(record: Record, arm: str) -> Record:
    (row,) = [row for row in predicted(record)["rows"] if row["arm"] == arm]
    return dict(row)


def test_the_prediction_passes_through_what_was_measured() -> None:
    record = make_record()
    for row in predicted(record)["rows"]:
        assert row["ring_ms"][row["ranks"].index(2)] == pytest.approx(row["measured_ms"])
        assert row["ring_ms"][0] == pytest.approx(row["compute_ms"])
        assert row["fit_error"] < 0.05


def test_the_link_of_a_record_is_found() -> None:
    row = row_of(make_record(), "ddp/gloo")
    alpha_us, gb_s = TRUE_LINK["gloo"]
    assert row["alpha_us"] == pytest.approx(alpha_us, rel=0.1)
    assert row["beta_gb_s"] == pytest.approx(gb_s, rel=0.1)


def test_a_ring_levels_off_and_a_server_does_not() -> None:
    row = row_of(make_record(), "ddp/gloo")
    communication = {
        kind: dict(zip(row["ranks"], np.array(row[kind]) - row["compute_ms"], strict=True))
        for kind in ("ring_ms", "server_ms")
    }
    ring, server = communication["ring_ms"], communication["server_ms"]
    per_byte_ms = 1 / row["beta_gb_s"] / 1e6
    # From 32 ranks to 64 the ring has 64 more messages and 1/32 of the bytes more.
    grown = 64 * row["alpha_us"] / 1e3 + (1 / 16 - 1 / 32) * GRADIENT_BYTES * per_byte_ms
    assert ring[64] - ring[32] == pytest.approx(grown, rel=1e-6)
    assert server[64] - server[32] == pytest.approx(64 * GRADIENT_BYTES * per_byte_ms, rel=1e-6)


def test_what_was_hidden_stays_hidden() -> None:
    """An arm whose communication disappears behind its computing at two ranks."""
    record = make_record()
    for block in record["blocks"]:
        block["arms"]["ddp/gloo"] = copy.deepcopy(block["arms"]["no communication"])
    row = row_of(record, "ddp/gloo")
    alone, hidden = row["compute_ms"], row["hidden_ms"]
    assert row["ring_ms"][1] == pytest.approx(alone)
    assert hidden > 20
    link = Link(row["alpha_us"] / 1e6, 1e-9 / row["beta_gb_s"], 0, 0)
    for ranks, ms in zip(row["ranks"][1:], row["ring_ms"][1:], strict=True):
        exposed = 1e3 * link.ring_s(ranks, GRADIENT_BYTES) - hidden
        assert ms == pytest.approx(alone + max(0, exposed))


def test_strong_scaling_divides_the_computing() -> None:
    row = row_of(make_record(scaling="strong", ranks=(1, 2)), "ddp/shm x2")
    assert row["ring_ms"][1] == pytest.approx(row["measured_ms"])
    assert row["ring_ms"][0] == pytest.approx(2 * row["compute_ms"])
    assert row["ring_ms"][2] < row["measured_ms"]


def test_every_arm_is_predicted_or_refused_with_a_reason() -> None:
    record = make_record()
    record["collectives"]["ddp/shm"] = record["collectives"]["ddp/shm"][:2]
    record["collectives"]["compat/shm"] = []
    found = predicted(record)
    refused = {row["arm"]: row["reason"] for row in found["refused"]}
    assert refused["ddp/shm"] == "all-reduces of 2 sizes were measured, and it takes 3 to fit"
    assert "of 0 sizes" in refused["compat/shm"]
    assert refused["horovod/gloo"] == "the arm failed"
    assert {row["arm"] for row in found["rows"]} == {"ddp/gloo", "ddp/mpi"}
    assert any("prediction" in said for said in found["assumptions"])


def test_without_the_ceiling_nothing_is_predicted() -> None:
    record = make_record()
    del record["arms"]["no communication"]
    found = predicted(record)
    assert found["rows"] == []
    assert "was not measured" in found["refused"][0]["reason"]


def test_without_collectives_there_is_no_prediction() -> None:
    record = make_record()
    record["collectives"] = {}
    assert scaling.prediction(record, Measured(record)) is None


def test_all_world_sizes_of_an_arm_are_fitted_together_and_predicted_once() -> None:
    record = make_record(ranks=(2, 4))
    rows = [row for row in predicted(record)["rows"] if row["arm"].startswith("ddp/gloo ")]
    assert [(row["arm"], row["measured_ranks"]) for row in rows] == [("ddp/gloo x4", 4)]


def constant(ms: dict[str, float], kind: str) -> Record:
    """A record of six blocks without noise; a key is "name xRANKS"."""
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
        for i in range(6)
    ]
    return {"config": {"scaling": kind}, "arms": arms, "blocks": blocks}


@pytest.mark.parametrize(("kind", "same", "single"), [("weak", 0.8, 0.6), ("strong", 0.2, 0.15)])
def test_efficiency_by_hand(kind: str, same: float, single: float) -> None:
    record = constant({"a x1": 40.0, "a x4": 50.0, "single x1": 30.0, "b x4": 60.0}, kind)
    rows = scaling.efficiency_rows(record, Measured(record))
    found = {(row["arm"], row["base_kind"]): row["efficiency"] for row in rows}
    assert found[("a x4", "same arm")] == pytest.approx(same)
    assert found[("a x4", "single")] == pytest.approx(single)
    # b does not run at one rank; it still has the process that is alone.
    assert ("b x4", "same arm") not in found
    assert found[("b x4", "single")] == pytest.approx(single * 50 / 60)
    assert all(row["ranks"] == 4 for row in rows)


def test_no_efficiency_unless_scaling_was_asked_for() -> None:
    record = make_record(ranks=(1, 2))
    assert scaling.efficiency_rows(record, Measured(record)) == []
