"""The report: what is on the page and in the files, and that nothing is ever blank or unescaped."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.cli.report import command
from hvdtrain.compare import formatting, record
from hvdtrain.compare.analysis.foreign_load import why_dropped
from hvdtrain.compare.analysis.summary import summarise
from hvdtrain.compare.record import parse
from hvdtrain.compare.report import figure_style, figures, html_report, terminal
from hvdtrain.errors import InputError
from tests.compare.records import FAILED, make_record, summary_of
from tests.launching import run

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("compare-report")

Record = dict[str, Any]
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
NASTY = 'a<script>alert("1")</script>&amp;$x^2$'


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two world sizes with a failed arm, with its report."""
    folder = tmp_path_factory.mktemp("compare")
    record.write(parse(make_record(ranks=(1, 2), scaling="weak")), folder)
    html_report.write(record.read(folder), folder)
    return folder


def renamed(found: Record, old: str, new: str) -> Record:
    """The record with an arm called otherwise."""
    text = json.dumps(found).replace(json.dumps(old), json.dumps(new))
    return dict(json.loads(text))


def json_of(folder: Path) -> Record:
    """The summary of the record in a folder."""
    return summary_of(json.loads((folder / record.NAME).read_text()))


def page_of(found: Record, pictures: bool = False) -> str:
    known = parse(found)
    summary = summarise(known)
    drawn = figures.pictures(known, summary) if pictures else []
    return html_report.page(known, summary, drawn)


def text_of(page: str) -> str:
    """What a reader reads, in one line."""
    text = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text)))


# ---------------------------------------------------------------------------------------- files


def test_the_folder_holds_page_pictures_and_tables(written: Path) -> None:
    names = {path.name for path in written.iterdir()}
    pictures = {"steps.png", "ratios.png", "phases.png", "scaling.png"}
    assert names == {"compare.json", "report.html", "speed.csv", "blocks.csv"} | pictures


def test_writing_again_gives_the_same_bytes(written: Path) -> None:
    before = {path.name: path.read_bytes() for path in written.iterdir()}
    html_report.write(record.read(written), written)
    assert {path.name: path.read_bytes() for path in written.iterdir()} == before


def test_the_page_needs_nothing_else(written: Path) -> None:
    page = (written / "report.html").read_text()
    assert "<script" not in page
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert not re.findall(r"url\((?!#)", page)


def test_ids_are_unique_and_all_links_lead_somewhere(written: Path) -> None:
    page = (written / "report.html").read_text()
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


