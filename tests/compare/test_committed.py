"""README and manual quote the committed comparison, and nothing else: figures and intervals."""

from __future__ import annotations

import io

from benchmarks import model
from hvdtrain.compare import record
from hvdtrain.compare.analysis.table import make_table
from hvdtrain.compare.formatting import ratio
from hvdtrain.compare.report import html_report, terminal

ROOT = model.RESULTS.parents[1]
README = " ".join((ROOT / "README.md").read_text().split())
COMMITTED = model.RESULTS / "compare"


def test_the_readme_says_what_the_committed_comparison_says() -> None:
    found, said = record.read(COMMITTED), []
    for base in ("ddp/gloo", "horovod/mpi"):
        for arm in found.arms.values():
            arm.role = "baseline" if arm.name == base else "arm"
        rows = {row.arm: row for row in make_table(found).rows}
        said.append(f"{ratio(rows['ddp/shm'].ratio)} times as fast")
    assert (
        f"a DDP step is {said[0]} over `shm` as over Gloo, and {said[1]} as real Horovod's"
        in README
    )


def test_the_readme_says_what_the_committed_collectives_say() -> None:
    ratios = model.read("collectives.json")["ratios"]

    def said(size: str, transport: str) -> str:
        found = ratios[f"all_reduce {size}"][f"{transport} against gloo"]
        middle, low, high = (f"{found[name]:.2g}" for name in ("median", "low", "high"))
        return f"{middle} [{low}, {high}] times"

    assert f"an all-reduce of 25 MB is {said('25 MB', 'shm')} as fast over `shm`" in README
    assert f"one of 1 KB is {said('1 KB', 'shm')} as fast over `shm`" in README


def test_manual_and_page_show_the_committed_comparison() -> None:
    out, table = io.StringIO(), make_table(record.read(COMMITTED))
    terminal.show(table, out, width=100)
    printed = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    assert f"```\n{printed}\n```" in (ROOT / "docs/compare.md").read_text()
    for name in html_report.FILES:
        assert (COMMITTED / name).read_text() == html_report.page(table, name), "hvdtrain report"


def test_manual_and_picture_show_what_the_committed_measurements_compute() -> None:
    for path, text in model.outputs().items():
        assert path.read_text() == text, "run: python benchmarks/model.py"
