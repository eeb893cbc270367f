"""README and manual quote the committed comparison, and nothing else: figures and intervals."""

from __future__ import annotations

import io
from pathlib import Path

from hvdtrain.compare.analysis.speed import Measurements
from hvdtrain.compare.analysis.summary import summarise

from hvdtrain.compare import record
from hvdtrain.compare.report import terminal

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "compare"


def test_the_readme_says_what_the_committed_comparison_says() -> None:
    measured = Measurements(record.read(COMMITTED))
    gloo, horovod = (measured.ratio(base, "ddp/shm") for base in ("ddp/gloo", "horovod/mpi"))
    said = [f"{r.median:.2f} [{r.low:.2f}, {r.high:.2f}] times as fast" for r in (gloo, horovod)]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"a DDP step is {said[0]} over `shm` as over Gloo, and {said[1]} as real Horovod's" in text
    )


def test_the_manual_shows_the_committed_comparison() -> None:
    out = io.StringIO()
    terminal.show(summarise(record.read(COMMITTED)), out, width=100)
    printed = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    assert f"```\n{printed}\n```" in (ROOT / "docs/compare.md").read_text()
