"""The report: what is on the page and in the files, and that nothing is ever blank or unescaped.

test_summary.py computes the numbers by hand; here every place that shows them has those.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from hvdtrain.cli.report import command
from hvdtrain.compare import formatting, record
from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.foreign_load import why_dropped
from hvdtrain.compare.analysis.summary import summarise
from hvdtrain.compare.record import parse
from hvdtrain.compare.report import figures, html_report, terminal
from hvdtrain.errors import InputError
from tests.compare.records import FAILED, make_record, summary_of

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("compare-report")

Record = dict[str, Any]
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
NASTY = 'a<script>alert("1")</script>&amp;$x^2$'


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 499)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two world sizes with a failed arm, with its report."""
    folder = tmp_path_factory.mktemp("compare")
    record.write(parse(make_record(ranks=(1, 2), scaling="weak", blocks=20)), folder)
    html_report.write(record.read(folder), folder)
    return folder


@pytest.fixture(scope="module")
def summary(written: Path) -> Record:
    """The summary of that comparison."""
    return summary_of(json.loads((written / record.NAME).read_text()))


def renamed(found: Record, old: str, new: str) -> Record:
    """The record with an arm called otherwise."""
    text = json.dumps(found).replace(json.dumps(old), json.dumps(new))
    return dict(json.loads(text))


def page_of(found: Record, pictures: bool = False) -> str:
    known = parse(found)
    summary = summarise(known)
    drawn = figures.pictures(known, summary) if pictures else []
    return html_report.page(known, summary, drawn)


def text_of(page: str) -> str:
    """What a reader reads, in one line."""
    text = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text)))


def shown(found: Record, width: int = 80) -> list[str]:
    """The lines on a terminal."""
    out = io.StringIO()
    terminal.show(summarise(parse(found)), out, width=width)
    return out.getvalue().splitlines()


# The numbers


def table(page: str, name: str) -> dict[str, list[str]]:
    """The cells of the rows of a table of the page, by arm."""
    [body] = re.findall(rf'<table id="{name}".*?</table>', page, re.S)
    rows = re.findall(r'<tr[^>]*data-arm="([^"]*)">(.*?)</tr>', body, re.S)
    return {arm: re.findall(r"<td.*?</td>", row, re.S) for arm, row in rows}


def test_the_page_has_the_numbers_of_the_summary(written: Path, summary: Record) -> None:
    page = (written / "report.html").read_text()
    speed = table(page, "speed")
    assert speed.keys() == {row["arm"] for row in summary["speed"]}
    drawn = unquote(page)
    for row in summary["speed"]:
        cells = [text_of(cell) for cell in speed[row["arm"]]]
        if row["status"] == "failed":
            assert f"failed after 3 blocks: {row['reason']}" in cells[0]
            assert f"log: {row['log']}" in cells[0]
            continue
        ratio = formatting.ratio(row["ratio"])
        expected = [f"{ratio} {formatting.interval(row['low'], row['high'])}"]
        for name in ("step_ms", "p95_ms", "samples_per_s"):
            expected.append(formatting.figures(row[name]))
        expected.append(formatting.figures(row["data_ms"], 2))
        expected.append(formatting.figures(1000 * row["cpu_s_per_step"]))
        expected.append(formatting.figures(row["peak_mib"], 4))
        expected.append(str(row["blocks"]))
        for cell, text in zip(cells, expected, strict=True):
            assert cell.strip().startswith(text.strip()), (row["arm"], cell, text)
        assert row["role"] == "baseline" or f">{ratio}" in drawn  # in a picture
    scaling = table(page, "scaling-table")
    for row in summary["scaling"]:
        if row["arm"] in scaling and row["base_kind"] == "same arm":
            assert formatting.share(row["efficiency"]) in scaling[row["arm"]][1]
    assert {"ddp/gloo x2", "ddp/shm x2"} <= scaling.keys()


def test_the_terminals_tables_fit_80_columns_with_every_number() -> None:
    long = "my_package.engines:" + "VeryLongBackendName" * 2
    found = renamed(make_record(), "compat/shm", long)
    lines = shown(found)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("✓ all 7 trained the same")
    table = next(at for at, line in enumerate(lines) if line.startswith("───"))
    for row in summary_of(found)["speed"]:
        name = "my_" if row["arm"] == long else f"{row['arm']}  "
        line = next(line for line in lines[table:] if line.startswith(name))
        if row["status"] == "measured":
            assert formatting.figures(row["step_ms"]) in line
            assert row["role"] == "baseline" or formatting.ratio(row["ratio"]) in line
            assert row["low"] is None or formatting.interval(row["low"], row["high"]) in line
        else:
            assert "failed" in line
    assert any("exit code 134" in line for line in lines)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (12.345, "12.3"),
        (0.08657, "0.0866"),
        (1234.5, "1230"),
        (99.96, "100"),
        (0, "0"),
        (None, "–"),
        (math.nan, "–"),
        (1e-7, "0.000000100"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value: float | None, said: str) -> None:
    assert formatting.figures(value) == said


