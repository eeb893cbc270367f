"""The computed all-reduce: the manual shows what the committed measurements give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import live, model, model_picture, model_ways

RERUN = "run: python benchmarks/model.py"


def test_file_picture_and_manual_are_of_the_committed_measurements(tmp_path: Path) -> None:
    live.write_summary(tmp_path / "model.json", model.summary())
    committed = model.RESULTS / "model.json"
    assert committed.read_text() == (tmp_path / "model.json").read_text(), RERUN
    found = model.read("model.json")
    assert model.table(found) in model.MANUAL.read_text(), RERUN
    assert model.PICTURE.read_text() == model_picture.draw(found), RERUN


@pytest.mark.parametrize("way", ["shm", "mpi4py", "raw"])
def test_a_host_sends_no_more_than_the_least_bytes(way: str) -> None:
    link = model_ways.Network(0, 0, 1e9, 1.0)  # a byte per second, and nothing else takes time
    costs = dict.fromkeys(
        ("sync", "switch", "memory_byte", "mpi_message", "mpi_byte", "mpi_byte_cached"), 0.0
    )
    for hosts, per_host in ((2, 2), (4, 8), (16, 1), (128, 8)):
        c = model_ways.Cluster(hosts, per_host, per_host, per_host, link, link)
        calls = (hosts - 1) * model_ways.MESSAGE if way != "raw" else 0
        expected = 2 * (hosts - 1) / hosts * (64 << 20) + calls
        found = model_ways.ms(way, c, 64 << 20, {**costs, "s": 1.0}) / 1000
        assert found == pytest.approx(expected)


def test_the_fit_finds_the_costs_that_have_made_the_points() -> None:
    costs = {"s": 1.0, "gloo_message": 2e-4, "gloo_byte": 1e-9, "sync": 1e-5, "switch": 2e-5}
    costs |= {"small_byte": 1e-10, "memory_byte": 3e-11}
    costs |= {"mpi_message": 1e-6, "mpi_byte": 8e-11, "mpi_byte_cached": 5e-11}
    made = [
        model.Point(p.way, 1, p.per_host, p.size, [model_ways.ms(p.way, c, p.num_bytes, costs)], {})
        for p in model.points()
        if p.hosts == 1
        for c in [p.cluster(costs)]
    ]
    assert model.fit(made) == pytest.approx(costs)