@pytest.mark.parametrize("name", ["steps", "ratios", "phases", "scaling"])
def test_pictures_are_not_blank(written: Path, name: str) -> None:
    from PIL import Image

    with Image.open(written / f"{name}.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert min(pixels.shape[:2]) > 400
    assert (pixels[0, 0] == 255).all()  # on paper, whatever shows it
    assert 0.005 < (pixels.min(axis=2) < 200).mean() < 0.5


def test_speed_csv_is_the_summary(written: Path) -> None:
    summary = json_of(written)
    with (written / "speed.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == [row["arm"] for row in summary["speed"]]
    for row, expected in zip(rows, summary["speed"], strict=True):
        assert row["reason"] == (expected["reason"] or "")
        for name in ("step_ms", "ratio", "low", "samples_per_s", "cpu_s_per_step"):
            value = expected[name]
            assert row[name] == ("" if value is None else str(value))


def test_blocks_csv_has_every_block_with_what_was_measured(written: Path) -> None:
    found = json.loads((written / record.NAME).read_text())
    with (written / "blocks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(block["arms"]) for block in found["blocks"])
    for row in rows:
        block = found["blocks"][int(row["block"])]
        steps = zip(*block["arms"][row["arm"]]["step_ms"], strict=True)
        slowest = [max(ranks) for ranks in steps]
        assert float(row["step_ms"]) == pytest.approx(statistics.median(slowest))
        assert row["kept"] == str(block["kept"])
        assert row["dropped"] == (block["dropped"] or "")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        html_report.write(parse(make_record(blocks=5)), tmp_path)


# ------------------------------------------------------------------------------- what is said


def test_the_verdict_comes_before_any_speed() -> None:
    text = text_of(page_of(make_record(), pictures=True))
    order = ["did the same work", "Times as fast as the baseline", "In words", "In pictures"]
    order += ["Breakdown of a step", "How this was measured", "Environment"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_a_failed_arm_has_its_reason_and_no_blank() -> None:
    page = page_of(make_record())
    row = re.search(rf'<tr[^>]*data-arm="{FAILED}".*?</tr>', page, re.S)
    assert row is not None
    assert "failed after 3 blocks: rank 1 ended with exit code 134" in text_of(row[0])
    assert "horovod-gloo.log" in row[0]


def test_no_cell_of_numbers_is_empty() -> None:
    page = page_of(make_record(ranks=(1, 2), scaling="weak"))
    cells = re.findall(r'<td class="number">(.*?)</td>', page, re.S)
    assert len(cells) > 80
    assert all(text_of(cell).strip() for cell in cells)


@pytest.mark.parametrize("outcome", ["interrupted", "terminated", "failed", "running"])
def test_a_partial_report_says_so_before_all_else(outcome: str) -> None:
    found = make_record(blocks=3, outcome=outcome)
    found["note"] = "the machine <went> away"
    text = text_of(page_of(found))
    assert "This report is partial" in text
    assert "the machine <went> away" in text
    assert text.index("This report is partial") < text.index("Did all arms do the same work?")
    assert "3 blocks that count" in text


def test_a_finished_report_does_not_say_it_is_partial() -> None:
    assert "partial:" not in text_of(page_of(make_record()))


def test_unequal_work_is_the_first_thing_said_with_its_cause() -> None:
    found = make_record()
    found["parity"][3].update(
        verdict="unequal", text="the learning rate differs", cause="scaled by size"
    )
    text = text_of(page_of(found))
    head = text[: text.index("How fast is each arm?")]
    assert "✗" in head
    assert "the learning rate differs" in head
    assert "scaled by size" in head


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
    found = make_record()
    method = page_of(found).partition('id="method"')[2].partition("</section>")[0]
    given = re.findall("<h3>(.*?)</h3>(.*?)(?=<h3>|$)", method, re.S)
    assert len(given) >= 12
    for question, paragraph in given:
        answer = text_of(paragraph).strip()
        assert question.endswith("?")
        assert answer.endswith((".", ")")) or "versions" in question, (question, answer)
        assert "does not say" not in answer, question
        assert "None" not in answer


def test_several_hosts_are_not_called_one() -> None:
    found = make_record()
    one = page_of(found)
    assert "This is 2 ranks on one host with 2 cores" in text_of(one)
    assert "on other hardware, over a network or with another model" in text_of(one)
    found["config"].update(hosts="a:4,b:4", ranks=[8])
    several = page_of(found)
    assert "This is 8 ranks on 2 hosts, compared from one with 2 cores" in text_of(several)
    assert "on other hardware, over another network or with another model" in text_of(several)
    assert "<title>Comparison: digits, 8 ranks on 2 hosts</title>" in several
    for wrong in ("1 host", "one host"):
        assert wrong not in text_of(several)


def test_the_rule_that_ended_it_has_the_longest_time_if_there_was_one() -> None:
    found = make_record()
    rule = "or after 300 s, with at least 6 blocks"
    assert f"{rule}." in text_of(page_of(found))
    found["config"]["longest_s"] = 600.0
    assert f"{rule} that count; or after 600 s, with as many blocks." in text_of(page_of(found))


@pytest.mark.parametrize("num_blocks", [5, 18])
def test_communication_of_few_passes_is_not_claimed(num_blocks: int) -> None:
    """But drawn, and marked: without it the bars of arms would be equal."""
    found = parse(make_record(blocks=num_blocks, failed=None))
    summary = summarise(found)
    few = len(found.phases) < 6
    text = text_of(html_report.page(found, summary, []))
    assert ("from too few passes:" in text) == few
    picture = figures.breakdown(summary)
    assert picture is not None
    drawn = picture.draw(figure_style.WIDE)
    labels = [entry.get_text() for legend in drawn.legends for entry in legend.get_texts()]
    assert ("communication, from too few passes to tell" in labels) == few
    lengths: dict[float, float] = {}
    axes: Any = drawn.axes[0]
    for bar in axes.patches:
        lengths[bar.get_y()] = lengths.get(bar.get_y(), 0.0) + bar.get_width()
    arms = [row.arm for row in summary.speed]
    by_arm = dict(zip(arms, (lengths[place] for place in sorted(lengths)), strict=True))
    assert by_arm["ddp/mpi"] > 1.3 * by_arm["no communication"]


def test_different_threads_are_not_passed_over() -> None:
    found = make_record()
    found["arms"]["ddp/shm"]["in_force"] = [{"threads": 2}, {"threads": 2}]
    assert "NOT the same everywhere: 1, 2 threads" in text_of(page_of(found))
    for rank in found["arms"]["ddp/shm"]["in_force"]:
        rank.update(threads=1, affinity=[0])
    assert "NOT the same cores: from 1 to 2 a rank" in text_of(page_of(found))


def test_where_no_block_counts_it_says_so_once_and_shows_no_figures() -> None:
    found = make_record(blocks=6, failed=None)
    for block in found["blocks"]:
        block.update(kept=False, dropped="others took 60 % of the cores", foreign=0.6, steal=0.0)
    assert found["phases"]
    found["note"] = f"no block counts: 6 were dropped, {why_dropped(parse(found).blocks, 0.5)}"
    out, page = io.StringIO(), page_of(found)
    terminal.show(summarise(parse(found)), out, width=100)
    printed = " ".join(out.getvalue().split())
    for text in (text_of(page), printed):
        assert text.count("6 were dropped, since others took 60 % of the cores") == 1
        assert text.count("--max-foreign allows 50%; end what else runs") == 1
        assert "not enough blocks" not in text
        assert "Breakdown of a step" not in text
    assert printed.count("no block counts") == len(found["arms"]) + 1  # in the table, and below
    assert "<picture" not in page


def test_an_arm_that_was_refused_at_the_end_is_on_top() -> None:
    found = make_record()
    found["arms"]["ddp/shm"].update(status="refused", reason="its ranks had parted")
    page = page_of(found)
    top = text_of(page[: page.index("How fast is each arm?")])
    assert "No: unequal work: ddp/shm" in top
    assert "ddp/shm : its ranks had parted" in top


@pytest.mark.parametrize(
    "found",
    [
        {"arms": {}, "blocks": []},
        pytest.param(make_record(blocks=0), marks=pytest.mark.exhaustive),
        make_record(blocks=1),
        pytest.param(make_record(blocks=6, failed="ddp/gloo"), marks=pytest.mark.exhaustive),
        pytest.param(make_record(blocks=6, ranks=(1,)), marks=pytest.mark.exhaustive),
        make_record(blocks=6, ranks=(1, 2, 3), scaling="strong"),
    ],
    ids=["nothing", "no blocks", "one block", "no baseline", "one rank", "three sizes"],
)
def test_whatever_there_is_is_reported(found: Record, tmp_path: Path) -> None:
    page = html_report.write(parse(found), tmp_path).read_text()
    for key in found["arms"]:
        assert key in html.unescape(page).replace("<wbr>", "")
    terminal.show(summarise(parse(found)), io.StringIO(), width=80)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("compat/shm x4", ["compat/shm x4"]),
        ("my_package.engines:TheBackend/gloo", ["my_package.engines:", "TheBackend/gloo"]),
        ("a" * 60, ["a" * 28, "a" * 28, "a" * 4]),
        ("compat/" + "a" * 30, ["compat/", "a" * 28, "aa"]),
    ],
)
def test_names_break_where_they_have_signs(name: str, lines: list[str]) -> None:
    assert figures.break_name(name, 28) == lines


# ---------------------------------------------------------------------------------- the numbers


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


def test_colours_stay_apart_for_the_colour_blind() -> None:
    for palette in (figure_style.COLOURS, figure_style.DARK):
        used = [palette[name] for name in figure_style.PALETTE]
        for simulated in (None, PROTANOPIA, DEUTERANOPIA):
            labs = [_lab(colour, simulated) for colour in used]
            apart = [np.linalg.norm(a - b) for i, a in enumerate(labs) for b in labs[:i]]
            assert min(apart) > 10  # 2.3 can just be told apart side by side


def test_text_has_contrast_on_light_and_on_dark_paper() -> None:
    for palette in (figure_style.COLOURS, figure_style.DARK):
        for ink in ("ink", "muted"):
            assert _contrast(palette[ink], palette["paper"]) > 4.5


# Machado, Oliveira and Fernandes (2009), severity 1.
PROTANOPIA = np.array(
    [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]
)
DEUTERANOPIA = np.array(
    [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]
)


def _linear(colour: str) -> Any:
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels > 0.04045, ((channels + 0.055) / 1.055) ** 2.4, channels / 12.92)


def _lab(colour: str, simulated: Any) -> Any:
    rgb = _linear(colour)
    if simulated is not None:
        rgb = np.clip(simulated @ rgb, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.maximum(np.array(to_xyz) @ rgb / [0.9505, 1, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _contrast(a: str, b: str) -> float:
    low, high = sorted(float(_linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


# --------------------------------------------------------------------------------- the terminal


def shown(found: Record, width: int) -> list[str]:
    out = io.StringIO()
    terminal.show(summarise(parse(found)), out, width=width)
    return out.getvalue().splitlines()


def test_the_tables_fit_80_columns_with_every_number() -> None:
    found = make_record()
    lines = shown(found, 80)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("✓ all 7 arms did the same work")
    for row in summary_of(found)["speed"]:
        line = next(line for line in lines if line.startswith(f"{row['arm']}  "))
        if row["status"] == "measured":
            assert formatting.figures(row["step_ms"]) in line
            assert row["low"] is None or formatting.interval(row["low"], row["high"]) in line
        else:
            assert "failed" in line
    assert any("exit code 134" in line for line in lines)


def test_long_names_fold_and_numbers_stay_whole() -> None:
    name = "my_package.engines:" + "VeryLongBackendName" * 2
    found = renamed(make_record(), "compat/shm", name)
    lines = shown(found, 80)
    ratio = next(row["ratio"] for row in summary_of(found)["speed"] if row["arm"] == name)
    assert max(map(len, lines)) <= 80
    assert any(formatting.ratio(ratio) in line and line.startswith("my_") for line in lines)


def test_unequal_work_is_listed_on_the_terminal() -> None:
    found = make_record()
    found["parity"][3].update(verdict="unequal", text="the learning rate differs", cause="scaled")
    text = " ".join(" ".join(shown(found, 80)).split())
    assert text.startswith("✗ unequal work")
    assert "the learning rate differs" in text


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
    found = make_record(blocks=6)
    found["arms"]["ddp/mpi"]["status"] = "waiting"
    live = terminal.ProgressTable(io.StringIO())
    live.update(parse(found), "block 7")
    out = io.StringIO()
    from rich.console import Console

    Console(file=out, width=80).print(live.rows(parse(found)))
    lines = out.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(line.startswith("ddp/mpi") and "waiting" in line for line in lines)
    assert any(line.startswith("ddp/gloo ") and "baseline" in line for line in lines)
    assert any("failed: rank 1 ended with" in line for line in lines)


# ----------------------------------------------------------------------------- hvdtrain report


def invoke(*arguments: object) -> None:
    command.main([str(part) for part in arguments], standalone_mode=False)


@pytest.mark.exhaustive
def test_the_command_draws_again_and_prints_the_tables(written: Path) -> None:
    (written / "report.html").unlink()
    finished = run([sys.executable, "-m", "hvdtrain", "report", written], timeout=60)
    assert finished.code == 0, finished.output
    assert finished.output.startswith("✓ all 15 arms did the same work")
    assert finished.output.splitlines()[-1].split() == ["report", str(written / "report.html")]
    assert (written / "report.html").exists()


def test_json_is_the_summary(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invoke(written, "--json")
    assert json.loads(capsys.readouterr().out) == json_of(written)


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
    assert found.verdict.text.startswith("all 8 arms did the same work")
    assert {row.verdict for row in found.speed} >= {"baseline", "faster", "slower", "ceiling"}


@pytest.fixture
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param is not None:
        (tmp_path / "compare.json").write_text(request.param)
    yield tmp_path
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"compare.json"}, "a report was written of a record that cannot be used"


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (None, "no comparison in"),
        ("", "is damaged"),
        ('{"schema": 1, "arms": {', "is damaged"),
        ("[1, 2]", "has schema None"),
        ('{"schema": 2}', "has schema 2; this hvdtrain reads 1"),
        ('{"schema": 1}', "is damaged, or no comparison: the record has no arms, blocks"),
        ('{"schema": 1, "arms": {"a": 3}, "blocks": [1]}', "a is 3, not ArmRecord"),
        (
            '{"schema": 1, "arms": {}, "blocks": [{"index": "x", "arms": {}}]}',
            'index is "x", not int',
        ),
    ],
    indirect=["damaged"],
)
def test_a_record_that_cannot_be_used_is_one_line(damaged: Path, said: str) -> None:
    with pytest.raises(InputError) as caught:
        invoke(damaged)
    assert said in str(caught.value)
    assert str(damaged) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_command_line_ends_with_2_and_one_line(tmp_path: Path) -> None:
    finished = run([sys.executable, "-m", "hvdtrain", "report", tmp_path], timeout=60)
    assert finished.code == 2
    assert len(finished.output.splitlines()) == 1


def test_reports_need_no_torch() -> None:
    modules = "hvdtrain.compare.report.html_report, hvdtrain.compare.report.terminal"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    finished = run([sys.executable, "-c", code], timeout=60)
    assert finished.output.strip() == "False"