# Files and pictures


@pytest.mark.exhaustive
def test_the_command_prints_the_summary_and_writes_the_same_files_again(
    written: Path, summary: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {path.name: path.read_bytes() for path in written.iterdir()}
    pictures = {"steps.png", "ratios.png", "scaling.png"}
    assert files.keys() == {"compare.json", "report.html"} | pictures
    command.main([str(written), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == summary
    assert {path.name: path.read_bytes() for path in written.iterdir()} == files


def test_the_page_needs_nothing_else_and_its_links_lead_somewhere(written: Path) -> None:
    page = (written / "report.html").read_text()
    assert "<script" not in page
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert not re.findall(r"url\((?!#)", page)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


@pytest.mark.parametrize("name", ["steps", "ratios", "scaling"])
def test_pictures_are_not_blank(written: Path, name: str) -> None:
    from PIL import Image

    with Image.open(written / f"{name}.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert min(pixels.shape[:2]) > 400
    assert (pixels[0, 0] == 255).all()  # on paper, whatever shows it
    assert 0.005 < (pixels.min(axis=2) < 200).mean() < 0.5


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        html_report.write(parse({"arms": {}, "blocks": []}), tmp_path)


# What the page says


def partial(found: Record) -> None:
    found.update(outcome="interrupted", note="the machine <went> away")


def unequal(found: Record) -> None:
    found["parity"][3].update(verdict="unequal", text="the rate differs", cause="scaled by size")


def refused(found: Record) -> None:
    found["arms"]["ddp/shm"].update(status="refused", reason="its ranks had parted")


def several_hosts(found: Record) -> None:
    found["config"].update(hosts="a:4,b:4", ranks=[8])


def longest_time(found: Record) -> None:
    found["config"]["longest_s"] = 600.0


def other_threads(found: Record) -> None:
    found["arms"]["ddp/shm"]["in_force"] = [{"threads": 2}, {"threads": 2}]


def other_cores(found: Record) -> None:
    found["arms"]["ddp/shm"]["in_force"][0]["affinity"] = [0]


@pytest.mark.parametrize(
    ("change", "on_top", "texts"),
    [
        (partial, True, ["This report is partial", "the machine <went> away", "blocks that count"]),
        (unequal, True, ["✗ No: not the same training", "the rate differs", "scaled by size"]),
        (refused, True, ["✗ No: not the same training: ddp/shm", "ddp/shm : its ranks had parted"]),
        (several_hosts, False, ["8 ranks on 2 hosts, compared from one", "over another network"]),
        (longest_time, False, ["; or after 600 s, with as many blocks."]),
        (other_threads, False, ["NOT the same everywhere: 1, 2 threads"]),
        (other_cores, False, ["NOT the same cores: from 1 to 2 a rank"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_the_page_says(
    change: Callable[[Record], None], on_top: bool, texts: list[str]
) -> None:
    found = make_record(blocks=3)
    usual = text_of(page_of(found))
    change(found)
    page = text_of(page_of(found))
    if on_top:
        page = page[: page.index("How fast is each?")]
    for text in texts:
        assert text in page
    assert not any(text in usual for text in texts if text != "blocks that count")


def test_the_verdict_comes_before_any_speed(written: Path) -> None:
    text = text_of((written / "report.html").read_text())
    order = ["trained the same", "Times as fast as the baseline", "In words", "In pictures"]
    order += ["How this was measured", "Environment"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_names_and_reasons_are_escaped_everywhere() -> None:
    found = renamed(make_record(), "compat/shm", NASTY)
    found["arms"][FAILED]["reason"] = "<img src=x onerror=alert(1)> & so on"
    found["command"] = ["hvdtrain", "<b>"]
    page = page_of(found, pictures=True)
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "<b>'" not in page
    assert NASTY in html.unescape(page)


def test_every_question_of_reviewers_has_an_answer() -> None:
    method = page_of(make_record()).partition('id="method"')[2].partition("</section>")[0]
    given = re.findall("<h3>(.*?)</h3>(.*?)(?=<h3>|$)", method, re.S)
    assert len(given) >= 12
    for question, paragraph in given:
        answer = text_of(paragraph).strip()
        assert answer
        assert "does not say" not in answer, question
        assert "None" not in answer


def test_where_no_block_counts_it_says_so_once_and_shows_no_figures() -> None:
    found = make_record(blocks=6, failed=None)
    for block in found["blocks"]:
        block.update(kept=False, dropped="others took 60 % of the cores", foreign=0.6, steal=0.0)
    found["note"] = f"no block counts: 6 were dropped, {why_dropped(parse(found).blocks, 0.5)}"
    page, printed = page_of(found), " ".join(" ".join(shown(found, 100)).split())
    for text in (text_of(page), printed):
        assert text.count("6 were dropped, since others took 60 % of the cores") == 1
        assert "not enough blocks" not in text
    assert printed.count("no block counts") == len(found["arms"]) + 1  # in the table, and below
    assert "<picture" not in page


@pytest.mark.parametrize(
    "found",
    [
        {"arms": {}, "blocks": []},
        pytest.param(make_record(blocks=0), marks=pytest.mark.exhaustive),
        pytest.param(make_record(blocks=1), marks=pytest.mark.exhaustive),
        pytest.param(make_record(blocks=6, failed="ddp/gloo"), marks=pytest.mark.exhaustive),
        pytest.param(make_record(blocks=6, ranks=(1, 2, 3)), marks=pytest.mark.exhaustive),
    ],
    ids=["nothing", "no blocks", "one block", "no baseline", "three sizes"],
)
def test_whatever_there_is_is_reported(found: Record, tmp_path: Path) -> None:
    page = html_report.write(parse(found), tmp_path).read_text()
    for key in found["arms"]:
        assert key in html.unescape(page).replace("<wbr>", "")
    shown(found)


# The terminal


def test_unequal_work_comes_first_on_the_terminal() -> None:
    found = make_record(blocks=3)
    unequal(found)
    lines = shown(found)
    assert lines[0].startswith("✗ not the same training")
    assert any("the rate differs" in line for line in lines)


def test_without_a_terminal_the_live_table_is_plain_lines() -> None:
    found = make_record(blocks=10)
    out = io.StringIO()
    so_far = parse(found | {"blocks": []})
    with terminal.ProgressTable(out) as live:
        for block in parse(found).blocks:
            so_far.blocks.append(block)
            live.update(so_far, f"block {block.index + 1}")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert [line for line in lines if line.startswith("block")] == [
        f"block {number}" for number in range(1, 11)
    ]
    last = [line for line in lines if line.startswith("after")][-1]
    row = next(row for row in summary_of(found)["speed"] if row["arm"] == "ddp/shm")
    assert last.startswith("after 10 blocks")
    assert f"ddp/shm {formatting.figures(row['step_ms'])} ms" in last
    assert f"({formatting.ratio(row['ratio'])}x)" in last


def test_the_live_table_says_what_each_arm_does() -> None:
    from rich.console import Console

    found = make_record(blocks=6)
    found["arms"]["ddp/mpi"]["status"] = "waiting"
    live = terminal.ProgressTable(io.StringIO())
    live.update(parse(found), "block 7")
    out = io.StringIO()
    Console(file=out, width=80).print(live.rows(parse(found)))
    lines = out.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(line.startswith("ddp/mpi") and "waiting" in line for line in lines)
    assert any(line.startswith("ddp/gloo ") and "baseline" in line for line in lines)
    assert any("failed: rank 1 ended with" in line for line in lines)


# Records of others


def test_control_characters_of_a_received_file_are_escaped(tmp_path: Path) -> None:
    received = {**renamed(make_record(), "compat/shm", "compat\x1b[2J"), "note": "\x9b5n"}
    (tmp_path / record.NAME).write_text(json.dumps(received))
    out = io.StringIO()
    terminal.show(summarise(record.read(tmp_path)), out)
    assert not {"\x1b", "\x9b"} & set(out.getvalue())
    assert "\\x1b[2J" in out.getvalue()
    assert "\\x9b5n" in out.getvalue()


def test_a_file_of_an_older_version_is_read() -> None:
    """It has settings of arms, all-reduces and row numbers, which are left out."""
    found = summarise(record.read(RESULTS / "compare"))
    assert found.verdict.text.startswith("all 8 trained the same")
    assert {row.verdict for row in found.speed} >= {"baseline", "faster", "slower", "ceiling"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no comparison in"),
        ("", "is damaged"),
        ("[1, 2]", "has schema None"),
        ('{"schema": 2}', "has schema 2; this hvdtrain reads 1"),
        ('{"schema": 1}', "is damaged, or no comparison: the record has no arms, blocks"),
        ('{"schema": 1, "arms": {"a": 3}, "blocks": [1]}', "a is 3, not ArmRecord"),
    ],
)
def test_a_record_that_cannot_be_used_is_one_line(
    content: str | None, said: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / record.NAME).write_text(content)
    with pytest.raises(InputError) as caught:
        command.main([str(tmp_path)], standalone_mode=False)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()
