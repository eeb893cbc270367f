"""README and manual quote the committed comparison, and nothing else: figures and intervals."""

from __future__ import annotations

import io
import re
import shlex

from benchmarks import model
from hvdtrain.compare import record
from hvdtrain.compare.analysis.table import make_table
from hvdtrain.compare.formatting import ratio
from hvdtrain.compare.report import html_report, terminal

ROOT = model.RESULTS.parents[1]
TEXT = (ROOT / "README.md").read_text()
README = " ".join(TEXT.split())
COMMITTED = model.RESULTS / "compare"


def test_the_readme_quotes_the_committed_figures() -> None:
    found, collectives = record.read(COMMITTED), model.read("collectives.json")["ratios"]
    figures = {}
    for base, words in (("ddp/gloo", "Gloo, PyTorch's default on CPUs"), ("horovod/mpi", "MPI")):
        for arm in found.arms.values():
            arm.role = "baseline" if arm.name == base else "arm"
        rows = {row.arm: row for row in make_table(found).rows}
        figures[words] = ratio(rows["ddp/shm"].ratio)
    for size in ("25 MB", "1 KB"):
        one = collectives[f"all_reduce {size}"]["shm against gloo"]
        middle, low, high = (f"{one[name]:.2g}" for name in ("median", "low", "high"))
        figures[f"{size} over shared memory, against Gloo"] = f"{middle} [{low}, {high}]"
    for words, figure in figures.items():
        assert f"{words} | **{figure.replace(' ', '** ', 1)} |" in README
    assert f"commit {str(found.commit)[:7]} " in README


def test_the_readme_shows_what_its_comparison_printed() -> None:
    out, found = io.StringIO(), record.read(model.RESULTS / "readme")
    terminal.show(make_table(found), out, width=140)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    shown = re.search(r"```\nhvdtrain compare (.*)\n```\n[^`]*```\n([^`]*)```", TEXT)
    assert shown
    assert shlex.split(shown[1])[:2] == [arm.command for arm in found.arms.values()][:2]
    assert [line for line in shown[2].splitlines() if line not in lines] == []


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
