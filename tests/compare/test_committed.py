"""README and manual quote the committed comparison, and nothing else: figures and intervals."""

from __future__ import annotations

import io
import json
from pathlib import Path

from hvdtrain.compare import record
from hvdtrain.compare.analysis.table import make_table
from hvdtrain.compare.formatting import ratio
from hvdtrain.compare.report import html_report, terminal

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMMITTED = RESULTS / "compare"


def test_the_readme_says_what_the_committed_comparison_says() -> None:
    found, said = record.read(COMMITTED), []
    for base in ("ddp/gloo", "horovod/mpi"):
        for arm in found.arms.values():
            arm.role = "baseline" if arm.name == base else "arm"
        rows = {row.arm: row for row in make_table(found).rows}
        said.append(f"{ratio(rows['ddp/shm'].ratio)} times as fast")
    text = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"a DDP step is {said[0]} over `shm` as over Gloo, and {said[1]} as real Horovod's" in text
    )


def test_the_readme_says_what_the_committed_collectives_say() -> None:
    ratios = json.loads((RESULTS / "collectives.json").read_text())["ratios"]

    def said(size: str, transport: str) -> str:
        found = ratios[f"all_reduce {size}"][f"{transport} against gloo"]
        middle, low, high = (f"{found[name]:.2g}" for name in ("median", "low", "high"))
        return f"{middle} [{low}, {high}] times"

    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"an all-reduce of 25 MB is {said('25 MB', 'shm')} as fast over `shm`" in text
    assert f"one of 1 KB is {said('1 KB', 'shm')} as fast over `shm`" in text


def test_manual_and_page_show_the_committed_comparison() -> None:
    out, table = io.StringIO(), make_table(record.read(COMMITTED))
    terminal.show(table, out, width=100)
    printed = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    assert f"```\n{printed}\n```" in (ROOT / "docs/compare.md").read_text()
    assert (COMMITTED / "report.html").read_text() == html_report.page(table)
    assert (COMMITTED / "intervals.svg").read_text() == html_report.page(table, "intervals.svg")
