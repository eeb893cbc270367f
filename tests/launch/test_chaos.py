"""Random faults under real launchers: see benchmarks/chaos.py, whose rounds this plays."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import play, summary


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_random_faults(tmp_path: Path) -> None:
    results = tmp_path / "chaos.jsonl"
    bad = play(seed=16, first=0, rounds=25, real_share=0.0, results=results)
    assert bad == 0, summary(results)
